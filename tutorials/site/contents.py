"""What is on the site, and in which order: pages, where they lie, and files that they link to."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "minifsdp/sim/*.md", "tutorials/*.md", "tutorials/*/*.md", ".github/*.md")
PICTURES = ("tutorials/**/*.svg", "minifsdp/**/*.svg", "tests/**/*.svg")
LIVE = [ROOT / "tutorials" / name for name in ("explorer.html", "calculator.html")]

ROW = re.compile(r"^\| \*\*\[(.*)\]\((\w+\.md)\)\*\*.* \| \d+( ★|) \| [\d ]* \|$", re.MULTILINE)


def found(patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def path_of_pages() -> list[dict[str, list[dict[str, str]]]]:
    """The pages as tutorials/README.md has them: in its parts, in the order in which to read, and
    with a star for the core path. Navigation shows plain words, so without marks of code."""
    text = (ROOT / "tutorials" / "README.md").read_text().replace("`", "")
    parts = (part.partition("\n") for part in re.split("^## ", text, flags=re.MULTILINE)[1:])
    return [
        {title: [{name + star: f"tutorials/{page}"} for name, page, star in ROW.findall(rows)]}
        for title, _, rows in parts
        if ROW.search(rows)
    ]


def reference() -> list[str]:
    """What is looked up rather than read: pages without a number."""
    pages = found(("tutorials/reference/*.md", "tutorials/[!0-9R]*.md"))
    return [path.relative_to(ROOT).as_posix() for path in pages]


def links(page: Path) -> dict[str, Path]:
    """The relative links of a page, and where they lead."""
    text = re.sub("^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    folder = page.parent.relative_to(ROOT).as_posix()
    paths = {
        link: link.partition("#")[0] or page.name
        for link in re.findall(r"\]\((?!\w+:)(\S+?)\)", text)
    }
    return {link: ROOT / posixpath.normpath(f"{folder}/{path}") for link, path in paths.items()}


def linked() -> list[Path]:
    """Files and folders that pages link to, and that are on the site for that reason alone."""
    pages = found(PAGES)
    leads = {path for page in pages for path in links(page).values() if path.exists()}
    return sorted(leads - {*pages, *found(PICTURES), *LIVE})
