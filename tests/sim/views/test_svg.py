"""sim/views/svg.py: a sheet to draw on."""

import xml.etree.ElementTree as ElementTree

from minifsdp.sim.views.svg import WIDTH, Drawing


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
