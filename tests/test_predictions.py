"""tests/predictions.py: the arithmetic of the comparison, and that its file is complete."""

import re
from collections import Counter

import pytest

from minifsdp.sim.hardware.gpus import GPUS
from tests.predictions import (
    PUBLISHED,
    RUNS,
    SIM_README,
    Prediction,
    Run,
    error,
    memory_ratio,
    predict,
    quantile,
    ratio,
    summary,
    with_tables,
)

SMALL = "--model gpt-125m --gpu a100-40 --batch 2 --seq 128"


def run(options=SMALL, **published) -> Run:
    return Run("somebody", "fit", options, "", **published)


def test_each_run_has_a_source_a_quote_and_something_that_was_measured():
    names = {source["name"] for source in PUBLISHED["source"]}
    assert {r.source for r in RUNS} == names and len(names) >= 4 and len(RUNS) >= 24
    assert all(source["link"].startswith("https://") for source in PUBLISHED["source"])
    for r in RUNS:
        assert r.quote and bool(r.tokens) != bool(r.tflops) and r.gpu in GPUS
        figure = f"{r.tokens or r.tflops:,g}"
        assert figure in r.quote or figure.replace(",", "") in r.quote, r.quote


def test_half_of_each_source_is_held_out():
    counts = Counter((r.source, r.used) for r in RUNS)
    for name in {r.source for r in RUNS}:
        assert 0 <= counts[name, "fit"] - counts[name, "held out"] <= 1
    assert len({r.options for r in RUNS if r.used == "held out"}) > 20


def test_a_prediction_is_that_of_the_command_line():
    found = predict(run(tokens=1.0))
    assert found.tokens > 10_000 and 0 < found.allocated < found.reserved < 40 and not found.why
    assert predict(run("--model gpt-13b --gpus 1")).why.startswith("CUDA out of memory")


def test_micro_batches_share_an_optimizer():
    """The step with two takes less than twice as long, and more than twice forward and backward."""
    one, two, many = (predict(run(tokens=1.0, micro_batches=n)).tokens for n in (1, 2, 1000))
    assert one < two < many
    slower = [1 / one, 1 / two, 1 / many]  # seconds for each token: a + b / micro-batches
    assert slower[0] - slower[2] == pytest.approx(2 * (slower[1] - slower[2]), rel=0.01)


def test_ratios_and_errors():
    found = Prediction(tokens=50, tflops=30, reserved=11, allocated=4)
    assert ratio(run(tokens=40), found) == 1.25 and ratio(run(tflops=60), found) == 0.5
    assert ratio(run(tokens=40), Prediction(why="no room")) is None
    assert memory_ratio(run(tokens=1, reserved=10), found) == 1.1
    assert memory_ratio(run(tokens=1, allocated=8), found) == 0.5
    assert memory_ratio(run(tokens=1), found) is None
    assert error(1.25) == pytest.approx(0.25) and error(0.8) == pytest.approx(0.25)
    assert quantile([1, 2, 3, 4], 3 / 4) == 3 and quantile([1, 2, 3, 4, 5], 3 / 4) == 4


def test_what_is_said_not_to_fit_counts_against():
    runs = [run(tokens=100.0) for _ in range(4)]
    found = [Prediction(tokens=t) for t in (100, 110, 130)] + [Prediction(why="no room")]
    (line,) = [x for x in summary(list(zip(runs, found, strict=True))).splitlines() if "all" in x]
    assert line == "| fit | all | 3 of 4 | 1.10 | 10% | 30% | 30% | 2 of 4 |"


def test_the_aims_are_met_by_runs_that_no_constant_was_chosen_by():
    """As the table in the README says, which CI makes anew."""
    (line,) = re.findall(r"^\| held out \| all \| .*$", SIM_README.read_text(), re.M)
    fit, close = re.findall(r"(\d+) of (\d+)", line)
    held_out = sum(r.used == "held out" for r in RUNS)
    assert int(fit[1]) == int(close[1]) == held_out
    assert int(fit[0]) / held_out >= 0.9 and int(close[0]) / held_out >= 0.75


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h100"])
def test_the_range_that_is_printed_is_that_of_the_runs_that_were_held_out(name):
    (line,) = re.findall(rf"^\| held out \| {name} \| .*$", SIM_README.read_text(), re.M)
    (within,) = re.findall(r"% \| (\d+)% \| \d+% \| \d+ of \d+ \|$", line)
    assert GPUS[name].error == int(within) / 100


def test_tables_are_written_where_they_belong():
    text = "a\n<!-- make predictions writes: rows -->\nold\n<!-- end -->\nb\n"
    assert with_tables(text, rows="new") == text.replace("old", "new")
