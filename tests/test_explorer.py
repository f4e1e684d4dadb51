"""tutorials/explorer.html: it shows what the command line says, and works with keys alone."""

import base64
import json
import math
import random
import re
import struct
from collections import Counter
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch

from minifsdp.sim.__main__ import main
from minifsdp.sim.figures.memory_report import KINDS as MEMORY
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.tape import Buffer, Memory
from tests.browser import CHROMIUM, Page
from tutorials import explorer, explorer_data
from tutorials.explorer import ADVISED, GPU, MODELS, WORTH, canonical, combinations, varied
from tutorials.explorer_data import COLUMNS, FIGURES, FULL, LEVELS, NAMES

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tutorials" / "explorer.html"
pytestmark = pytest.mark.xdist_group("explorer")  # whose fixtures take seconds
CAPACITY = Cluster(GPUS[GPU]).capacity
browser = pytest.mark.skipif(
    CHROMIUM is None, reason="explorer.html in a browser: there is no chromium here"
)


@pytest.fixture(scope="module")
def data():
    (text,) = re.findall(r'<script id="data" type="[^"]*">(.*?)</script>', FILE.read_text(), re.S)
    found = json.loads(text)
    found["steps"] = base64.b64decode(found["steps"])
    for its in found["models"].values():
        index = base64.b64decode(its["index"])
        its["index"] = struct.unpack(f"<{len(index) // 2}H", index)
        its["advice"] = base64.b64decode(its["advice"])
    return found


def chosen_settings():
    """Defaults; those that explorer.canonical() takes for the same as others, or that do not fit;
    and by chance."""
    chosen = [
        ("large", {}),
        ("large", {"limit": "none"}),
        ("large", {"limit": "1", "backward": "post", "strategy": "shard_grad_op"}),
        ("demo", {"limit": "1", "backward": "none", "forward": "pre", "unit": "model"}),
        ("demo", {"limit": "none", "backward": "none", "strategy": "no_shard"}),
        ("demo", {"limit": "2", "strategy": "shard_grad_op", "unit": "model"}),
        ("large", {"strategy": "hybrid_shard", "nodes": "1", "network": "100", "limit": "2"}),
        ("large", {"strategy": "hybrid_shard", "nodes": "8", "unit": "model", "limit": "1"}),
        ("large", {"offload": "yes", "strategy": "shard_grad_op", "limit": "1"}),
        ("large", {"offload": "yes", "strategy": "no_shard", "limit": "none"}),
        ("large", {"strategy": "no_shard", "seq": "4096", "limit": "1"}),
    ]
    defaults = {model: combinations(model)[0] for model in MODELS}
    found = [(model, defaults[model] | its) for model, its in chosen]
    draw = random.Random(16)
    for model in ("large", "demo", "large", "demo", "large", "large"):
        there = [c for c in combinations(model) if all(map(varied, explorer.ONLY_WITH, 2 * [c]))]
        found.append((model, draw.choice(there)))
    return found


CHOSEN = chosen_settings()


def pinned():
    (made_with,) = re.findall(
        r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    if torch.__version__.partition("+")[0] != made_with:
        pytest.skip(f"explorer.html is compared with torch {made_with} alone")


@pytest.fixture(scope="module")
def of_the_cli():
    """What `minifsdp sim --json` prints for these settings."""
    pinned()
    found = []
    for model, settings in CHOSEN:
        with pytest.MonkeyPatch.context() as patch:
            printed = []
            patch.setattr("builtins.print", lambda *words, **_: printed.extend(words))  # noqa: B023
            fits = main([*explorer.command(model, settings).split(), "--json"]) == 0
        (figures,) = json.loads(printed[-1])
        assert figures["fits"] == fits
        found.append(figures)
    return found


def place_of(settings, model):
    place = 0
    for name, values in MODELS[model].settings.items():
        place = place * len(values) + values.index(settings[name])
    return place


def run_of(data, model, settings):
    """A run as explorer_page/data.js unpacks it."""
    number = data["models"][model]["index"][place_of(settings, model)]
    at, binds, peak, units, phases, count = data["runs"][number]
    steps = data["steps"]
    figures = dict(zip(NAMES, struct.unpack_from(f"<{len(NAMES)}f", steps, at), strict=True))
    at += 4 * len(NAMES)
    tokens = [data["tokens"][t] for t in struct.unpack_from(f"<{count}H", steps, at)]
    at += 2 * count
    pieces = []
    for number, (head, *waits) in enumerate(tokens):
        lane, kind, unit = head & 7, head >> 3 & 31, head >> 8
        host, free = data["lanes"][lane] == "host", data["kinds"][kind] == "free"
        many = (not host) + 1 + (not free) + sum(wait & 1 for wait in waits)
        times = struct.unpack_from(f"<{many}H", steps, at)
        at += 2 * many
        launched, start = times[0], times[0 if host else 1]
        end = start if free else times[1 if host else 2]
        on = [number - (wait >> 1) for wait in waits]
        pieces.append((data["lanes"][lane], data["kinds"][kind], unit, launched, start, end, on))
    curves = []
    for _ in LEVELS:
        curve = []
        while len(curve) < COLUMNS:
            curve += [steps[at + 1]] * (steps[at] + 1)
            at += 2
        curves.append(curve)
    found = {"figures": figures, "pieces": pieces, "curves": curves, "units": data["units"][units]}
    words = {"binds": data["binds"][binds], "peak is in": data["peaks"][peak]}
    return found | {"figures": figures | words, "phases": phases}


def short(number):
    """As a float of 32 bits, which the page has."""
    return struct.unpack("<f", struct.pack("<f", number))[0]


def test_it_is_one_small_file_that_loads_nothing():
    page = FILE.read_text()
    assert len(page) < 2_000_000
    assert re.findall(r"https?://[^\"' )]*", page) == ["http://www.w3.org/2000/svg"]  # a name
    assert not re.search(r"\bsrc=|\bimport\b|fetch\(|url\(|@import|XMLHttp|<link", page)
    for link in re.findall(r"href=\"([^\"#$][^\"]*)\"", page):
        assert (FILE.parent / link).exists(), link
    for name in re.findall(r'page: "(\w+)"', page):
        assert (FILE.parent / f"{name}.md").exists(), name


def test_it_is_made_from_its_parts():
    """So a change of a part, or of formulas.py, without `make tutorials` is seen."""
    (text,) = re.findall(r'<script id="data" type="[^"]*">(.*?)</script>', FILE.read_text(), re.S)
    assert explorer.page(text.replace("<\\/", "</")) == FILE.read_text()


def test_every_combination_is_there(data):
    for name, model in MODELS.items():
        its = data["models"][name]
        assert its["settings"] == model.settings and its["options"] == model.options
        assert len(its["index"]) == math.prod(map(len, model.settings.values()))
        assert len(its["index"]) == len(its["advice"]) and max(its["index"]) < len(data["runs"])
    assert {name for m in MODELS.values() for name, v in m.settings.items() if len(v) > 1} == {
        *("limit", "backward", "forward", "strategy", "unit", "nodes", "network", "batch"),
        *("seq", "precision", "recompute", "offload"),
    }
    for model in MODELS:
        for settings in combinations(model)[::97]:
            assert run_of(data, model, settings) == run_of(data, model, canonical(settings))


@pytest.mark.slow
def test_figures_are_those_of_the_command_line(data, of_the_cli):
    for (model, settings), figures in zip(CHOSEN, of_the_cli, strict=True):
        shown = run_of(data, model, settings)["figures"]
        assert shown["fits"] == figures["fits"]
        if figures["fits"]:
            assert {n: shown[n] for n in FIGURES} == {n: short(figures[n]) for n in FIGURES}
            by_kind = {kind: shown[kind] for kind in MEMORY if shown[kind]}
            assert by_kind == pytest.approx(figures["peak allocated is"])
            assert shown["peak is in"] == figures["peak is in"]


def test_what_does_not_fit_says_by_how_much(data, of_the_cli):
    """It is run on a GPU with enough memory: all of it is more than the real one has, and what fits
    is less."""
    seen = Counter()
    for model in MODELS:
        for settings in combinations(model)[::7]:
            figures = run_of(data, model, settings)["figures"]
            assert (figures["peak reserved"] <= CAPACITY) == figures["fits"]
            seen[model, bool(figures["fits"])] += 1
    assert seen["large", False] > 20 and not seen["demo", False]
    assert any(not figures["fits"] for figures in of_the_cli)


def test_advice_is_the_best_that_the_page_has_and_does_what_it_says(data):
    """Of all settings: what is advised can be set there, fits, and is faster than any other."""
    advised = Counter()
    for model in MODELS:
        numbers, offered = data["models"][model], MODELS[model].settings
        figures = {}

        def speed(settings, model=model, numbers=numbers, figures=figures):
            number = numbers["index"][place_of(settings, model)]
            if number not in figures:
                its = struct.unpack_from(f"<{len(NAMES)}f", data["steps"], data["runs"][number][0])
                its = dict(zip(NAMES, its, strict=True))
                figures[number] = its["tokens/s per GPU"] if its["fits"] else 0.0
            return figures[number]

        for settings in combinations(model):
            code = numbers["advice"][place_of(settings, model)]
            others = [
                speed(settings | {name: value})
                for name in ADVISED
                if varied(name, settings)
                for value in offered[name]
            ]
            now, best = speed(settings), max(others)
            if code == 0:
                assert best <= now * (1 + WORTH)
                continue
            name = data["advised"][(code - 1) >> 2]
            value = offered[name][(code - 1) & 3]
            assert value != settings[name] and varied(name, settings)
            assert speed(settings | {name: value}) == best > now * (1 + WORTH)
            advised[name] += 1
    assert set(advised) >= {"strategy", "batch", "limit", "unit", "offload", "precision"}


def test_how_near_predictions_are_is_what_the_table_says(data):
    text = (ROOT / "minifsdp" / "sim" / "README.md").read_text()
    table = text.partition("<!-- make predictions writes: summary -->")[2].partition("<!-- end")[0]
    rows = [line for line in table.splitlines() if line.startswith("| held out")]
    (row,) = [line for line in rows if "| all |" in line]
    assert row == "| " + " | ".join(data["predicted"].values()) + " |"
    assert data["predicted"]["worst"] == "18%"


def test_steps_are_those_of_the_figures(data):
    for model, settings in CHOSEN:
        run = run_of(data, model, settings)
        figures, took = run["figures"], {}
        for number, (lane, kind, unit, launched, start, end, awaited) in enumerate(run["pieces"]):
            assert launched <= start <= end <= FULL and unit < len(run["units"])
            assert all(0 <= on < number for on in awaited)
            key = lane, kind
            took[key] = took.get(key, 0) + (end - start) / FULL * figures["step"]
        computed = sum(seconds for (lane, _), seconds in took.items() if lane == "compute")
        assert computed == pytest.approx(figures["compute"], rel=0.1)  # with small gaps
        limiter = took.get(("host", "limiter"), 0.0)
        close = {"rel": 1e-3, "abs": figures["step"] * 1e-4}
        assert limiter == pytest.approx(figures["host stalls in the limiter"], **close)
        for level, curve in zip(LEVELS, run["curves"], strict=True):
            highest = max(curve) / 255 * figures["peak reserved"]
            assert highest == pytest.approx(figures[f"peak {level}"], rel=0.01)


def test_a_run_that_is_made_again_is_the_same_byte_for_byte(data):
    """Whatever ran before it: CI makes the page anew."""
    pinned()
    for model, settings in CHOSEN[1::4]:
        again = explorer.packed_run(explorer.command(model, canonical(settings)))
        alone = explorer_data.together([again])
        step, number = base64.b64decode(alone["steps"]), data["models"][model]["index"]
        at, *_, phases, count = data["runs"][number[place_of(settings, model)]]
        places = 4 * len(NAMES), 4 * len(NAMES) + 2 * count
        assert data["steps"][at:][: places[0]] == step[: places[0]]
        assert data["steps"][at + places[1] :][: len(step) - places[1]] == step[places[1] :]
        tokens = struct.unpack_from(f"<{count}H", data["steps"], at + places[0])
        assert [tuple(data["tokens"][token]) for token in tokens] == list(again.tokens)
        assert phases == dict(again.phases)


def test_a_curve_has_the_highest_level_of_each_column():
    buffer = Buffer("", "compute", 1)
    levels = [(1.0, 10, 60, 100), (1.001, 50, 70, 200), (1.002, 5, 5, 200), (3.0, 0, 0, 200)]
    found = explorer_data.curves([Memory(buffer, False, *level) for level in levels], 0.0, 4.0)
    reserved, active, allocated = found
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
SEEN = """[...document.querySelectorAll("#summary, #difference, #shown svg")].every((it) => {
    const box = it.getBoundingClientRect();
    return box.top >= 0 && box.bottom <= innerHeight && box.height > 0; })"""


def words(name, value, model):
    """A figure as the page says it."""
    if name in ("peak unsharded units", "cudaMallocs", "retries"):
        return f"{value:.0f}"
    if name == "tokens/s per GPU":
        return f"{value:.0f}"
    if name == "MFU":
        return f"{100 * value:.{int(value < 0.0995)}f} %"
    if name.startswith("peak"):
        power, unit = (30, "GiB") if model == "large" else (20, "MiB")
        return f"{value / 2**power:.2f} {unit}"
    if name == "bytes sent":
        return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.2f} MB"
    return f"{value * 1e3:.2f} ms"


def address(*settings):
    return "/".join(urlencode({"model": model} | its) for model, its in settings)


@browser
def test_a_browser_shows_the_figures_of_the_command_line(data, of_the_cli):
    with Page(FILE.as_uri()) as page:
        for (model, settings), figures in zip(CHOSEN, of_the_cli, strict=True):
            there = page.ask(
                f"location.hash = '{address((model, settings))}'; fromAddress(); location.hash"
            )
            assert there == f"#{address((model, settings))}"
            run = run_of(data, model, settings)
            shown = page.ask(SHOWN)
            figures = figures if figures["fits"] else run["figures"]
            assert {name: cells[0] for name, cells in shown.items()} == {
                name: words(name, short(figures[name]), model) for name in shown
            }
            said = page.ask("byId('more').innerText")
            assert f"{figures['binds'].replace('compute', 'computation')} binds" in said.lower()
            drawn = page.ask("document.querySelectorAll('#shown g[role=button]').length")
            assert drawn == len(run["pieces"])
            missing = figures["peak reserved"] - CAPACITY
            summary = page.ask("byId('summary').innerText")
            assert ("does not fit" in summary) == (missing > 0)
            assert missing <= 0 or f" {missing / 2**30:.2f} GiB more than the GPU has" in summary
        assert page.errors == []


@browser
def test_formulas_beside_the_figures_are_near_the_runs(data):
    """Bytes by formulas.py, and bytes over bandwidth, without latency; of all that the page has of
    the large model, whose rings' latency is small."""
    with Page(FILE.as_uri()) as page:
        found = page.ask(
            """[...new Set(models.large.index)].map((number) => {
            const at = models.large.index.indexOf(number), its = { model: "large" };
            let left = at;
            for (const [name, values] of Object.entries(models.large.settings).reverse()) {
              its[name] = values[left % values.length];
              left = Math.floor(left / values.length);
            }
            const f = runOf(its).figures, [bytes] = sentBy(its), [seconds] = sendingTakes(its, f);
            const hybrid = its.strategy === "hybrid_shard";
            const many = Number(its.nodes) > data.machine.quiet;
            return [hybrid, many, bytes / f["bytes sent"], seconds / f.communication];
        })"""
        )
        assert len(found) > 1000
        assert all(abs(sent - 1) < 1e-4 for _, _, sent, _ in found)
        # With hybrid sharding a node's collectives and those between nodes overlap. On many nodes
        # messages wait for other traffic, too.
        for hybrid, many, _, seconds in found:
            assert (0.84 if many else 0.97) < seconds < (1.2 if hybrid else 1.0)


@browser
def test_advice_can_be_followed_and_says_what_comes_of_it(data):
    draw = random.Random(4)
    with Page(FILE.as_uri()) as page:
        followed = 0
        for model in ("large", "demo"):
            for settings in draw.sample(combinations(model), 30):
                page.ask(f"location.hash = '{address((model, settings))}'; fromAddress()")
                before = page.ask("({...runOf(shown[0]).figures})")
                said = page.ask("byId('advice').innerText")
                if page.ask("byId('follow-advice').hidden"):
                    assert said.startswith("No other value")
                    continue
                page.ask("byId('follow-advice').click()")
                after = page.ask("({...runOf(shown[0]).figures})")
                assert after["fits"]
                if before["fits"]:
                    faster = after["tokens/s per GPU"] / before["tokens/s per GPU"] - 1
                    digits = int(faster < 0.0995)
                    assert f": {100 * faster:.{digits}f} % more tokens a second" in said
                followed += 1
        assert followed > 40 and page.errors == []


@browser
def test_each_control_says_what_it_changes_and_why(data):
    """A sentence for each value of each control, seen from the default; with no hole in it."""
    with Page(FILE.as_uri()) as page:
        for model in MODELS:
            default = combinations(model)[0]
            for name, values in MODELS[model].settings.items():
                for value in values[1:]:
                    two = address((model, default | {name: value}), (model, default))
                    page.ask(f"location.hash = '{two}'; fromAddress()")
                    (first, *_), said = (
                        page.ask("[byId('difference').innerText]"),
                        page.ask("byId('difference').innerText + byId('more').innerText"),
                    )
                    assert not re.search(r"undefined|NaN|null|Infinity|\[object", said), said
                    a, b = (
                        run_of(data, model, its)["figures"]
                        for its in (default | {name: value}, default)
                    )
                    saved = (b["peak reserved"] - a["peak reserved"]) / 2**30
                    if a == b:
                        assert "no difference here" in first
                    elif model == "large" and abs(saved) > 0.01:
                        verb = "saves" if saved > 0 else "takes"
                        assert f"{verb} {abs(saved):.2f} GiB" in first and ": " in first
        limits = address(("large", {"limit": "true"}), ("large", {"limit": "none"}))
        page.ask(f"location.hash = '{limits}'; fromAddress()")
        assert page.ask("byId('difference').innerText") == (
            "The limiter saves 3.39 GiB and takes the same time: the host waits (180.81 ms in the "
            "limiter) instead of taking memory early, and 4 units are gathered at once instead of "
            "13."
        )
        assert "“Allocated” is at most 7.20 GiB in both" in page.ask("byId('more').innerText")
        for link in range(page.ask("LOOKS.length")):
            page.ask(f"location.hash = LOOKS[{link}][1]; fromAddress()")
            assert page.ask(f"byId('more').innerText.startsWith(LOOKS[{link}][2])")
            assert page.ask("shown.length") in (1, 2)
        assert page.errors == []


@browser
def test_the_first_operation_that_one_is_shown_says_what_it_waited_for():
    with Page(FILE.as_uri()) as page:
        assert page.ask("document.querySelectorAll('.first').length") == 1
        assert page.ask("byId('follow').innerText").startswith("Begin with this one: why does the ")
        page.ask("byId('follow').click()")
        assert page.ask("document.querySelectorAll('.selected').length") == 1
        assert page.ask("document.querySelectorAll('.awaited').length") >= 1
        assert "last, told to wait for: all-gather of" in page.ask("byId('operation').innerText")
        page.ask("byId('follow').click()")  # and what did that wait for?
        assert page.ask("byId('which').innerText").startswith("All-gather of")
        assert page.errors == []


@browser
@pytest.mark.parametrize("width, height, dark", [(1280, 900, False), (390, 844, True)])
def test_two_settings_from_an_address_and_keys(data, width, height, dark):
    two = address(("large", {"limit": "none"}), ("large", {"limit": "true"}))
    with Page(f"{FILE.as_uri()}#{two}", width=width, height=height, dark=dark) as page:
        none, limited = (run_of(data, *chosen)["figures"] for chosen in (CHOSEN[1], CHOSEN[0]))
        reserved = [words("peak reserved", f["peak reserved"], "large") for f in (none, limited)]
        assert page.ask(SHOWN)["peak reserved"][:2] == reserved
        assert page.ask("document.querySelectorAll('#shown svg').length") == 2
        page.ask("document.querySelector('[name=limit]').focus()")
        assert page.ask(SEEN), "what changes has to be seen where it is changed"
        page.press("ArrowLeft")
        assert "limit=true" in page.ask("location.hash").split("/")[0]
        assert page.ask(SHOWN)["peak reserved"] == [reserved[1], reserved[1], "="]
        page.ask("document.querySelector('#set-limit summary').focus()")
        page.press("Tab")  # to the next control
        assert page.ask("document.activeElement.name") == "backward"
        page.press("ArrowRight")
        assert "backward=post" in page.ask("location.hash").split("/")[0]
        page.ask("document.querySelector('[name=offload]').focus()")  # the last one
        assert page.ask(SEEN)
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
def test_every_control_has_a_name_a_meaning_and_a_page_and_an_address_may_be_wrong():
    with Page(f"{FILE.as_uri()}#model=gpt-9&limit=many") as page:
        inputs = "[...document.querySelectorAll('input')]"
        assert page.ask(f"{inputs}.every((it) => it.labels.length || it.ariaLabel)")
        assert page.ask("location.hash").startswith("#model=large&limit=true&")
        assert page.ask("document.querySelectorAll('input').length") > 15
        explained = page.ask(
            "[...document.querySelectorAll('fieldset')].map((it) => [it.id.slice(4), "
            "it.querySelector('.what p').textContent, it.querySelector('.what a').href])"
        )
        assert {name for name, *_ in explained} == {"model", *MODELS["large"].settings}
        assert all(len(meaning) > 60 and href.endswith(".md") for _, meaning, href in explained)
        page.ask("byId('rows').open = true; showRows()")
        rows = page.ask("document.querySelectorAll('#rows tr').length")
        assert rows == 1 + page.ask("document.querySelectorAll('#shown g[role=button]').length")
        assert page.errors == []
