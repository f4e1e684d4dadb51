"""scale.py: that what it compares is the same work, and what its tables in the README say."""

import re

import pytest

from minifsdp.sim.cli.options import ENGINES
from tests import scale
from tests.claims import README
from tests.predictions import accumulated, optimizer_seconds
from tests.scale import FULL, HYBRID, MODEL, Point, all_places, points, report, rows, strong, weak

SMALL = MODEL.replace("gpt-7b", "gpt-125m").replace("full --seq 2048", "none --seq 128")


@pytest.fixture
def small(monkeypatch):
    """Another model, whose runs take a second."""
    monkeypatch.setattr(scale, "MODEL", SMALL)


def test_batches_are_those_of_weak_and_of_strong_scaling():
    for strategy in (FULL, HYBRID):
        for gpus in scale.GPUS:
            assert weak(strategy, gpus) == Point(strategy, gpus, scale.WEAK, 1)
            place = strong(strategy, gpus)
            assert place.gpus * place.batch * place.times == scale.STRONG
            assert 1 <= place.batch <= scale.WEAK
    assert strong(FULL, 4096) == Point(FULL, 4096, 1, 1)
    assert (HYBRID, 8) not in {point[:2] for point in points(weak)}


@pytest.mark.slow
def test_all_engines_send_the_same_and_compute_the_same(small):
    """They differ in when, not in what. A contender with an option of its own (a unit that is kept,
    a prefetch of the wrong one that is gathered twice) would send another amount."""
    for strategy in (FULL, HYBRID):
        found = [report((engine, strategy, 64, 1)) for engine in ENGINES]
        assert len({each["bytes sent"] for each in found}) == 1 and found[0]["bytes sent"] > 0
        assert len({each["flops"] for each in found}) == 1


def test_more_gpus_mean_more_latency_and_smaller_shards(small):
    few, many, hybrid = (
        report(("minifsdp", *where, 1)) for where in ((FULL, 64), (FULL, 4096), (HYBRID, 4096))
    )
    assert many["communication"] > 10 * few["communication"]
    assert hybrid["communication"] < many["communication"] / 2
    assert many["peak reserved"] < few["peak reserved"] < hybrid["peak reserved"]


@pytest.mark.slow
def test_a_step_of_several_batches_is_at_most_what_is_said_of_it(small):
    """The simulated one lets a batch begin while the last one's gradients are being reduced."""
    one = report(("minifsdp", FULL, 64, 1))
    said = accumulated(one["step"], one["optimizer"], 3)
    command = f"{SMALL} --nodes 8 --batch 1 --accumulate 3"
    gpu = scale.simulate(scale.parser().parse_args(command.split()), steps=2)
    assert 0.8 * said < gpu.report()["step"] < 1.05 * said
    assert 0 < optimizer_seconds(gpu) < gpu.report()["step"] / 2


@pytest.mark.slow
def test_the_readme_has_what_is_found():
    """A row of each table; CI makes all of them anew."""
    found = {engine: report((engine, HYBRID, 4096, 1)) for engine in ENGINES}
    steps = " | ".join(f"{each['step'] * 1e3:,.0f}" for each in found.values())
    memory = " | ".join(f"{each['peak reserved'] / 2**20:,.0f}" for each in found.values())
    (line,) = re.findall(r"^\| `HYBRID_SHARD` \| 4,096 \| 1 x 1 \|.*$", README.read_text(), re.M)
    assert f"| {steps} |" in line and f"| {memory} |" in line


@pytest.mark.slow
def test_tables_have_a_row_for_each_point_and_a_speed_that_begins_with_1(small, monkeypatch):
    monkeypatch.setattr(scale, "GPUS", (8, 64))
    reports = {place: report(place) for place in all_places()}
    for scaling in (weak, strong):
        head, _, first, *others = rows(reports, scaling).splitlines()
        assert len(others) == 2 and all(row.count("|") == head.count("|") for row in others)
        assert "| 100% |" in first
    svg = str(scale.picture(reports))
    assert svg.count("<title>") == 2 * 2 * 3 * len(ENGINES)  # a bar for each engine at each point
