"""What MkDocs has to be told of this repository, whose pages are written to be read where they lie.

Files keep their places: tutorials/09_streams.md becomes tutorials/09_streams.html, so a relative
link of a page is one of the site, too. A file of source code becomes a page if a page links to it,
and its lines have the names that GitHub gives them (#L42).
"""

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import BashLexer, find_lexer_class_for_filename

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import address
from contents import LIVE, PAGES, PICTURES, ROOT, found, linked, path_of_pages, reference


def on_config(config: MkDocsConfig) -> None:
    config.site_url = address.SITE
    # Not `repo_url`, with which Material would ask GitHub for the number of stars.
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": address.REPOSITORY}]
    for part in config.nav or []:
        if "How FSDP works" in part:
            part["How FSDP works"] += path_of_pages()
        if "Reference" in part:
            part["Reference"] += reference()


class Source(File):
    """A page that shows a file of source code. Links to the file lead to it."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path in found(PAGES + PICTURES):
        files.append(_added(File, path, config, abs_src_path=str(path)))
    for path in LIVE:
        files.append(_added(File, path, config, content=with_links_to_html(path.read_text())))
    for path in linked():
        files.append(_added(Source, path, config, content=listing(path)))


def _added(kind: type[File], path: Path, config: MkDocsConfig, **what: str) -> File:
    name, its = path.relative_to(ROOT).as_posix(), InclusionLevel.NOT_IN_NAV
    file = kind.generated(config, name, inclusion=its, **what)
    there = f"{name}.html" if kind is Source else file.dest_uri
    file.dest_uri = there.removeprefix(".")  # a folder .github would not be published
    return file


def listing(path: Path) -> str:
    """The text of a page that shows a file; of a folder, the file that says what is in it."""
    path = path / "__init__.py" if path.is_dir() else path
    lexer = find_lexer_class_for_filename(path.name) or BashLexer  # .ci/run
    lines = highlight(path.read_text(), lexer(), HtmlFormatter(nowrap=True)).splitlines()
    numbered = "".join(f'<span id="L{n}">{line}\n</span>' for n, line in enumerate(lines, 1))
    return (
        f"---\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# {path.relative_to(ROOT)}\n\n"
        f'<div class="highlight"><pre><code>{numbered}</code></pre></div>\n'
    )


def with_links_to_html(page: str) -> str:
    """MkDocs does this to pages in Markdown alone."""
    page = re.sub(r'(href="[^":]*?)README\.md', r"\1index.html", page)
    return re.sub(r'(href="[^":]*?)\.md', r"\1.html", page)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What is folded is Markdown too, as on GitHub, and a formula may be indented. A picture from
    another host, such as a badge, becomes its words: the site asks no other host for anything."""
    markdown = re.sub("^<details>", "<details markdown>", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^ +(\$\$[^$]*\$\$)$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"!\[([^\]]*)\]\(https?:[^)]*\)", r"\1", markdown)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Formulas become MathML, which takes no script. Docstrings have `::` before what they quote,
    and Markdown knows no such thing."""
    html = re.sub(
        r'(?<=class="arithmatex">)\\([(\[])(.*?)\\[)\]]',
        lambda it: convert(unescape(it[2]), display="block" if it[1] == "[" else "inline"),
        html,
        flags=re.DOTALL,
    )
    return html.replace("::</p>", ":</p>") if page.file.src_uri.startswith("api/") else html
