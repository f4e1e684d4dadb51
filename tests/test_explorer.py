"""tutorials/explorer.html: it shows what the command line says, and works with keys alone."""

import base64
import itertools
import json
import math
import random
import re
import struct
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch

from minifsdp.sim.__main__ import main
from minifsdp.sim.tape import Buffer, Memory
from minifsdp.sim.views.html import fill_in
from tests.browser import CHROMIUM, Page
from tutorials import explorer
from tutorials.explorer import COLUMNS, FIGURES, FULL, LEVELS, MODELS

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tutorials" / "explorer.html"
browser = pytest.mark.skipif(
    CHROMIUM is None, reason="explorer.html in a browser: there is no chromium here"
)


def embedded(name: str) -> str:
    (text,) = re.findall(
        rf'<script id="{name}" type="[^"]*">(.*?)</script>', FILE.read_text(), re.S
    )
    return text


@pytest.fixture(scope="module")
def data():
    return json.loads(embedded("data"))


@pytest.fixture(scope="module")
def steps():
    return base64.b64decode(embedded("steps"))


def combinations(model):
    names, values = zip(*MODELS[model].settings.items(), strict=True)
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def ten_settings():
    """Defaults; those that explorer.canonical() takes for the same as others; and by chance."""
    chosen = [
        ("large", {}),
        ("large", {"limit": "none"}),
        ("large", {"limit": "1", "backward": "post", "strategy": "shard_grad_op"}),
        ("demo", {"limit": "1", "backward": "none", "forward": "pre", "unit": "model"}),
        ("demo", {"limit": "none", "backward": "none", "strategy": "no_shard"}),
        ("demo", {"limit": "3", "strategy": "shard_grad_op", "unit": "model"}),
    ]
    defaults = {model: combinations(model)[0] for model in MODELS}
    found = [(model, defaults[model] | its) for model, its in chosen]
    draw = random.Random(16)
    return found + [(m, draw.choice(combinations(m))) for m in ("large", "demo", "large", "demo")]


TEN = ten_settings()


def pinned():
    (made_with,) = re.findall(
        r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    if torch.__version__.partition("+")[0] != made_with:
        pytest.skip(f"explorer.html is compared with torch {made_with} alone")


@pytest.fixture(scope="module")
def of_the_cli():
    """What `python -m minifsdp.sim --json` prints for these settings."""
    pinned()
    found = []
    for model, settings in TEN:
        with pytest.MonkeyPatch.context() as patch:
            printed = []
            patch.setattr("builtins.print", lambda *words, **_: printed.extend(words))  # noqa: B023
            assert main([*explorer.command(model, settings).split(), "--json"]) == 0
        (figures,) = json.loads(printed[-1])
        found.append(figures)
    return found


def run_of(data, model, settings):
    place = combinations(model).index(settings)
    return data["runs"][data["models"][model]["index"][place]]


def unpacked(steps, run):
    """As explorer_page.html does it: pieces as lists of numbers, and curves."""
    (count,) = struct.unpack_from("<H", steps, run["at"])
    at, pieces = run["at"] + 2, []
    for _ in range(count):
        head, waits, *times = struct.unpack_from("<5H", steps, at)
        awaited = struct.unpack_from(f"<{2 * waits}H", steps, at + 10)
        at += 10 + 4 * waits
        pieces.append((head & 7, head >> 3 & 31, head >> 8, times, awaited[::2]))
    return pieces, [steps[at + i * COLUMNS :][:COLUMNS] for i in range(len(LEVELS))]


def test_it_is_one_small_file_that_loads_nothing():
    page = FILE.read_text()
    assert len(page) < 2_000_000
    assert re.findall(r"https?://[^\"' )]*", page) == ["http://www.w3.org/2000/svg"]  # a name
    assert not re.search(r"\bsrc=|\bimport\b|fetch\(|url\(|@import|XMLHttp|<link", page)
    for link in re.findall(r"href=\"([^\"#$][^\"]*)\"", page):
        assert (FILE.parent / link).exists(), link


def test_it_is_made_from_its_template():
    """So a change of the template without `make tutorials` is seen."""
    places = {name: embedded(name) for name in ("data", "steps")}
    assert fill_in(FILE.with_name("explorer_page.html"), places) == FILE.read_text()


def test_every_combination_is_there(data, steps):
    for name, model in MODELS.items():
        its = data["models"][name]
        assert its["settings"] == model.settings and its["options"] == model.options
        assert len(its["index"]) == math.prod(map(len, model.settings.values()))
        assert {*its["index"]} <= {*range(len(data["runs"]))}
    assert {name for m in MODELS.values() for name, v in m.settings.items() if len(v) > 1} == {
        *("limit", "backward", "forward", "strategy", "unit"),
        *("network", "batch", "precision", "recompute"),
    }
    assert all(set(run["figures"]) == set(FIGURES) for run in data["runs"])


def test_figures_are_those_of_the_command_line(data, of_the_cli):
    for (model, settings), figures in zip(TEN, of_the_cli, strict=True):
        shown = run_of(data, model, settings)["figures"]
        same = [name for name in FIGURES if name != "advice"]  # which may name what is ignored
        assert {name: shown[name] for name in same} == {name: figures[name] for name in same}


def test_steps_are_those_of_the_figures(data, steps):
    for model, settings in TEN:
        run = run_of(data, model, settings)
        figures, (pieces, curves) = run["figures"], unpacked(steps, run)
        took = {}
        for number, (lane, kind, unit, (launched, start, end), awaited) in enumerate(pieces):
            assert launched <= start <= end <= FULL and unit < len(run["units"])
            assert all(on < number for on in awaited)
            key = data["lanes"][lane], data["kinds"][kind]
            took[key] = took.get(key, 0) + (end - start) / FULL * figures["step"]
        computed = sum(seconds for (lane, _), seconds in took.items() if lane == "compute")
        assert computed == pytest.approx(figures["compute"], rel=0.1)  # with small gaps
        limiter = took.get(("host", "limiter"), 0.0)
        close = {"rel": 1e-3, "abs": figures["step"] * 1e-4}
        assert limiter == pytest.approx(figures["host stalls in the limiter"], **close)
        for level, curve in zip(LEVELS, curves, strict=True):
            highest = max(curve) / 255 * figures["peak reserved"]
            assert highest == pytest.approx(figures[f"peak {level}"], rel=0.01)


def test_a_run_that_is_made_again_is_the_same_byte_for_byte(data, steps):
    """Whatever ran before it: CI makes the page anew."""
    pinned()
    for model, settings in TEN[1::3]:
        run = run_of(data, model, settings)
        text, step = explorer.packed(explorer.command(model, explorer.canonical(settings)))
        assert json.dumps({name: run[name] for name in run if name != "at"}) == text
        assert steps[run["at"] :][: len(step)] == step


def test_a_curve_has_the_highest_level_of_each_column():
    buffer = Buffer("", "compute", 1)
    levels = [(1.0, 10, 60, 100), (1.001, 50, 70, 200), (1.002, 5, 5, 200), (3.0, 0, 0, 200)]
    curve = explorer.curves([Memory(buffer, False, *level) for level in levels], 0.0, 4.0)
    reserved, active, allocated = (curve[i * COLUMNS :][:COLUMNS] for i in range(3))
    quarter = COLUMNS // 4
    assert [reserved[at] for at in (0, quarter, quarter + 1, -1)] == [128, 255, 255, 255]
    assert [active[at] for at in (0, quarter, quarter + 1, -1)] == [77, 90, 7, 0]
    assert [allocated[at] for at in (0, quarter, quarter + 1, -1)] == [13, 64, 7, 0]


def test_it_is_linked_and_has_a_still_picture():
    assert "](tutorials/explorer.html)" in (ROOT / "README.md").read_text()
    path = (ROOT / "tutorials" / "README.md").read_text()
    assert "](explorer.html)" in path and "explorer.svg" in path


# ---------------------------------------------------------------------------------- in a browser

SHOWN = """Object.fromEntries([...document.querySelectorAll("#figures tbody tr")].map((row) =>
    [row.dataset.figure, [...row.querySelectorAll("td")].map((cell) => cell.textContent)]))"""
SMALLEST = """Math.min(...[...document.querySelectorAll("body *")]
    .filter((it) => it.textContent.trim() && it.checkVisibility())
    .map((it) => parseFloat(getComputedStyle(it).fontSize)))"""


def words(name, value):
    """A figure as the page says it."""
    if name in ("peak unsharded units", "cudaMallocs", "retries"):
        return str(value)
    if name == "tokens/s per GPU":
        return f"{value:.0f}"
    if name == "MFU":
        return f"{100 * value:.1f} %"
    if name.startswith("peak") or name == "bytes sent":
        power, unit = next(u for u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if value >= 2 ** u[0])
        return f"{value / 2**power:.2f} {unit}"
    return f"{value * 1e3:.2f} ms"


def address(*settings):
    return "/".join(urlencode({"model": model} | its) for model, its in settings)


@browser
def test_a_browser_shows_the_figures_of_the_command_line(data, steps, of_the_cli):
    with Page(FILE.as_uri()) as page:
        for (model, settings), figures in zip(TEN, of_the_cli, strict=True):
            there = page.ask(
                f"location.hash = '{address((model, settings))}'; fromAddress(); location.hash"
            )
            assert there == f"#{address((model, settings))}"
            shown = page.ask(SHOWN)
            assert {name: cells[0] for name, cells in shown.items()} == {
                name: words(name, figures[name]) for name in shown
            }
            said = page.ask("byId('says').innerText")
            assert f"{figures['binds'].replace('compute', 'computation')} binds" in said.lower()
            drawn = page.ask("document.querySelectorAll('#shown g[role=button]').length")
            assert drawn == len(unpacked(steps, run_of(data, model, settings))[0])
        assert page.errors == []


@browser
@pytest.mark.parametrize("width, dark", [(1280, False), (400, True)])
def test_two_settings_from_an_address_and_keys(data, width, dark):
    two = address(("large", {"limit": "none"}), ("large", {"limit": "2"}))
    with Page(f"{FILE.as_uri()}#{two}", width=width, dark=dark) as page:
        none, limited = (run_of(data, *chosen)["figures"] for chosen in (TEN[1], TEN[0]))
        reserved = [words("peak reserved", f["peak reserved"]) for f in (none, limited)]
        assert page.ask(SHOWN)["peak reserved"][:2] == reserved
        assert page.ask("document.querySelectorAll('#shown svg').length") == 2
        page.ask("document.querySelector('[name=limit]').focus()")
        for _ in range(2):  # from none to 3 to 2
            page.press("ArrowLeft")
        assert "limit=2" in page.ask("location.hash").split("/")[0]
        assert page.ask(SHOWN)["peak reserved"] == [reserved[1], reserved[1], "="]
        page.press("Tab")  # to the next control
        assert page.ask("document.activeElement.name") == "backward"
        page.press("ArrowRight")
        assert "backward=post" in page.ask("location.hash").split("/")[0]
        # An operation: to the first one by the page's own order, to the right, and its waits.
        page.ask("document.querySelector('#shown svg g[tabindex=\"0\"]').focus()")
        before = page.ask("document.activeElement.getAttribute('aria-label')")
        page.press("ArrowDown"), page.press("ArrowRight")
        after = page.ask("document.activeElement.getAttribute('aria-label')")
        assert before != after and " ms to " in after
        page.press("Enter")
        told = page.ask("byId('which').textContent + byId('operation').innerText")
        assert after.split(",")[0] in told.lower() and "launched by the host" in told
        assert page.ask("document.querySelectorAll('.selected').length") == 1
        assert page.ask(SMALLEST) >= 12
        assert page.ask("document.documentElement.scrollWidth") <= width
        assert page.errors == []


@browser
def test_every_control_has_a_name_and_an_address_may_be_wrong():
    with Page(f"{FILE.as_uri()}#model=gpt-9&limit=many") as page:
        inputs = "[...document.querySelectorAll('input')]"
        assert page.ask(f"{inputs}.every((it) => it.labels.length || it.ariaLabel)")
        assert page.ask("location.hash").startswith("#model=large&limit=2&")
        assert page.ask("document.querySelectorAll('input').length") > 15
        page.ask("byId('rows').open = true; showRows()")
        rows = page.ask("document.querySelectorAll('#rows tr').length")
        assert rows == 1 + page.ask("document.querySelectorAll('#shown g[role=button]').length")
        assert page.errors == []
