"""facts.toml: what the pages say about others stands on them, with its source beside it."""

import re

import pytest

from tests.figures_of_pages import FACTS, PAGES, in_one_line, uncovered
from tutorials.address import SITE, colab

ADDRESS = re.compile(r"https?://[^)>\s]+")


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact['page']}: {fact['says'][:40]}")
def test_a_fact_stands_on_its_page_with_its_source_beside_it(fact):
    """In the same paragraph, so that a reader who doubts it finds where it is from."""
    paragraphs = PAGES[fact["page"]].read_text().split("\n\n")
    said = [text for text in paragraphs if in_one_line(fact["says"]) in in_one_line(text)]
    assert len(said) == 1, f"{fact['says']!r} stands on {fact['page']} {len(said)} times"
    assert fact["source"] in said[0], f"{fact['source']} is not beside {fact['says']!r}"
    assert fact["found"]


@pytest.mark.parametrize("name", PAGES)
def test_every_address_on_a_page_is_the_source_of_a_fact(name):
    sources = {fact["source"] for fact in FACTS if fact["page"] == name}
    prose = re.sub(r"^```.*?^```$", "", PAGES[name].read_text(), flags=re.M | re.S)
    ours = {it for it in ADDRESS.findall(prose) if it.startswith(SITE) or it == colab(name)}
    assert {*ADDRESS.findall(prose)} - ours == sources


@pytest.mark.parametrize("name", [name for name in PAGES if name[:2].isdigit()])
def test_every_figure_in_the_prose_comes_from_somewhere(name):
    """What ran printed it, code or an assertion has it, or it is a fact about others."""
    assert uncovered(name) == []


def test_a_figure_that_nothing_covers_is_found(tmp_path, monkeypatch):
    page, program = tmp_path / "98_test.md", tmp_path / "98_test.py"
    program.write_text("assert math.isclose(held, 26.6e9)\n")
    page.write_text(
        "<!-- page -->\n```\nstep 104.4 ms\n```\nAfter 104 ms there are 27 GB, 26.6 in full, 35 %"
        " of it in 3 units (page 44, [55](x_66.md)).\n<!-- end of page -->\n and 77"
    )
    monkeypatch.setitem(PAGES, "98_test", page)
    assert uncovered("98_test") == ["35"]
    program.write_text("assert math.isclose(held, 25.9e9)\n")
    assert uncovered("98_test") == ["27", "26.6", "35"]
