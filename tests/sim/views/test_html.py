"""sim/views/html.py and viewer.html: a step to look around in."""

import json
import re

import pytest

from minifsdp.sim.cli.run import measure
from minifsdp.sim.figures.memory_report import KINDS
from minifsdp.sim.figures.words import BYTES
from minifsdp.sim.views.html import SHARED, data, fill_in, html
from minifsdp.sim.views.svg import UNITS
from tests.browser import CHROMIUM
from tests.patience import run_command
from tests.sim.cli.test_run import SMALL, options
from tests.sim.views.test_svg import contrast

VIEWER = SHARED.with_name("viewer.html").read_text()


@pytest.fixture(scope="module")
def run():
    figures, gpu = measure(options(f"{SMALL} --batch 4096"))
    return figures, gpu.tape


def embedded(page: str) -> dict:
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(text)


def test_the_page_has_the_data_and_needs_nothing_else(run):
    figures, tape = run
    page = html(tape, figures, "a </script> title")
    assert embedded(page) == json.loads(json.dumps(data(tape, figures, "a </script> title")))
    assert not re.search(r"(src|href)=|https?://|\bimport\b|fetch\(", page)


def test_its_figures_are_the_reports(run):
    figures, tape = run
    its = data(tape, figures)
    assert its["length"] == pytest.approx(figures["step"] * 1e6)
    spans = sorted((op[4], op[5]) for op in its["ops"] if its["lanes"][op[0]] == "compute")
    assert sum(end - start for start, end in spans) == pytest.approx(figures["compute"] * 1e6)
    assert sum(op[7] for op in its["ops"]) == figures["bytes sent"]
    assert max(level[1] for level in its["levels"]) == figures["peak allocated"]
    assert max(level[3] for level in its["levels"]) == figures["peak reserved"]
    limiter = sum(until - since for _, since, until, by_limiter in its["waits"] if by_limiter)
    assert limiter == pytest.approx(figures["host stalls in the limiter"] * 1e6, abs=1)


def test_at_all_times_the_buffers_are_what_is_allocated(run):
    figures, tape = run
    its = data(tape, figures)
    for place, (_, allocated, *_) in enumerate(its["levels"]):
        there = [b for b in its["buffers"] if b[3] <= place < b[4]]
        assert sum(nbytes for *_, nbytes, _, _ in there) == allocated
        if allocated == figures["peak allocated"]:
            kinds = {KINDS[kind] for _, kind, *_ in there}
            assert kinds == figures["peak allocated is"].keys()
    assert {its["names"][op[2]] for op in its["ops"]} >= {"0", "3", "optimizer"}


def test_a_template_has_one_place_for_each_thing(tmp_path):
    template = tmp_path / "page.html"
    parts = "/* shared.css */<script>/* shared.js */ /* steps */</script>"
    template.write_text(parts)
    page = fill_in(template, {"steps": "</script>"})
    assert ":root" in page and "function sizesUpTo(" in page
    assert page.endswith(" <\\/script></script>")
    for wrong, count in (("", 0), ("/* steps */", 2)):
        template.write_text(parts.replace("/* steps */", wrong * count))
        with pytest.raises(ValueError, match=f"page.html has {count} places for 'steps', not one"):
            fill_in(template, {"steps": "1"})


def colours(name: str) -> dict[str, str]:
    """Of shared.css: its variables, in the light theme or in the dark one."""
    light, dark = SHARED.with_suffix(".css").read_text().split("@media")[:2]
    found = re.findall(r"--(\w+): (#\w+);", light if name == "light" else light + dark)
    return {
        key: its if len(its) == 7 else "#" + "".join(2 * i for i in its[1:]) for key, its in found
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_letters_of_pages_can_be_read_light_and_dark(theme):
    """In the explorer, the calculator and the page of a run: 4.5 is what WCAG 2 asks for."""
    its = colours(theme)
    for letters in ("ink", "faint", "accent", "alarm"):
        for ground in ("paper", "panel"):
            assert contrast(its[letters], its[ground]) >= 4.5, (letters, ground)
    script = SHARED.with_suffix(".js").read_text()
    (units,) = re.findall(r"const UNITS = \[(.*?)\]", script)
    assert tuple(json.loads(f"[{units}]")) == UNITS  # as on all pictures
    others = re.findall(r'(?:ROOT|NOBODY|OPTIMIZER) = "(#\w+)"', script)
    (selected,) = re.findall(r'CURSOR = "(#\w+)"', VIEWER)
    assert len(others) == 3
    for ground in (*UNITS, *others, selected):  # of pieces of work, with white letters on them
        assert contrast("#ffffff", ground) >= 4.5, ground


def test_a_colour_means_one_thing():
    script = SHARED.with_suffix(".js").read_text()
    (kinds,) = re.findall(r"const KIND_COLOURS = {(.*?)};", script, re.S)
    memory = re.findall(r"#\w+", kinds)
    waits = re.findall(r"#\w+", *re.findall(r"const WAITS = (.*)", script))
    assert [re.sub('"', "", k) for k in re.findall(r'("[\w ]+"|\w+): "', kinds)] == [*KINDS]
    assert len({*memory, *waits, *UNITS}) == len(KINDS) + 2 + len(UNITS)


def test_all_sizes_of_a_page_are_in_one_unit(run):
    figures, tape = run
    shown = data(tape, figures)["figures"]
    in_bytes = {name for name, its in shown.items() if not isinstance(its, str)}
    assert in_bytes == {*BYTES} | {f"  {kind}" for kind in figures["peak allocated is"]}
    assert not any(re.search(r"\bMiB|GiB", its) for its in shown.values() if isinstance(its, str))
    assert all(shown[name] == figures[name] for name in BYTES)


def test_an_empty_tape_is_a_page_too():
    assert embedded(html([], {}))["length"] == 0


ASK = """<script>
const press = (key, shiftKey = false) =>
  canvas.dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey}));
const told = [];
const note = () => told.push(["when", "kinds", "operation"].map((id) => byId(id).innerText));
note();
look(0, lanes.indexOf("compute")); press("ArrowRight", true); note();
for (let i = 0; i < 6; i++) press("+");
told.push(view);
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -1})); told.push(view);
press("Home"); told.push(view);
press("ArrowUp"); press("p"); note();
document.title = JSON.stringify(told);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="viewer.html in a browser: there is no chromium here")
def test_a_browser_shows_it(run, tmp_path):
    figures, tape = run
    page = tmp_path / "page.html"
    page.write_text(html(tape, figures) + ASK)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    out = run_command(command).stdout
    (title,) = re.findall("<title>(.*?)</title>", out, re.S)
    first, second, zoomed, wheeled, whole, last = json.loads(
        title.replace("&lt;", "<").replace("&gt;", ">")
    )
    assert "MiB" in first[1] and "GiB" not in first[1]
    assert first[0].endswith(", the peak") and last == [*first[:2], last[2]]
    words = dict(line.split("\t") for line in first[1].splitlines())
    assert words.keys() >= figures["peak allocated is"].keys()
    assert words["allocated"] == f"{figures['peak allocated'] / 2**20:.2f} MiB"
    operation = dict(line.split("\t") for line in second[2].splitlines())
    its = data(tape, figures)
    op = next(e for e in its["ops"] if its["lanes"][e[0]] == "compute" and e[4] > 0)
    assert operation["starts"] == f"{op[4] / 1e3:.3f} ms" and operation["stream"] == "compute"
    length = figures["step"] * 1e6
    assert zoomed[1] - zoomed[0] == pytest.approx(length * 0.7**6)
    assert wheeled[1] - wheeled[0] == pytest.approx(length * 0.7**6 * 0.8)
    assert whole == pytest.approx([0, length], abs=1)
