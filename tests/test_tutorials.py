"""tutorials/: each runs, and its page is what it prints."""

import math
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minifsdp.core.engine import Engine
from minifsdp.core.layers import Layer
from minifsdp.core.unit import Unit
from minifsdp.core.unit_state import FORWARD, STRATEGY
from minifsdp.precision import Cast
from minifsdp.sim.__main__ import main
from tests.test_readme import code_lines
from tutorials import build, frame, quotes, taken_out

ROOT = Path(__file__).parents[1]

# A page draws its pictures again, where they lie, and another test reads them.
pytestmark = pytest.mark.xdist_group("pictures")


@pytest.mark.slow
@pytest.mark.parametrize("path", build.tutorials([]), ids=lambda path: path.stem)
def test_a_page_is_not_stale(path):
    pictures = {picture: picture.read_text() for picture in path.parent.glob(f"{path.stem}*.svg")}
    shown = path.with_suffix(".md").read_text()
    (made_with,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    try:
        page = build.page(path)  # its assertions hold, here and now
        if torch.cuda.is_available() or torch.__version__.partition("+")[0] != made_with:
            pytest.skip(f"it runs; its page is compared with torch {made_with} on a CPU alone")
        assert page == shown
        assert {picture: picture.read_text() for picture in pictures} == pictures
    finally:
        for picture, drawn in pictures.items():
            picture.write_text(drawn)


@pytest.mark.parametrize("path", build.tutorials([]), ids=lambda path: path.stem)
def test_a_tutorial_is_short_and_its_page_is_whole(path):
    """Its code: text is as long as it has to be, so that nobody writes telegrams."""
    assert code_lines(path) <= 150
    page = re.sub("```.*?```", "", path.with_suffix(".md").read_text(), flags=re.DOTALL)
    for alt, picture in re.findall(r"!\[(.*?)\]\((.*?)\)", page, re.DOTALL):
        assert len(alt) > 40 and (path.parent / picture).is_file()
    for link in re.findall(r"\]\((?!http)(.*?)\)", page):
        assert (path.parent / link.partition("#")[0]).exists(), link


def test_the_path_has_every_page_in_order_with_its_picture_and_minutes():
    path = (ROOT / "tutorials" / "README.md").read_text()
    rows = re.findall(
        r'^\| \*\*\[(\d\d) .*\]\((.*)\.md\)\*\*.*<img src="(.*)\.svg" .*\| (\d+)( ★|) \| (.*) \|',
        path,
        re.M,
    )
    one, two = (re.findall(r"\]\((\d\d_\w+)\.md\)\*\*", part) for part in parts_of(path))
    assert one[one.index("06_one_file") + 1] == "30_formulas"  # needed sooner than its number says
    assert two[0] == "28_layers"  # what a layer is; the others take theirs out
    for names, first in ((one, "30_formulas"), (two, "28_layers")):
        in_order = [name for name in names if name != first]
        assert in_order == sorted(in_order)
    assert sorted(one + two) == [page.stem for page in build.tutorials([])]
    assert all(name.startswith(number) and name == drawn for number, name, drawn, *_ in rows)
    assert frame.with_minutes(path) == path
    core = {number for number, *_, star, _ in rows if star}
    for number, _, _, _, _, after in rows:  # who reads those alone has read what they need
        assert number not in core or {*after.split()} <= core
    assert sum(int(minutes) for *_, minutes, star, _ in rows if star) <= 300
    assert "tutorials/README.md" in "\n".join((ROOT / "README.md").read_text().splitlines()[:60])


def parts_of(path: str) -> list[str]:
    """The two parts of the path: what one builds, and what is taken out of a real FSDP."""
    one, two = re.split(r"^## Part two", path.partition("## Part one")[2], flags=re.M)
    return [one, two]


def test_each_page_of_the_second_part_takes_out_what_it_is_about():
    """It runs a program without a part of the engine, and the path says which, and where it is."""
    _, two = parts_of((ROOT / "tutorials" / "README.md").read_text())
    rows = re.findall(r"^\| \*\*\[(\d\d) .*\]\((\w+)\.md\)\*\*(.*?) \| \[<img", two, re.M)
    assert len(rows) >= 13
    table = (ROOT / "tutorials" / "28_layers.md").read_text()
    for number, name, says in rows:
        taken = says.partition("taken out: ")[2].partition("<br>")[0]
        files = re.findall(r"\]\((\.\./minifsdp/\S+?\.py)\)", taken)
        assert files and all((ROOT / "tutorials" / file).is_file() for file in files), name
        program = (ROOT / "tutorials" / f"{name}.py").read_text()
        assert "three_times(" in program and "from taken_out import" in program, name
        page = (ROOT / "tutorials" / f"{name}.md").read_text()
        assert "put back: " in page and page.count("put back: ") == page.count("as it is: "), name
        assert f"[{number}]({name}.md)" in table or name == "28_layers", name


@pytest.mark.parametrize("said", ["right right right", "right wrong wrong"])
def test_a_part_that_makes_no_difference_or_is_not_back_is_noticed(said):
    words = iter(["right", "wrong", "right"])
    assert taken_out.three_times(lambda: next(words), nullcontext("without it"))[1] == "wrong"
    words = iter(said.split())
    with pytest.raises(AssertionError, match="right"):
        taken_out.three_times(lambda: next(words), nullcontext("without it"))


def test_what_is_taken_out_is_gone_in_the_block_only():
    class Kept(Layer):
        pass

    class Taken(Layer):
        pass

    engine = Engine.__new__(Engine)
    with taken_out.layer(Taken) as words:
        engine.use([Kept(), Taken()])
        assert words == "without Taken" and [*map(type, engine.moments.layers)] == [Kept]
    engine.use([Kept(), Taken()])
    assert [*map(type, engine.moments.layers)] == [Kept, Taken]
    stage = Cast(torch.bfloat16)
    with taken_out.stage(Cast):
        assert stage.launch(None, torch.ones(1))[0].dtype is torch.float32
    assert stage.launch(None, torch.ones(1))[0].dtype is torch.bfloat16
    unit = SimpleNamespace(reasons=set())
    with taken_out.reason(STRATEGY):
        Unit.hold(unit, STRATEGY)
        Unit.hold(unit, FORWARD)
    assert unit.reasons == {FORWARD}
    with taken_out.call("math.sqrt") as words:
        assert words == "without sqrt" and math.sqrt(4) is None
    assert math.sqrt(4) == 2


def test_minutes_are_counted_by_the_rule():
    words = "word " * 150
    assert frame.minutes(words) == 1
    code = "```python\n" + "x = 1\n\n" * 20 + "```\n"
    assert frame.minutes(words + "\n" + code) == 5  # 20 lines at 12 s; blank ones are not read
    assert frame.minutes(f"{words}\n{code}\n```\n1\n```\n![]()\n") == 8  # printed; a picture
    asked = "\n## Predict, then run\n\n1. a?\n2. b?\n<details>\n\n1. a.\n2. b.\n</details>"
    assert frame.minutes(words + asked) == 4
    assert str(frame.WORDS_PER_MINUTE) in (ROOT / "tutorials" / "README.md").read_text()


@pytest.mark.parametrize("path", build.tutorials([]), ids=lambda path: path.stem)
def test_a_page_links_to_its_neighbours_and_its_program(path):
    every = build.tutorials([])
    place, page = every.index(path), path.with_suffix(".md").read_text()
    head, _, foot = page.partition(frame.OPEN)[0], *page.partition(frame.CLOSE)[1:]
    assert f"({path.name}) · {frame.minutes(frame.body(path))} minutes" in head
    links = re.findall(r"\]\((\d.*?)\.md\)", foot.rpartition("\n---\n")[2])
    assert links == [other.stem for other in every[max(place - 1, 0) : place + 2] if other != path]
    assert "(README.md)" in foot and "(glossary.md)" in foot
    assert frame.framed(path, frame.body(path)) == page


@pytest.mark.parametrize("path", build.tutorials([]), ids=lambda path: path.stem)
def test_answers_are_folded_and_each_is_asserted(path):
    """A question has an answer below it, shown when one asks for it, that a run confirms."""
    _, _, asked = frame.body(path).partition("## Predict, then run")
    questions, _, answers = asked.partition(build.ANSWERS)
    numbers = re.findall(r"^(\d)\. ", questions, re.M)
    assert len(numbers) >= 2 and numbers == sorted({*numbers})
    program = path.read_text()
    asserting = program[program.index("def answers(") :]
    for number in numbers:
        assert re.search(rf"(^|# ){number}\.\s", answers.partition("</details>")[0], re.M), number
        assert re.search(rf"# {number}\.\s", asserting), number


def test_the_glossary_is_sorted_and_each_term_stands_on_its_page():
    words = (ROOT / "tutorials" / "glossary.md").read_text()
    entries = re.findall(r"^- \*\*(.+?)\*\*: (.+)\. \[(\d\d)\]\((.+)\.md\)$", words, re.M)
    assert len(entries) == words.count("\n- ") > 30
    terms = [term.casefold() for term, *_ in entries]
    assert terms == sorted({*terms})
    pages = {page.stem for page in build.tutorials([])}
    for term, sentence, number, name in entries:
        assert name in pages and name.startswith(number), term
        assert ". " not in sentence, f"{term}: one sentence"
        page = " ".join((ROOT / "tutorials" / f"{name}.md").read_text().split())
        assert term.removesuffix(" memory").casefold() in page.casefold(), (term, name)


@pytest.mark.slow
def test_the_simulators_readme_has_what_its_command_draws(tmp_path, capsys):
    readme = (ROOT / "minifsdp" / "sim" / "README.md").read_text()
    (command,) = re.findall(r"\$ minifsdp sim ([^$]*?--svg limiter.svg)", readme)
    words = shlex.split(command.replace("\\\n", " "))
    assert main([*words[:-1], str(tmp_path / words[-1])]) == 0
    capsys.readouterr()
    drawn = (tmp_path / words[-1]).read_text()
    assert drawn == (ROOT / "minifsdp" / "sim" / "limiter.svg").read_text()


def write(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "00_test.py"
    path.write_text(source)
    return path


PROGRAM = """\
# %% [markdown]
# # Title
# {{ minifsdp/core/limiter.py NoLimit.freed }}
# %% [hidden]
import math
# %%
def inner():
    print("from inside")


def experiment():
    inner()
    print(math.pi)
# %% [hidden]
def main():
    experiment()
    print("not on the page")
"""


def test_a_page_has_text_code_and_what_it_prints(tmp_path, capsys):
    page = build.page(write(tmp_path, PROGRAM))
    assert capsys.readouterr().out == "not on the page\n"
    assert "\n# Title\n" in page and "3.14159" in page and "from inside" in page
    assert "import math" not in page and "def main" not in page
    assert "def freed(self, unit: Unit, event: Event) -> None:" in page
    printed = [page.index(f"```\n{words}") for words in ("from inside", "3.14159")]
    assert page.index("def experiment") < printed[0] < printed[1]


def test_long_lines_are_broken_and_short_ones_left_as_they_are():
    table = "a   b      c\n" + "-" * 112
    assert build.narrow(table) == table
    first, second = build.narrow("word " * 40).splitlines()
    assert len(first) <= 112 and second.startswith("    word")


@pytest.mark.parametrize("name", ["limiter.py NoLimit.gone", "limiter.py Gone", "gone.py NoLimit"])
def test_a_page_that_names_what_is_gone_breaks(tmp_path, name):
    path = write(tmp_path, PROGRAM.replace("limiter.py NoLimit.freed", name))
    with pytest.raises((KeyError, FileNotFoundError), match=r"gone|Gone"):
        build.page(path)


LONG = """\
class Thing:
    def work(self) -> int:
        \"\"\"What it does.\"\"\"
        # of streams,
        stream.wait(
            event
        )
        stats.waits += 1
        if self.whole:
            stats.whole += 1
        return 1
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A file to quote from."""
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    (tmp_path / "thing.py").write_text(LONG)


def test_what_is_left_out_of_a_quote_is_seen_and_the_rest_is_there(engine):
    """Whole statements, so that what is left is Python; one ... for neighbours."""
    text = quotes.quoted(
        "before\n{{ thing.py Thing.work -of streams -stream.wait -stats.waits }}\nafter"
    )
    assert text == (
        "before\n```python\n"
        "def work(self) -> int:\n"
        '    """What it does."""\n'
        "    ...\n"
        "    if self.whole:\n"
        "        stats.whole += 1\n"
        "    return 1\n"
        "```\n<sub>`Thing.work` in [thing.py](../thing.py), shortened at `...`</sub>\nafter"
    )
    apart = quotes.quote("thing.py", "Thing.work", ["What it does", "stats.w"])
    assert apart.count("    ...\n") == 3 and "stats" not in apart and "event" in apart
    assert "shortened" not in quotes.quoted("{{ thing.py Thing.work }}")


def test_what_is_to_be_written_is_folded():
    for file, name, key in (
        ("minifsdp/core/flatten.py", "flatten", "flatten.1"),
        ("minifsdp/core/limiter.py", "EventQueue", "limiter.2, limiter.3"),
        ("minifsdp/core/limiter.py", "EventQueue.freed", "limiter.2, limiter.3"),
        ("tutorials/fsdp_in_one_file.py", "Unit.unshard", "build.3"),
    ):
        text = quotes.quoted(f"{{{{ {file} {name} }}}}")
        assert text.startswith("<details><summary>The code.") and f"first: {key}<" in text
    whole = "{{ minifsdp/core/limiter.py NoLimit }}"  # nobody's to write
    assert quotes.quoted(whole).startswith("```python")


def test_nothing_can_be_left_out_that_is_not_there(engine):
    with pytest.raises(KeyError, match=r"no statement or comment with 'stats\.gone'"):
        quotes.quoted("{{ thing.py Thing.work -stats.gone }}")


def test_an_unknown_tutorial_is_refused_by_name():
    with pytest.raises(SystemExit, match="no such tutorial: 99_dreams"):
        build.tutorials(["99_dreams"])
