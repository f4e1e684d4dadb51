"""sim/views/memory_plot.py: three levels of memory, drawn."""

import re

import pytest

from minifsdp.sim.tape import Memory
from minifsdp.sim.views.lanes import Axis
from minifsdp.sim.views.memory_plot import PLOT, draw_memory, human, most_reserved
from minifsdp.sim.views.svg import Drawing
from tests.sim.views.test_spans import OTHER, STEP
from tests.sim.views.test_timeline import shapes

AXIS = Axis(left=100, start=0.0, end=8.0, scale=50)


def drawn(levels, most):
    tape = [Memory(OTHER, False, time, *sizes) for time, *sizes in levels]
    drawing = Drawing("")
    draw_memory(drawing, tape, AXIS, most)
    return shapes(str(drawing)), drawing


def test_the_levels_are_said_and_drawn_at_their_heights():
    found, drawing = drawn([(2.0, 10, 20, 40), (6.0, 5, 30, 40)], 80)
    assert [e.text for e in found["legend"]] == [
        "reserved, at most 40 B ▾", "active, at most 30 B ▾", "allocated, at most 10 B ▾"
    ]  # fmt: skip
    assert "memory" in {e.text for e in found["lane"]}
    floor = max(map(float, re.findall(r"V([\d.]+)", found["green"][1].get("d"))))
    tops = {
        kind: min(map(float, re.findall(r"[ V]([\d.]+)", found[kind][1].get("d"))))
        for kind in ("lightgray", "lightgreen", "green")
    }
    heights = {kind: (floor - top) / PLOT for kind, top in tops.items()}
    assert heights == pytest.approx(
        {"lightgray": 0.5, "lightgreen": 0.375, "green": 0.125}, abs=1e-2
    )
    assert 0 < drawing.bottom - floor < 20
    assert floor - float(found["legend"][0].get("y")) == pytest.approx(PLOT / 2 + 12)  # to the top


def test_peaks_are_marked_where_they_are_first():
    found, _ = drawn([(2.0, 10, 20, 40), (4.0, 50, 60, 80), (6.0, 50, 70, 80)], 80)
    marks = [re.findall(r"M([\d.]+) ([\d.]+)", path.get("d"))[0] for path in found["peak"]]
    assert [float(x) for x, _ in marks] == [300, 400, 300]  # reserved, active, allocated


def test_a_peak_is_drawn_however_short():
    levels = [(2.0, 10), (2.00001, 100), (2.00002, 10), (6.0, 10)]
    found, _ = drawn([(at, level, level, level) for at, level in levels], 100)
    path = found["green"][1].get("d")
    floor = max(map(float, re.findall(r"V([\d.]+)", path)))
    top = min(map(float, re.findall(r"[ V]([\d.]+)", path)))
    assert floor - top == pytest.approx(PLOT, abs=0.2)
    assert f"H200.5V{floor - PLOT / 10:.1f}" in path or f"V{floor - PLOT / 10:.1f}" in path


def test_the_axis_has_round_sizes():
    found, _ = drawn([(2.0, 5, 10, int(9.7 * 2**30))], int(9.7 * 2**30))
    figures = [e for e in found["lane"] if e.text != "memory"]
    assert [e.text for e in figures] == ["0", "4 GiB", "8 GiB"]
    ys = [float(e.get("y")) for e in figures]
    assert 0 < ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_a_step_that_takes_no_memory_has_an_empty_plot():
    found, _ = drawn([], 1)
    assert "peak" not in found and len(found["green"]) == 1  # only in the legend
    assert most_reserved(STEP) == 40 and most_reserved(STEP[:3]) == 0


@pytest.mark.parametrize(
    "size, words",
    [
        (0, "0"),
        (512, "512 B"),
        (2**20, "1 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (20.2 * 2**30, "20 GiB"),
    ],
)
def test_sizes_in_words(size, words):
    assert human(size) == words
