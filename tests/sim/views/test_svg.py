"""sim/views/svg.py: a sheet to draw on."""

import re
import xml.etree.ElementTree as ElementTree

from minifsdp.sim.views.svg import UNITS, WIDTH, Drawing, letters, of_unit


def elements(drawing: Drawing) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(str(drawing)).iter())


def test_words_are_inside_a_box_if_there_is_room(tmp_path):
    drawing = Drawing("a & b")
    drawing.box(10, 20, 100, 30, "blue", "a < b", "tip")
    drawing.box(10, 60, 30, 30, "blue", "a < b")
    (words,) = [e for e in elements(drawing) if e.get("class") == "unit"]
    assert words.text == "a < b" and float(words.get("x")) == 60 and 30 < float(words.get("y")) < 45
    drawing.write(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == str(drawing)


def test_the_sheet_is_as_long_as_what_is_on_it():
    drawing = Drawing("")
    drawing.box(0, 50, 10, 30, "blue")
    drawing.text(0, 20, "above")
    assert drawing.bottom == 80
    drawing.legend(0, {"blue": "a thing", "red": "another"})
    sheet, *_ = elements(drawing)
    assert sheet.get("viewBox") == f"0 0 {WIDTH} {drawing.bottom + 10:g}" and drawing.bottom > 95
    drawing.reach(300)
    assert elements(drawing)[0].get("height") == "310"


def test_a_legend_is_one_row_below_everything():
    drawing = Drawing("")
    drawing.box(0, 50, 10, 30, "blue")
    drawing.legend(7, {"blue": "a thing", "red": "another"})
    boxes = [e for e in elements(drawing) if e.tag.endswith("rect")][1:]
    assert [box.get("class") for box in boxes] == ["blue", "red"]
    assert len({box.get("y") for box in boxes}) == 1 and float(boxes[0].get("y")) > 80
    assert float(boxes[0].get("x")) == 7 < float(boxes[1].get("x"))


def test_a_legend_has_as_many_rows_as_it_takes():
    drawing = Drawing("")
    drawing.legend(7, {f"unit{i}": "x" * 30 for i in range(5)})
    boxes = [e for e in elements(drawing) if e.tag.endswith("rect")]
    assert len({box.get("y") for box in boxes}) == 2
    ends = [float(box.get("x")) + 28 + 6.7 * 30 for box in boxes]
    assert max(ends) <= WIDTH and float(boxes[0].get("x")) == 7 == float(boxes[3].get("x"))


def test_it_can_be_read_on_any_ground():
    drawing = Drawing("")
    drawing.text(10, 30, "words")
    (ground,) = [e for e in elements(drawing) if e.get("class") == "ground"]
    assert ground.get("d") == f"M0 0H{WIDTH}V{drawing.bottom + 10:g}H0Z"
    style = str(drawing)
    light, dark = style.split("prefers-color-scheme: dark")
    for part in (light, dark):  # words and ground change together
        assert contrast(colour(part, "text"), colour(part, ".ground")) > 7
    assert all(int(px) >= 12 for px in re.findall(r"(?:font: |font-size: )(\d+)px", style))


def test_units_take_turns_with_colours_that_white_letters_can_be_read_on():
    assert [of_unit(i) for i in (0, 1, len(UNITS), -1)] == ["unit0", "unit1", "unit0", "nobody"]
    assert all(contrast(unit, "#ffffff") > 4.5 for unit in UNITS)
    assert all(f".unit{i} {{ fill: {unit}; }}" in str(Drawing("")) for i, unit in enumerate(UNITS))


def test_letters_can_be_read_on_every_colour_of_a_box_light_and_dark():
    """4.5 is what the guidelines ask for. White letters on orange and on green had 3.2 once."""
    style = str(Drawing(""))
    kinds = [kind for kind in re.findall(r"\.(\w+) {[^}]*fill: #", style.partition("@media")[0])]
    boxes = {*kinds} - {"ground", "unit", "dark", "inked", "peak"}
    assert boxes >= {"orange", "green", "amber", "gray", "several", "nobody", "optimizer", "unit4"}
    light, dark = style.split("prefers-color-scheme: dark")
    for theme in (light, light + dark):
        ground = fill(theme, "ground")[0]
        for kind in boxes:
            its, opacity = fill(theme, kind)
            letter = fill(theme, letters(kind).split()[-1])[0]
            assert contrast(letter, over(its, opacity, ground)) >= 4.5, kind


def fill(style: str, kind: str) -> tuple[str, float]:
    """Of the last rule for a kind, which is the one that counts."""
    its, more = re.findall(rf"\.{kind} {{ fill: #(\w+);([^}}]*)}}", style)[-1]
    opacity = re.findall(r"fill-opacity: ([.\d]+)", more)
    return "#" + (its if len(its) == 6 else "".join(2 * i for i in its)), float(*opacity or [1])


def over(colour: str, opacity: float, ground: str) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(opacity * a + (1 - opacity) * b):02x}" for a, b in pairs)


def colour(style: str, kind: str) -> str:
    (found,) = re.findall(rf"(?m)(?:^|\s){re.escape(kind)} {{[^}}]*fill: #(\w+)", style)[:1]
    return "#" + (found if len(found) == 6 else "".join(2 * digit for digit in found))


def luminance(colour: str) -> float:
    """As the web's accessibility guidelines define it (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
