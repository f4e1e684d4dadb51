"""sim/views/lanes.py: who was busy when, drawn."""

import re

import pytest

from minifsdp.sim.figures.report import ALL_GATHER, last_step
from minifsdp.sim.tape import Buffer, Note, Op, Phase
from minifsdp.sim.views.lanes import Axis, Lanes, ticks
from minifsdp.sim.views.svg import Drawing
from tests.sim.views.test_spans import GATHERED, STEP, op
from tests.sim.views.test_timeline import shapes

AXIS = Axis(left=100, start=0.0, end=8.0, scale=50)


def drawn(tape, axis=AXIS):
    drawing = Drawing("")
    Lanes(last_step(tape)[0], axis).draw(drawing, 10)
    return shapes(str(drawing))


def places(boxes) -> list[tuple[float, float]]:
    return [(float(box.get("x")), float(box.get("width"))) for box in boxes]


def test_each_span_is_where_its_time_is_in_its_units_colour():
    found = drawn(STEP)
    assert places(found["orange"]) == [(150, 150)] and places(found["amber"]) == [(350, 150)]
    assert places(found["unit0"]) == [(100, 100), (200, 100)]  # a: gathered, then computed with
    assert places(found["unit1"]) == [(200, 100), (300, 100), (400, 100)]
    lanes = [float(e.get("y")) for e in found["lane"]]
    assert [e.text for e in found["lane"]] == ["host", "unshard", "compute", "reduce"]
    assert lanes == sorted(lanes)
    assert Lanes(STEP, AXIS).legend().keys() == {"orange", "amber", "gray"}


def test_what_is_before_or_after_the_step_is_cut_off():
    axis = Axis(left=100, start=1.0, end=5.0, scale=50)
    assert places(drawn(STEP, axis)["unit0"]) == [(100, 50), (150, 100)]
    assert axis.right == 300 == axis.x(99.0) and axis.x(0.0) == 100


def test_units_that_would_be_stripes_are_drawn_together():
    """Neighbours in one box that says how many they are; what has room stays as it is."""
    work = []
    for number in range(40):
        at = 0.02 * number + (1.0 if number >= 20 else 0.0)  # two groups, a second between them
        gather = f"all-gather '{number}'"
        work.append(Op(ALL_GATHER, gather, "unshard", at, at, at + 0.01, [], []))
    found = drawn([*work, op("reduce", 7.0, 7.02, "reduce 'a'"), Note(8.0)])
    (first, second, alone) = sorted(places(found["several"]))
    assert first == pytest.approx((100, 0.39 * 50), abs=0.1)
    assert second == pytest.approx((100 + 1.4 * 50, 0.39 * 50), abs=0.1) and alone[0] == 450
    assert not any(kind.startswith(("unit0", "launch", "thread0")) for kind in found)
    assert len(found["threads"]) == 4  # of the first and the last of each group
    wide = drawn([*work[:1], op("compute", 0.0, 2.0, "forward 'a'"), Note(8.0)])
    assert "several" not in wide


def test_what_comes_after_a_part_of_a_step_is_not_at_its_edge():
    tape = [
        Phase("forward", 0.0, 0.0),
        Op(ALL_GATHER, "all-gather 'a'", "unshard", 3.0, 3.5, 6.0, [], []),
        Phase("optimizer", 7.0, 7.0), op("compute", 0.0, 8.0, "forward 'a'"), Note(8.0),
    ]  # fmt: skip
    found = drawn(tape, Axis(left=100, start=0.0, end=4.0, scale=50))
    assert len(found["border"]) == 1 and "launch0" in found
    assert "launch0" not in drawn(tape, Axis(left=100, start=0.0, end=2.0, scale=50))


def test_a_gather_hangs_on_a_thread_from_where_it_was_launched():
    work = [
        Op(what, f"all-gather '{name}'", "unshard", at, start, start + 1, [], [])
        for what, name, at, start in (
            (ALL_GATHER, "a", -1.0, 0.0),
            ("copy_", "b", 0.25, 3.0),  # a piece of the shard, into its place
            (ALL_GATHER, "b", 0.5, 4.0),
            (ALL_GATHER, "c", 1.0, 5.5),
        )
    ]
    found = drawn([*work, op("compute", 0.0, 8.0), op("reduce", 0.0, 8.0, "reduce 'a'"), Note(8.0)])
    assert "launch0" not in found  # before this step
    for number, at, start in ((1, 125, 300), (2, 150, 375)):
        (tick,), (thread,) = found[f"launch{number}"], found[f"thread{number}"]
        x, y, end = map(float, re.findall(r"[\d.]+", tick.get("d")))
        assert x == at and 10 < y < end
        assert [*map(float, re.findall(r"[\d.]+", thread.get("d")))][:3] == [at, end, start]
        _, _, _, below = map(float, re.findall(r"[\d.]+", thread.get("d")))
        (box,) = found[f"unit{number}"]
        assert float(box.get("y")) == below > end + 10  # far enough to see the thread


def test_forward_backward_and_optimizer_are_marked():
    tape = [
        Phase("forward", -1.0, 0.0), *STEP[:3], Phase("backward", 1.0, 4.0),
        op("compute", 4.0, 5.0), op("compute", 5.0, 6.0, reads=(GATHERED["b"],)),
        Phase("optimizer", 2.0, 7.9), op("compute", 7.9, 8.0), Note(8.0),
    ]  # fmt: skip
    found = drawn(tape)
    borders = [float(path.get("d")[1:].split(" ")[0]) for path in found["border"]]
    assert borders == [100, 300, 495]
    words = {e.text: e for kind in ("", "lane") for e in found[kind]}
    assert float(words["backward"].get("x")) == 304
    assert float(words["optimizer"].get("x")) == 491  # it ends there
    assert places(found["optimizer"]) == [(495, 5)] and places(found["nobody"]) == [(300, 50)]
    assert "loss" in {e.text for e in found["unit"]}
    assert Lanes(tape, AXIS).legend().keys() == {"gray", "optimizer", "nobody"}


def test_of_a_units_name_there_is_as_much_as_fits():
    full = "model.blocks.17"
    layer = Buffer(f"all-gather '{full}'", "unshard", 1)
    for end, shown in ((4.0, full), (0.6, "17")):
        tape = [op("compute", 0.0, end, reads=(layer,)), Note(8.0)]
        assert [e.text for e in drawn(tape)["unit"]] == [shown]


def test_the_axis_has_round_times():
    assert [e.text for e in drawn(STEP)["tick"]] == ["0 ms", "2000 ms", "4000 ms", "6000 ms"]


@pytest.mark.parametrize("seconds", [3e-6, 0.0123, 1.0, 1.999, 2.0, 4.9, 75.0])
@pytest.mark.parametrize("most", [4, 10])
def test_ticks_are_few_and_round(seconds, most):
    found = list(ticks(seconds, seconds / most))
    assert most / 2.5 <= len(found) <= most + 1 and found[0] == 0 and found[-1] <= seconds
    assert f"{found[1]:.0e}"[0] in "125" and found[1] == pytest.approx(float(f"{found[1]:.0e}"))
