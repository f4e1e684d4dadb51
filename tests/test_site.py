"""The site, as far as it takes neither MkDocs nor a browser: what is on it, and where links lead.

tests/site/ builds it and looks at it.
"""

import re
from pathlib import Path

import pytest

from tutorials import address, build
from tutorials.site import contents

ROOT = Path(__file__).parents[1]
PAGES = contents.found(contents.PAGES)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_path_has_every_page_once_and_marks_the_core_path():
    rows = [row for part in contents.path_of_pages() for row in next(iter(part.values()))]
    titles = {page: title for row in rows for title, page in row.items()}
    assert len(titles) == len(rows)
    pages = contents.found(("tutorials/*.md", "tutorials/reference/*.md"))
    assert {*titles, *contents.reference(), "tutorials/README.md"} == {*map(named, pages)}
    order = [page.partition("/")[2][:2] for page in titles]
    assert order.index("30") == order.index("06") + 1  # as in tutorials/README.md
    core = [page for page, title in titles.items() if title.endswith(" ★")]
    assert len(core) == 9 and all(title.count("★") <= 1 for title in titles.values())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page):
    for link, path in contents.links(page).items():
        assert path.exists(), link
        place = link.partition("#")[2]
        if place.startswith("L") and path.suffix != ".md":
            assert int(place[1:]) <= len(path.read_text().splitlines()), link
        elif place:
            assert place in slugs(path), link


def slugs(page: Path) -> list[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub("^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_to_sections_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[1](#a-b-c) [2](page.md#L3) [3](https://x/y)\n```\n[4](5)\n```\n")
    assert contents.links(page) == {"#a-b-c": page, "page.md#L3": page}
    assert slugs(page) == ["a-b-c"]


def test_there_is_one_address_of_the_repository_and_one_of_the_site():
    """To move: change [project.urls], run `tutorials/build.py --frames`, mend what fails here."""
    own = re.compile(
        r"https://github\.com/[\w.-]+/minifsdp\b|https://[\w.-]+\.github\.io/minifsdp/?"
        r"|https://colab\.research\.google\.com/github/[\w.-]+/[\w.-]+"
    )
    colab = address.colab("00_ddp").partition("/blob/")[0]
    known = {address.REPOSITORY, address.SITE, colab}
    texts = [*ROOT.glob("*.*"), *ROOT.glob(".github/**/*.*")]
    texts += [p for f in ("minifsdp", "tests", "tutorials") for p in ROOT.glob(f"{f}/**/*.*")]
    mentions = {
        address: named(path)
        for path in texts
        if path.suffix in (".html", ".md", ".py", ".svg", ".toml", ".yml")
        for address in own.findall(path.read_text())
    }
    assert known <= {*mentions} and mentions.keys() <= known, mentions


def test_pages_link_to_their_notebooks():
    for page in build.tutorials([]):
        linked = address.colab(page.stem) in page.with_suffix(".md").read_text()
        assert linked == (page.stem in address.NOTEBOOKS)
