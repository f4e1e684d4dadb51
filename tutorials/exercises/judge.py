"""Compares what the reference gives with what the student's functions give, in words."""

import math
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutorials.exercises.catalog import Check
from tutorials.exercises.observe import Seen
from tutorials.exercises.sandbox import Report


class Verdict(NamedTuple):
    """``message`` says in a few sentences why it is not right."""

    state: str  # "right", "wrong", "inconclusive"
    message: str = ""


def verdict(check: Check, expected: Report, found: Report) -> Verdict:
    """Whether what was seen is right.

    Args:
        expected: of the reference.
        found: of the student's functions.
    """
    if expected.inconclusive:
        return Verdict("inconclusive", f"of the reference, {expected.ended}")
    assert not expected.ended, f"the reference fails in {check.function.__name__}: {expected.ended}"
    differences = []
    for rank, (want, got) in enumerate(zip(expected.ranks, found.ranks, strict=True)):
        if want is None or got is None:
            continue
        if found.ended:  # what was seen before that may say why
            want = want[: len(got)]
        first, message = _difference(check, want, got)
        if message:
            words = f"rank {rank}: {message}" if check.ranks > 1 else message
            differences.append((first, rank, words))
    # The earliest one: what follows on other ranks is mostly its consequence.
    if differences:
        return Verdict("wrong", min(differences)[2])
    if found.inconclusive:
        return Verdict("inconclusive", found.ended)
    return (
        Verdict("wrong", found.ended + _until(expected, found)) if found.ended else Verdict("right")
    )


def _until(expected: Report, found: Report) -> str:
    """What the rank that has come least far was about to show."""
    seen = [len(got or ()) for got in found.ranks]
    rank = seen.index(min(seen))
    left = (expected.ranks[rank] or [])[seen[rank] :]
    return f" (while looking at: {left[0].what})" if left and left[0].what else ""


def _difference(check: Check, expected: list[Seen], found: list[Seen]) -> tuple[int, str]:
    """The number of the first observation that differs, and how; no words if none does."""
    for i, want in enumerate(expected):
        if i >= len(found):
            return i, f"{want.what} was never reached"
        got = found[i]
        if not got.what:
            return i, _raised(check, want, got.value)
        if got.what != want.what:
            return i, f"expected {want.what} here, and found {got.what}"
        if not _fits(want, got.value):
            message = f"{want.what}: expected {_expected(want)}, found {show(got.value)}"
            message += _where_shown_alike(want.value, got.value) + "."
            because = _because(check, want, got.value)
            return i, f"{message} Likely: {because}." if because else message
    if len(found) > len(expected):
        last = found[len(expected)]
        unexpected = f"{last.what}: not expected"
        return len(expected), unexpected if last.what else _raised(check, None, last.value)
    return 0, ""


def _raised(check: Check, want: Seen | None, error: dict[str, str]) -> str:
    at = f"{error['at']}: " if error["at"] else ""
    # Errors of the engine can be long, and their first sentences say what has happened.
    said = " ".join(error["message"].split())
    said = said if len(said) <= 400 else said[:400] + " ..."
    message = f"{at}{error['raised']}: {said}" if said else f"{at}{error['raised']}"
    tells_all = "unexpected keyword argument" in said or "positional argument" in said
    because = _because(check, want, error) if want and not tells_all else None
    if "partially initialized module" in said:
        because = (
            "the file imports what needs this file itself. Take each name from the file that "
            "defines it, as the imports at the top do (from .unit import Unit)"
        )
    doing = f" (while looking at: {want.what})" if want and want.what else ""
    return message + doing + (f". Likely: {because}." if because else "")


def _fits(want: Seen, got: Any) -> bool:
    if want.rule == "equal":
        return equal(want.value, got)
    if want.rule == "close to":
        return _close(want.value, got, want.slack)
    if not isinstance(got, (int, float)):
        return False
    bound = want.value * (1 + want.slack if want.rule == "at most" else 1 - want.slack)
    return got <= bound if want.rule == "at most" else got >= bound


def _expected(want: Seen) -> str:
    if want.rule in ("equal", "close to"):
        return show(want.value)
    about = f" (within {want.slack:.0%})" if want.slack else ""
    return f"{want.rule} {show(want.value)}{about}"


def _close(want: Any, got: Any, slack: float) -> bool:
    """Whether two tensors, or two numbers, differ by rounding only."""
    if isinstance(want, float) and isinstance(got, float):
        return _close(torch.tensor(want), torch.tensor(got), slack)
    if not (isinstance(want, Tensor) and isinstance(got, Tensor)) or equal(want, got):
        return equal(want, got)
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    finite = want.isfinite()
    if not equal(want[~finite], got[~finite]):
        return False
    largest = float(want[finite].double().abs().max()) if finite.any() else 0.0
    difference = (want[finite].double() - got[finite].double()).abs()
    return bool((difference <= slack * largest).all())


def equal(want: Any, got: Any) -> bool:
    """Whether two observations are the same; tensors in every bit, NaN like NaN."""
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        same = want.shape == got.shape and want.dtype == got.dtype
        return same and bool(((want == got) | ((want != want) & (got != got))).all())
    if isinstance(want, list) and isinstance(got, list):
        return len(want) == len(got) and all(map(equal, want, got))
    if isinstance(want, dict) and isinstance(got, dict):
        return want.keys() == got.keys() and all(equal(want[k], got[k]) for k in want)
    if isinstance(want, float) and isinstance(got, float) and math.isnan(want):
        return math.isnan(got)
    return type(want) is type(got) and bool(want == got)


def show(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, Tensor):
        flat = value.flatten()
        numbers = ", ".join(f"{x:.6g}" for x in flat[:8].tolist()) + ", ..." * (len(flat) > 8)
        kind = "" if value.dtype is torch.float32 else f" {value.dtype}"
        shape = "" if value.dim() == 1 and len(flat) <= 8 else f" of shape {list(value.shape)}"
        return f"[{numbers}]{shape}{kind}"
    if isinstance(value, list):
        text = "[" + ", ".join(map(show, value)) + "]"
        return text if len(text) < 200 else text[:200] + " ...]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _where_shown_alike(want: Any, got: Any) -> str:
    """What differs, where :func:`show` leaves it out: the last digits of a number, or the end of a
    long list."""
    if type(want) is not type(got) or show(want) != show(got):
        return ""
    if isinstance(want, float):
        return f" (they differ by {got - want:.3g})"
    if isinstance(want, list):
        for i, (one, other) in enumerate(zip_longest(want, got, fillvalue="nothing")):
            if show(one) != show(other):
                return f" (the first difference is at [{i}]: {show(one)}, and {show(other)})"
    return ""


def _because(check: Check, want: Seen, got: Any) -> str | None:
    """The likely mistake: what the check knows of its concept, or what numbers show."""
    try:
        because = check.because(want.what, want.value, got)
    except Exception:  # what was found may be anything, and the student has done nothing to it
        because = None
    return because or of_tensors(want.value, got) or _of_type(want.value, got)


def _of_type(want: Any, got: Any) -> str | None:
    """Of what is shown as what is expected: 2.0 for 2, for example."""
    if show(want) != show(got) or type(want) is type(got):
        return None
    return f"it is of type {type(got).__name__}, and should be of type {type(want).__name__}"


def of_tensors(want: Any, got: Any) -> str | None:
    """What is wrong with a tensor, where that can be seen without knowing what it is."""
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        found = [of_tensors(a, b) for a, b in zip(want, got, strict=True) if not equal(a, b)]
        return found[0] if found else None
    if not (isinstance(want, Tensor) and isinstance(got, Tensor)):
        return None
    if want.shape != got.shape:
        return f"the shape should be {list(want.shape)}, and is {list(got.shape)}"
    if want.dtype != got.dtype:
        return f"the dtype should be {want.dtype}, and is {got.dtype}"
    if not want.is_floating_point():
        return None
    if got.isnan().any() and not want.isnan().any():
        return "there is NaN: memory was read before the work that fills it was waited for"
    if (factor := ratio(want, got)) is not None:
        return f"it is exactly {factor:g} x what it should be"
    largest = float((want.double() - got.double()).abs().max())
    scale = float(want.double().abs().max())
    if largest < 1e-5 * scale:
        return f"it differs by {largest:.2g} only: in the order of additions, or in a cast"
    return None


def of_training(what: str, want: Any, got: Any) -> str | None:
    """What a difference in the losses and parameters of parallel.train() means."""
    if isinstance(got, dict) and "does not require grad" in got.get("message", ""):
        return "autograd does not know what the modules compute with: no .data, no detach()"
    if what == "loss of step 1" and isinstance(got, dict) and "raised" in got:
        return "a step has a forward and a backward: are parameters gathered, in time, for both"
    if what == "loss of step 1":
        return "the first loss needs the parameters only: are they gathered, in order, and in time"
    if what.startswith("loss of step"):
        return "the first step is right and a later one is not: look at the gradient's way"
    if what.startswith("parameter"):
        return "the losses are right and the parameters are not: look at the last gradient's way"
    return None


def is_rounded(want: Any, got: Any) -> bool:
    """Whether these are tensors that differ by as little as a lower precision makes them."""
    both = isinstance(want, Tensor) and isinstance(got, Tensor)
    return both and not equal(want, got) and _close(want, got, slack=0.01)


def ratio(want: Any, got: Any) -> float | None:
    """The number that all elements of ``want`` have to be multiplied by to get ``got``."""
    if not (isinstance(want, Tensor) and isinstance(got, Tensor)) or want.shape != got.shape:
        return None
    where = want != 0
    if not where.any() or got[~where].any():
        return None
    factors = got[where].double() / want[where].double()
    factor = float(factors[0])
    if not factor or abs(factor - 1) < 1e-3 or not math.isfinite(factor):
        return None
    close = (factors - factor).abs().max() <= 1e-5 * abs(factor)
    return round(factor, 4) if close else None
