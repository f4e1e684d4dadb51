"""Kinds of values that options take: what is right is converted, what is not gets a kind word.

Each is a function for argparse, which shows the message with the option's name in front of it.
"""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from reprlib import repr as shortened

from minifsdp.sim.memory.alloc_conf import parse

NOTHING_CLOSE = "; --help shows what is"
CLOSE = 0.7
"""Of two names, from which on one may be the other, mistyped. With less, ``tp`` is like
``steps``."""
RECOMPUTE = "none, full, selective, or a share of the blocks, as 1/2"


class ImpossibleError(ValueError):
    """Settings that make sense by themselves, but not together: there is no such run. In a sweep or
    a plan the others are made all the same."""


def meant(given: str, names: Sequence[str]) -> str:
    """The name that may have been meant, as the end of a message; nothing, if none is like it."""
    word = given.lower()
    longer = [name for name in names if word and name.startswith(word)]
    longer.sort(key=lambda name: name != word)  # H100 is an h100 first, and an h100-64 then
    shorter = [name for name in names if word.startswith(f"{name}-")]  # h100-80 is an h100
    # Who mistypes a name has its first letter right, mostly; a100 is no h100 that was mistyped.
    alike = {name.lstrip("-"): name for name in names if _initial(name) == _initial(word)}
    close = [alike[name] for name in get_close_matches(word.lstrip("-"), alike, 1, CLOSE)]
    best = longer or shorter or close
    return f"; did you mean {best[0]}?" if best else ""


def _initial(name: str) -> str:
    return name.lstrip("-")[:1]


def one_of(*names: str, others: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """One of some names.

    Args:
        others: names that there are elsewhere, and what to say of them.
    """

    elsewhere = others or {}

    def kind(given: str) -> str:
        if given in elsewhere:
            raise ArgumentTypeError(elsewhere[given])
        if given not in names:
            raise _refused(f"one of {', '.join(names)}", given, meant(given, names))
        return given

    return kind


def whole(most: int) -> Callable[[str], int]:
    """A whole number of at least 1."""

    def kind(given: str) -> int:
        try:
            value = int(given)
        except ValueError:
            value = 0
        if not 1 <= value <= most:
            raise _refused(f"a whole number from 1 to {most:,}", given)
        return value

    return kind


def number(least: float, most: float) -> Callable[[str], float]:
    """A number."""

    def kind(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # as it is of nan
            raise _refused(f"a number from {least:g} to {most:,.0f}", given)
        return value

    return kind


def limit(given: str) -> str:
    """Units that are alive at once: a whole number, true or none."""
    known = given in ("true", "none") or (given.isdecimal() and 1 <= int(given[:9]) < 10**8)
    if not known:
        raise _refused("true, a whole number of at least 1, or none", given)
    return given


def shape(given: str) -> str:
    """Sizes with an x between them."""
    sizes = given.split("x")
    if given and not all(size.isdecimal() and 1 <= int(size[:9]) <= 10**6 for size in sizes):
        raise _refused("one sample's shape, as 3x224x224 or 588", given)
    return given


def alloc(given: str) -> str:
    """Options of the caching allocator."""
    try:
        parse(given)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return given


def recompute(given: str) -> str:
    """What of the forward is done again; see training/recompute.py."""
    try:
        share_of(given)
    except ValueError as error:
        raise _refused(RECOMPUTE, given) from error
    return given


def share_of(how: str) -> Fraction:
    """How many of the blocks ``--recompute`` is for.

    Raises:
        ValueError: it is nothing that this option can be.
    """
    if how in ("none", "full", "selective"):
        return Fraction(how != "none")
    try:
        share = Fraction(how)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 1:
        raise ValueError(f"--recompute is {RECOMPUTE}, not {shortened(how)}")
    return share


def _refused(expected: str, given: str, end: str = "") -> ArgumentTypeError:
    return ArgumentTypeError(f"expected {expected}, got {shortened(given)}{end}")
