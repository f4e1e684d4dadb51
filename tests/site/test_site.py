"""The site, built and looked at. Needs `make test-site`, or `pip install -e ".[site]"`."""

import re
from urllib.parse import unquote, urljoin, urlsplit

import pytest

WHY = "the site: `make test-site` installs what builds it and looks at it"
for needed in ("mkdocs", "material", "mkdocstrings", "latex2mathml", "markdown_it", "playwright"):
    pytest.importorskip(needed, reason=WHY)

from markdown_it import MarkdownIt
from playwright.sync_api import sync_playwright

import minifsdp
import minifsdp.core
import minifsdp.sim
from tests.browser import CHROMIUM, PATIENCE
from tests.site.browsing import Html, built, served
from tutorials.address import NOTEBOOKS, SITE
from tutorials.site import contents

pytestmark = pytest.mark.xdist_group("site")  # which is built once
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="the site in a browser: there is no chromium here"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return built(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(site):
    """All HTML files, by their paths."""
    return {
        path.relative_to(site).as_posix(): Html(path.read_text())
        for path in site.rglob("*.html")
        if path.name != "404.html"  # whose links begin with the address of the site
    }


def on_site(page):
    """The path on the site of a page of the repository."""
    name = page.relative_to(contents.ROOT).as_posix().removeprefix(".")
    return re.sub(r"(README)?\.md$", lambda it: "index.html" if it[1] else ".html", name)


# ------------------------------------------------------------------------------- what was built


@pytest.mark.parametrize("page", contents.found(contents.PAGES), ids=on_site)
def test_a_page_says_what_it_says_on_github(site, page):
    """MkDocs takes other Markdown than GitHub: lists, tables and what is folded might get lost."""
    html = (site / on_site(page)).read_text()
    article = html[html.index("<article") : html.index("</article>")]
    article = re.sub('<a class="headerlink".*?</a>|<math.*?</math>', "", article, flags=re.DOTALL)
    github = MarkdownIt("commonmark").enable("table").render(page.read_text())
    prose = re.sub("<pre.*?</pre>|<code.*?</code>", "", article, flags=re.DOTALL)
    assert "$" not in prose  # a formula that was not recognized
    if "<math" in html:
        github = re.sub(r"\$+[^$]+\$+", "", github)
    github = re.sub(r'<img src="http[^>]*alt="(.*?)"[^>]*>', r"\1", github)  # badges
    shown, expected = Html(article), Html(github)
    assert "".join(shown.words) == "".join(expected.words)
    for tag in ("h1", "h2", "h3", "li", "table", "tr", "td", "pre", "img", "details", "em", "sub"):
        assert shown.tags.count(tag) == expected.tags.count(tag), tag


def test_every_link_leads_to_a_page_and_a_place_on_it(site, pages):
    for path, page in pages.items():
        for tag, link in page.links:
            its = urlsplit(urljoin(f"{SITE}{path}", link))
            if not its.geturl().startswith(SITE):
                assert tag == "a" or link.startswith("data:"), f"{path} loads {link}"
                continue
            target = unquote(its.geturl().removeprefix(SITE).partition("#")[0]) or "index.html"
            if target.endswith("/"):
                target += "index.html"
            assert (site / target).is_file(), f"{path}: {link}"
            if its.fragment and target != "tutorials/explorer.html":  # whose are settings
                assert unquote(its.fragment) in pages[target].names, f"{path}: {link}"


def test_links_of_notebooks_lead_to_the_site(site):
    notebooks = pytest.importorskip("tutorials.notebooks", reason=WHY)
    for name in NOTEBOOKS:
        cells = [cell.source for cell in notebooks.notebook(name).cells]
        links = re.findall(rf"\]\({re.escape(SITE)}([^)#]*)", "\n".join(cells))
        assert links and all((site / link).is_file() for link in links), (name, links)


@pytest.mark.parametrize("module", [minifsdp, minifsdp.core, minifsdp.sim])
def test_every_public_name_is_on_its_page(pages, module):
    page = pages[f"api/{module.__name__.rpartition('.')[2]}.html"]
    for name in module.__all__:
        if getattr(module, name).__module__.startswith("torch."):
            assert name in page.words or f"{name}," in page.words, name
        elif name[0] != "_":
            assert f"{module.__name__}.{name}" in page.names, name


def test_the_explorer_and_the_pages_are_in_the_navigation(site):
    html = (site / "tutorials" / "index.html").read_text().partition("md-nav--primary")[2]
    links = Html(html.partition("<article")[0]).links
    there = [*dict.fromkeys(urljoin("tutorials/", link) for tag, link in links if tag == "a")]
    rows = [row for part in contents.path_of_pages() for row in next(iter(part.values()))]
    order = [on_site(contents.ROOT / page) for row in rows for page in row.values()]
    assert [link for link in there if re.match(r"tutorials/\d", link)] == order
    assert there.index("tutorials/explorer.html") < there.index(order[0])


def test_what_only_github_understands_is_adapted():
    hooks = pytest.importorskip("tutorials.site.hooks", reason=WHY)
    for page, adapted in {
        "[![tests](https://a/b.svg)](https://a)": "[tests](https://a)",
        "![a](b.svg)": "![a](b.svg)",
        "a\n<details><b>": "a\n<details markdown><b>",
        "- a\n\n  $$b\n  c$$\n": "- a\n\n$$b\n  c$$\n",
    }.items():
        assert hooks.on_page_markdown(page) == adapted


# --------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def address(site):
    with served(site) as where:
        yield where


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, address):
    """Opens a page of the site. None may have an error, or ask another host for something."""
    contexts, troubles = {}, []

    def visited(path, width=1280, scheme="light"):
        if (width, scheme) not in contexts:
            size = {"width": width, "height": 900}
            contexts[width, scheme] = chromium.new_context(viewport=size, color_scheme=scheme)
            contexts[width, scheme].set_default_timeout(PATIENCE * 1000)
        page = contexts[width, scheme].new_page()
        page.on("pageerror", lambda error: troubles.append(f"{path}: {error}"))
        page.on("console", lambda said: heard(path, said))
        page.on("request", lambda it: troubles.append(it.url) if not is_ours(it.url) else None)
        page.goto(address + path)
        return page

    def heard(path, said):
        # The explorer has no icon. The browser asks for one by itself.
        if not said.location["url"].endswith("/favicon.ico"):
            troubles.append(f"{path}: {said.type} {said.text}")

    def is_ours(url):
        return url.startswith((address, "data:", "blob:"))

    yield visited
    for context in contexts.values():
        context.close()
    assert troubles == []


@in_a_browser
def test_every_page_fits_a_phone(pages, visit):
    programs = [path for path in pages if path.count(".") > 1]
    for path in [*{*pages} - {*programs}, programs[0]]:
        page = visit(path, 390, "dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        page.close()


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_kind_of_page_is_light_or_dark_as_the_system_is(visit, width, scheme):
    of_tutorials = ["index", "11_limiter", "explorer", "glossary", "exercises/index", "launch.py"]
    paths = ["index", "api/core", "minifsdp/sim/index", *(f"tutorials/{it}" for it in of_tutorials)]
    for path in paths:
        page = visit(f"{path}.html", width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert (lightness(page) < 64) == (scheme == "dark"), path
        page.close()


def lightness(page):
    """Of the background, from 0 to 255."""
    colours = """[document.body, document.documentElement].map((it) =>
        getComputedStyle(it).backgroundColor).find((it) => it != "rgba(0, 0, 0, 0)")"""
    return sum(map(int, re.findall(r"\d+", page.evaluate(colours))[:3])) / 3


@in_a_browser
def test_search_finds_the_limiter(visit):
    page = visit("index.html")
    page.get_by_placeholder("Search").first.fill("limiter")
    results = page.locator(".md-search-result__link")
    results.first.wait_for()
    found = [link.get_attribute("href") for link in results.all()]
    assert any("tutorials/11_limiter.html" in link for link in found)
    assert not any(".py.html" in link for link in found)  # pages come first, and not their programs
    page.locator(".md-search-result__link[href*='11_limiter']").first.click()
    page.wait_for_url("**/tutorials/11_limiter.html*")


@in_a_browser
def test_the_explorer_reacts_and_leads_back(visit, pages):
    page = visit("tutorials/explorer.html")
    before = page.inner_text("#figures")
    page.locator("[name=limit]").first.focus()
    page.keyboard.press("ArrowLeft")
    assert "limit=" in page.evaluate("location.hash")
    assert page.inner_text("#figures") != before
    for link in page.eval_on_selector_all("a[href]", "all => all.map(it => it.pathname)"):
        assert link.lstrip("/") in pages, link


@in_a_browser
def test_pictures_are_dark_where_the_page_is(visit):
    """Both follow the system, so that neither can be without the other."""
    shots = {}
    for scheme in ("light", "dark"):
        page = visit("tutorials/11_limiter.html", scheme=scheme)
        picture = page.locator("article img").first
        picture.scroll_into_view_if_needed()
        shots[scheme] = page.evaluate(
            """async (source) => {
                const image = new Image(), canvas = document.createElement("canvas");
                image.src = source;
                await image.decode();
                const pen = canvas.getContext("2d");
                pen.drawImage(image, 0, 0);
                return [...pen.getImageData(2, 2, 1, 1).data];
            }""",
            picture.get_attribute("src"),
        )
    assert sum(shots["light"][:3]) > 600 and sum(shots["dark"][:3]) < 150
