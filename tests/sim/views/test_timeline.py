"""sim/views/timeline.py: pictures that say what is on the tape."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from minifsdp.sim.tape import Buffer, Memory, Note, Phase
from minifsdp.sim.views.spans import text
from minifsdp.sim.views.svg import WIDTH
from minifsdp.sim.views.timeline import _ticks, svg
from tests.sim.test_virtual_cluster import train
from tests.sim.views.test_spans import GATHERED, OTHER, STEP, op


def shapes(picture: str) -> dict[str, list[ElementTree.Element]]:
    found: dict[str, list[ElementTree.Element]] = {}
    for element in ElementTree.fromstring(picture).iter():
        found.setdefault(element.get("class", ""), []).append(element)
    return found


def test_as_a_picture_each_span_is_where_its_time_is():
    found = shapes(svg({"a <title>": STEP}))
    assert found["title"][0].text == "a <title>"
    (limiter, _) = found["orange"]  # and in the legend
    reduce = found["lightpurple"][-1]
    unit = float(reduce.get("width")) / 2  # of a second
    assert float(limiter.get("width")) == pytest.approx(3 * unit, abs=0.2)
    assert float(limiter.get("x")) == pytest.approx(
        float(found["gray"][0].get("x")) + unit, abs=0.2
    )
    assert float(reduce.get("x")) + float(reduce.get("width")) == pytest.approx(WIDTH - 12, abs=0.2)
    assert {"lightgray", "lightgreen", "green", "amber"} <= found.keys()


def test_several_steps_are_on_the_same_axes():
    small = [*STEP[:3], Memory(OTHER, False, 2.0, 5, 10, 20), Note(4.0)]
    picture = svg({"large": STEP, "small": small})
    found = shapes(picture)
    assert [title.text for title in found["title"]] == ["large", "small"]
    widths = [float(host.get("width")) for host in found["gray"]]
    assert widths[1] == pytest.approx(widths[0] / 2, abs=0.2)  # 4 of 8 seconds
    heights = [
        max(ys) - min(ys)
        for path in found["lightgray"][:2]
        for ys in [[float(y) for y in re.findall(r"[V ]([\d.]+)", path.get("d"))]]
    ]
    assert heights[1] == pytest.approx(heights[0] / 2, abs=0.2)
    assert {"40 B reserved", "20 B reserved"} <= {e.text for e in found[""]}


def test_it_is_as_high_as_the_last_step():
    first = [Memory(OTHER, False, -1.0, 0, 0, 4000), Note(-0.5), Note(0.0)]
    path = shapes(svg({"": STEP}))["lightgray"][0].get("d")
    assert shapes(svg({"": [*first, *STEP]}))["lightgray"][0].get("d") == path


def test_a_peak_is_drawn_however_short():
    levels = [(2.0, 10), (2.00001, 100), (2.00002, 10), (6.0, 10)]
    peaks = [Memory(OTHER, False, at, level, level, level) for at, level in levels]
    (path, *_) = shapes(svg({"": [*STEP[:3], *peaks, Note(8.0)]}))["green"]
    heights = [float(y) for y in re.findall(r"V([\d.]+)", path.get("d"))]
    floor, top = max(heights), min(float(y) for y in re.findall(r"[ V]([\d.]+)", path.get("d")))
    assert (floor - heights[0]) * 10 == pytest.approx(floor - top, abs=1)


PHASES = [
    Phase("forward", -1.0, 0.0),
    *STEP[:3],
    Phase("backward", 1.0, 4.0),
    op("compute", 4.0, 5.0),
    op("compute", 5.0, 6.0, reads=(GATHERED["b"],)),
    Phase("optimizer", 2.0, 7.9),
    op("compute", 7.9, 8.0),
    Note(8.0),
]


def test_forward_backward_and_optimizer_are_marked():
    found = shapes(svg({"": PHASES}))
    left, scale = 66, (WIDTH - 66 - 12) / 8
    borders = [float(path.get("d")[1:].split(" ")[0]) for path in found["border"]]
    assert borders == pytest.approx([left, left + 4 * scale, left + 7.9 * scale], abs=0.1)
    words = {e.text: e for kind in ("", "lane") for e in found[kind]}
    assert float(words["backward"].get("x")) == pytest.approx(borders[1] + 4)
    assert float(words["optimizer"].get("x")) == pytest.approx(borders[2] - 4)  # it ends there
    (box, _) = found["teal"]  # and in the legend
    assert float(box.get("width")) == pytest.approx(0.1 * scale, abs=0.1)
    assert "loss" in {e.text for e in found["unit"]}


def test_a_step_with_less_memory_takes_less_room():
    small = [*STEP[:3], Memory(OTHER, False, 2.0, 5, 10, 20), Note(4.0)]
    ys = [float(title.get("y")) for title in shapes(svg({"a": small, "b": STEP}))["title"]]
    other = [float(title.get("y")) for title in shapes(svg({"a": STEP, "b": STEP}))["title"]]
    assert ys[1] - ys[0] == pytest.approx(other[1] - other[0] - 96 / 2 - 26)  # no reduce lane


def test_both_axes_have_round_figures():
    memory = [Memory(OTHER, False, 2.0, 5, 10, int(9.7 * 2**30))]
    found = shapes(svg({"": [*STEP[:3], *memory, Note(8.0)]}))
    assert [e.text for e in found["lane"]][-3:] == ["0", "4 GiB", "8 GiB"]
    ys = [float(e.get("y")) for e in found["lane"]][-3:]
    assert 0 < ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert [e.text for e in found["tick"]][:3] == ["0 ms", "1000 ms", "2000 ms"]


def test_of_a_units_name_there_is_as_much_as_fits():
    full, end = "model.blocks.17", Note(8.0)
    layer = Buffer(f"all-gather '{full}'", "unshard", 1)
    wide = [op("compute", 0.0, 4.0, reads=(layer,)), end]
    narrow = [op("compute", 0.0, 0.3, reads=(layer,)), end]
    assert [e.text for e in shapes(svg({"": wide}))["unit"]] == [full]
    assert [e.text for e in shapes(svg({"": narrow}))["unit"]] == ["17"]


def test_what_is_not_there_is_not_in_the_legend():
    words = [element.text for element in shapes(svg({"": STEP[:4]}))["legend"]]
    assert "compute, by unit" in words and "host waits for the limiter" not in words


@pytest.mark.parametrize("seconds", [0.0, 3e-6, 0.0123, 1.0, 1.999, 2.0, 4.9, 75.0])
def test_ticks_are_few_and_round(seconds):
    ticks = list(_ticks(seconds))
    assert len(ticks) == 0 if not seconds else 4 <= len(ticks) <= 11
    assert all(0 <= tick <= seconds for tick in ticks)


def test_the_picture_that_explains_the_limiter():
    """With it the host waits, and memory is what two units take; without it gathers are early."""
    pictures = {}
    for limit in (True, False):
        gpu, _ = train(batch=16384, blocks=8, limit_all_gathers=limit)
        pictures[limit] = shapes(svg({"": gpu.tape}))
        rows = {line.split()[0]: line.split()[1] for line in text(gpu.tape).splitlines()[:-1]}
        assert rows["host"].count("L") > 50 if limit else "L" not in rows["host"]
    assert "orange" in pictures[True] and "orange" not in pictures[False]
