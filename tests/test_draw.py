"""tutorials/draw.py: what is drawn is what is given."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from minifsdp.sim.views.svg import WIDTH
from tutorials.draw import bars, strips, time_line


def boxes(path) -> list[dict[str, str]]:
    return [e.attrib for e in ElementTree.parse(path).iter() if e.tag.endswith("rect")]


def words(path) -> list[str]:
    return [e.text for e in ElementTree.parse(path).iter() if e.tag.endswith("text")]


def test_bars_are_as_long_as_their_sums_and_parts_have_colours(tmp_path):
    path = tmp_path / "bars.svg"
    rows = {"one": {"a": 1.0, "b": 2.0}, "two": {"a": 6.0}, "none": {"b": 0.0}}
    bars(path, "title", rows, "{:.0f} GB".format)
    a, b, longer, zero, *legend = boxes(path)
    unit = float(a["width"])
    assert float(b["width"]) == pytest.approx(2 * unit, abs=0.2)
    assert float(longer["width"]) == pytest.approx(6 * unit, abs=0.2) and float(zero["width"]) == 0
    assert float(b["x"]) == pytest.approx(float(a["x"]) + unit, abs=0.2)
    assert a["class"] == longer["class"] == legend[0]["class"] != b["class"] == legend[1]["class"]
    assert {"title", "one", "two", "3 GB", "6 GB", "0 GB", "a", "b"} <= {*words(path)}
    assert float(longer["x"]) + float(longer["width"]) + 7 * len("6 GB") < WIDTH


def test_strips_are_on_one_scale_with_gaps_and_headings(tmp_path):
    path = tmp_path / "strips.svg"
    rows = [
        ("heading", []),
        ("row", [(2.0, "blue", "long enough"), (1.0, "", "gap"), (1.0, "red", "x" * 99)]),
        ("half", [(2.0, "green", "")]),
    ]
    strips(path, "title", rows, {"blue": "what is blue"})
    blue, red, green, _ = boxes(path)
    assert float(blue["width"]) == float(green["width"]) and blue["y"] != green["y"]
    gap = float(red["x"]) - float(blue["x"])
    assert gap == pytest.approx(1.5 * (float(blue["width"]) + 1), abs=0.3)
    found = words(path)
    assert {"title", "heading", "row", "half", "long enough", "gap", "what is blue"} <= {*found}
    assert "x" * 99 not in found  # there is no room for it


def test_a_time_line_has_dates_in_proportion_and_a_row_for_each(tmp_path):
    path = tmp_path / "line.svg"
    days = ("2021-12-01", "2022-01-01", "2022-12-01")
    time_line(path, "title", [(d, "blue", f"name {d[:4]}", "what") for d in days])
    dots = [box for box in boxes(path) if box["width"] == "6.0"]
    rows = [box for box in boxes(path) if box["width"] == "11.0"]
    first, second, third = (float(dot["y"]) for dot in dots)
    assert (second - first) / (third - first) == pytest.approx(31 / 365, abs=0.01)
    gaps = [float(b["y"]) - float(a["y"]) for a, b in pairwise(rows)]
    assert gaps[0] == gaps[1] > 12
    assert {"title", *days, "name 2021", "what", "Jan 2022", "Jul 2022"} <= {*words(path)}
