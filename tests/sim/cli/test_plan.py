"""sim/cli/plan.py: the fastest settings that fit, and why the others lose."""

import argparse
import io
import json
import random
import re
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest

from minifsdp.sim.__main__ import main
from minifsdp.sim.cli import plan as module
from minifsdp.sim.cli.options import add_settings
from minifsdp.sim.cli.plan import VALUES, better, why

pytestmark = pytest.mark.xdist_group("plan")  # whose fixtures take seconds
SMALL = ["plan", "--model", "tests.sim.test_main:small", "--nodes", "2", "--batch", "64"]
NOTHING = ["--strategy", "no_shard", "--memory", "0.01"]  # fits into so few GiB
FIXED = ["--precision", "bf16", "--unit", "block", "--recompute", "none", "--offload", "no"]


def figures(step=1.0, reserved=1 << 30, fits=True, **more):
    zeros = dict.fromkeys(("compute", "exposed communication", "idle"), 0.0)
    return {"fits": fits, "step": step, "peak reserved": reserved, **zeros, **more}


@pytest.mark.parametrize(
    "one, other",
    [
        (figures(step=1.0), figures(step=1.1)),
        (figures(step=9.0), figures(fits=False)),
        (figures(step=1.001, reserved=1), figures(step=1.0, reserved=2)),
    ],
)
def test_better_is_to_fit_then_to_be_fast_then_to_be_small(one, other):
    assert better(one, other) and not better(other, one)
    assert not better(one, one)


@pytest.mark.parametrize(
    "run, words",
    [
        (figures(fits=False), "does not fit"),
        (figures(), "the same"),
        (figures(reserved=3 << 30), "as fast, +2,048 MiB"),
        (figures(2.0, idle=0.5, compute=0.4), "2.00 x the time, waits for the host 500.0 ms more;"),
        (figures(1.5, compute=0.5), "1.50 x the time, computes 500.0 ms more; +0 MiB"),
    ],
)
def test_why_a_run_loses(run, words):
    assert why(run, figures()).startswith(words)


@pytest.fixture(scope="module")
def search():
    """What a search prints, and the runs that it makes."""
    measure, made, out = module.measure, [], io.StringIO()

    def noted(options, steps):
        made.append(str(options))
        return measure(options, steps)

    with patch.object(module, "measure", noted), redirect_stdout(out):
        assert main([*SMALL, *FIXED]) == 0
    return out.getvalue(), made


@pytest.mark.slow
def test_every_value_of_every_free_setting_is_told_and_none_is_better(search):
    best, _, step, largest, _, *others = search[0].splitlines()
    free = {name: VALUES[name] for name in ("strategy", "limit", "backward", "forward")}
    chosen = dict(zip((w[2:] for w in best.split()[::2]), best.split()[1::2], strict=True))
    assert chosen.keys() == free.keys()
    told = {tuple(line.split()[:2]) for line in others}
    assert told == {
        (f"--{name}", v) for name, values in free.items() for v in values if v != chosen[name]
    }
    assert re.match(r"step [\d.]+ ms, [\d,]+ MiB reserved, bound by \w+", step)
    assert re.fullmatch(r"the largest batch that fits with these settings: \d+", largest)
    slower = [float(f) for f in re.findall(r"([\d.]+) x the time", "".join(others))]
    assert slower and min(slower) >= 1.0


def test_a_search_that_goes_in_a_circle_ends(monkeypatch):
    """Each is better than the next: a little slower and smaller, or else much faster."""
    circle = [figures(1.0, 1), figures(0.996, 2), figures(0.992, 3)]
    assert all(better(circle[k - 1], circle[k]) for k in range(3))
    by_limit = dict(zip(VALUES["limit"], circle * 2, strict=False))
    monkeypatch.setattr(module, "measure", lambda options, steps: (by_limit[options.limit], None))
    search = module.Search(argparse.Namespace(), {"limit": "true"}, lambda text: None)
    assert search.best()["limit"] in by_limit


SOME = [
    [],
    ["--offload", "no"],
    ["--unit", "block", "--recompute", "none"],
    ["--precision", "bf16", "--strategy", "full_shard", "--offload", "no"],
    ["--limit", "2", "--backward", "pre"],
]


def made_up(seed):
    """Step times and memory with interactions between settings; some do not fit."""

    def measure(options, steps):
        rng = random.Random(f"{seed} {sorted(vars(options).items())}")
        of_some = random.Random(f"{seed} {options.unit} {options.strategy} {options.offload}")
        step = of_some.choice((1.0, 2.0, 3.0)) * rng.choice((1.0, 1.0, 1.1, 1.3))
        return figures(step, of_some.choice((1, 2, 3)) << 30, rng.random() < 0.8), None

    return measure


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fixed", SOME, ids=" ".join)
def test_no_single_change_makes_it_better(fixed, seed, monkeypatch):
    monkeypatch.setattr(module, "measure", made_up(seed))
    search, usual = a_search(fixed)
    chosen = search.best()
    if not search.figures(chosen)["fits"]:  # nothing that is one change away from what is lean does
        return
    for name in usual:
        for value in VALUES[name]:
            other = search.figures({**chosen, name: value})
            assert not better(other, search.figures(chosen)), (name, value)
            if value == usual[name]:  # and what is unusual is there for a reason
                assert value == chosen[name] or better(search.figures(chosen), other)


def a_search(fixed):
    """Of what is not fixed; and the usual values of that."""
    p = argparse.ArgumentParser()
    add_settings(p)
    usual = {name: p.get_default(name) for name in VALUES if f"--{name}" not in fixed}
    return module.Search(p.parse_args(fixed), usual, lambda text: None), usual


def test_what_is_reset_to_the_usual_is_searched_again(monkeypatch):
    """As with gpt-1.3b: without prefetches one large unit is fastest, and with it prefetches make
    no difference. With the usual prefetches small units are faster still."""
    times = {"model": 1.0, "part": 1.2, "block": 1.1}

    def measure(options, steps):
        prefetches = options.unit == "block" and options.backward == "pre"
        step = 0.9 if prefetches else times[options.unit]
        return figures(step, fits=options.recompute == "full"), None

    monkeypatch.setattr(module, "measure", measure)
    fixed = ["--strategy", "full_shard", "--precision", "bf16", "--limit", "2", "--forward", "none"]
    search, _ = a_search([*fixed, "--offload", "no"])
    assert search.best() == {"recompute": "full", "unit": "block", "backward": "pre"}


def test_where_two_changes_are_needed_to_fit_it_begins_with_what_is_lean(monkeypatch):
    def measure(options, steps):
        return figures(fits=options.recompute == "full" and options.unit == "part"), None

    monkeypatch.setattr(module, "measure", measure)
    search, _ = a_search(["--precision", "bf16"])
    chosen = search.best()
    assert (chosen["recompute"], chosen["unit"]) == ("full", "part")


@pytest.mark.parametrize("given, fits", [(1, 1), (1, 2), (3, 3), (8, 100), (2, 7)])
def test_the_largest_batch_that_fits(given, fits, monkeypatch):
    made = []

    def measure(options, steps):
        made.append(options.batch)
        return figures(fits=options.batch <= fits), None

    monkeypatch.setattr(module, "measure", measure)
    search, usual = a_search(["--batch", str(given)])
    assert search.largest_batch(usual) == fits
    assert len(made) == len(set(made)) < 12


@pytest.mark.slow
def test_what_makes_no_difference_stays_as_it_usually_is(capsys):
    """Without gathers there is nothing to limit or to prefetch."""
    assert main([*SMALL, *FIXED, "--strategy", "no_shard"]) == 0
    (best, *_) = capsys.readouterr().out.splitlines()
    assert best == "--limit true --backward pre --forward none"


def test_what_cannot_be_run_is_left_out_with_a_word(capsys):
    """The kernel "flash" knows no 32 bits."""
    words = ["--model", "gpt-125m", "--layers", "2", "--attention", "flash", "--seq", "64"]
    fixed = [*FIXED[2:], "--strategy", "full_shard", "--limit", "2", "--backward", "pre"]
    assert main(["plan", *words, "--batch", "1", *fixed, "--forward", "none"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^--precision fp32 +not possible: --attention: none of the attention", out, re.M
    )
    assert main(["plan", *words, *fixed, "--forward", "none", "--precision", "fp32"]) == 2
    error = capsys.readouterr().err
    assert "--attention: none of the attention kernels" in error
    assert error.endswith("; here by --attention auto\n")


def test_where_nothing_fits_that_is_said(capsys):
    assert main([*SMALL, *FIXED, *NOTHING]) == 1
    out = capsys.readouterr().out
    least = "--limit 1 --backward none --forward none"
    assert out.startswith(f"Nothing fits, not even {least}.\nCUDA out of memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory, status, says",
    [("39", 0, "All settings are given.\n\nstep"), ("0.02", 1, "It does not fit.\nCUDA out of")],
)
def test_where_nothing_is_left_to_choose_that_is_said(memory, status, says, capsys):
    given = ["--strategy", "full_shard", "--limit", "2", "--backward", "pre", "--forward", "none"]
    assert main([*SMALL, *FIXED, *given, "--memory", memory]) == status
    assert capsys.readouterr().out.startswith(says)


@pytest.mark.slow
def test_one_document_has_all_that_is_printed(search, capsys):
    assert main([*SMALL, *FIXED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best, _, step, largest, _, *others = search[0].splitlines()
    assert " ".join(f"--{name} {value}" for name, value in found["settings"].items()) == best
    assert step.startswith(f"step {found['step'] * 1e3:,.1f} ms") and found["fits"]
    assert largest.endswith(f": {found['largest batch']}")
    told = [f"--{other['setting']} {other['value']}" for other in found["others"]]
    assert told == [" ".join(line.split()[:2]) for line in others]
    assert [o["instead"] for o in found["others"]] == [line[39:] for line in others]
    assert main([*SMALL, *FIXED, *NOTHING, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (
        not found["fits"] and "CUDA out of memory" in found["why"] and "limit" in found["settings"]
    )


def test_each_run_is_made_once(search):
    _, made = search
    assert made and len(made) == len(set(made))


def test_a_wrong_option_gets_one_line(capsys):
    assert main(["plan", "--strategy", "best"]) == 2
    assert "--strategy: expected one of full_shard, " in capsys.readouterr().err
    assert main(["plan", "--svg", "step.svg"]) == 2
    assert "--svg is not known here" in capsys.readouterr().err
