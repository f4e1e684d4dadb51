"""sim/views/timeline.py: steps below each other, and tables of them, on the same axes."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from minifsdp.sim.tape import Memory, Note
from minifsdp.sim.views.spans import text
from minifsdp.sim.views.svg import WIDTH
from minifsdp.sim.views.timeline import LEFT, RIGHT, svg, table
from tests.sim.test_virtual_cluster import train
from tests.sim.views.test_spans import OTHER, STEP

SMALL = [*STEP[:3], Memory(OTHER, False, 2.0, 5, 10, 20), Note(4.0)]
"""Half of the time, and half of the memory."""


def shapes(picture: str) -> dict[str, list[ElementTree.Element]]:
    found: dict[str, list[ElementTree.Element]] = {}
    for element in ElementTree.fromstring(picture).iter():
        found.setdefault(element.get("class", ""), []).append(element)
    return found


def hosts(found: dict[str, list[ElementTree.Element]]) -> list[ElementTree.Element]:
    """The hosts' lines, without the box in the legend."""
    return [box for box in found["gray"] if box.get("height") == "5"]


def test_several_steps_are_on_the_same_axes():
    found = shapes(svg({"large <": STEP, "small": SMALL}))
    assert [title.text for title in found["title"]] == ["large <", "small"]
    large, small = (float(host.get("width")) for host in hosts(found))
    assert large == pytest.approx(WIDTH - LEFT - RIGHT, abs=0.2)
    assert small == pytest.approx(large / 2, abs=0.2)  # 4 of 8 seconds
    areas = [path for path in found["lightgray"] if path.get("d")]
    heights = [
        max(ys) - min(ys)
        for path in areas
        for ys in [[float(y) for y in re.findall(r"[V ]([\d.]+)", path.get("d"))]]
    ]
    assert heights[1] == pytest.approx(heights[0] / 2, abs=0.2)


def test_half_of_a_step_is_drawn_twice_as_wide():
    whole, half = shapes(svg({"": STEP})), shapes(svg({"": STEP}, part=0.5))
    assert "amber" in whole and "amber" not in half  # that is in the second half
    orange, twice = whole["orange"][1], half["orange"][1]
    assert float(twice.get("width")) == pytest.approx(2 * float(orange.get("width")), abs=0.2)


def test_it_is_as_high_as_the_last_step():
    first = [Memory(OTHER, False, -1.0, 0, 0, 4000), Note(-0.5), Note(0.0)]
    paths = [shapes(svg({"": [*more, *STEP]}))["lightgray"][1].get("d") for more in ([], first)]
    assert paths[0] == paths[1]


def test_a_step_with_less_memory_takes_less_room():
    ys = [float(title.get("y")) for title in shapes(svg({"a": SMALL, "b": STEP}))["title"]]
    other = [float(title.get("y")) for title in shapes(svg({"a": STEP, "b": STEP}))["title"]]
    assert ys[1] - ys[0] == pytest.approx(other[1] - other[0] - 96 / 2 - 26)  # no reduce lane


def test_what_is_not_there_is_not_in_the_legend():
    words = [element.text for element in shapes(svg({"": STEP[:4]}))["legend"]]
    assert (
        "units: a colour for each, in turn" in words and "host waits for the limiter" not in words
    )
    words = [element.text for element in shapes(svg({"": STEP, "b": STEP[:4]}))["legend"]]
    assert "host waits for the limiter" in words  # in the first one


def test_a_table_has_a_small_picture_for_each_cell_all_on_one_scale():
    rows = {
        "r": {"a": (STEP, "long"), "b": (SMALL, "short")},
        "s": {"a": (SMALL, ""), "b": (STEP, "")},
    }
    found = shapes(table("all <", rows))
    assert [t.text for t in found["title"]] == ["all <", "r, a", "r, b", "s, a", "s, b"]
    assert {"long", "short"} <= {e.text for e in found[""]} and "green" not in found
    boxes = [[float(box.get(key)) for key in ("x", "y", "width")] for box in hosts(found)]
    first, second, third, fourth = boxes
    assert first[0] == third[0] < second[0] == fourth[0] and first[1] == second[1] < third[1]
    assert first[2] == fourth[2] == pytest.approx(2 * second[2], abs=0.2)
    assert second[2] == third[2] and first[0] + first[2] < second[0]
    assert fourth[0] + fourth[2] < WIDTH


def test_the_picture_that_explains_the_limiter():
    """With it the host waits before it launches a gather; without it all are launched early."""
    launches = {}
    for limit in (True, False):
        gpu, _ = train(batch=16384, blocks=8, limit_all_gathers=limit)
        found = shapes(svg({"": gpu.tape}))
        assert ("orange" in found) == limit
        rows = {line.split()[0]: line.split()[1] for line in text(gpu.tape).splitlines()[:-1]}
        assert rows["host"].count("L") > 50 if limit else "L" not in rows["host"]
        ticks = [path for kind, paths in found.items() if "launch" in kind for path in paths]
        launches[limit] = sorted(float(re.findall(r"M([\d.]+)", t.get("d"))[0]) for t in ticks)
    assert len(launches[True]) == len(launches[False]) >= 2 * 8 - 1
    assert launches[False][-1] - LEFT < 0.2 * (launches[True][-1] - LEFT)
