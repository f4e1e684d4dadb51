"""tutorials/: each runs, and its page is what it prints."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from minifsdp.sim.__main__ import main
from tests.test_readme import code_lines
from tutorials import build, frame, quotes

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
    names = [name for _, name, *_ in rows]
    sheet = names.pop(names.index("06_one_file") + 1)  # needed sooner than its number says
    assert names == [page.stem for page in build.tutorials([]) if page.stem != "30_formulas"]
    assert sheet == "30_formulas"
    assert all(name.startswith(number) and name == drawn for number, name, drawn, *_ in rows)
    assert frame.with_minutes(path) == path
    core = {number for number, *_, star, _ in rows if star}
    for number, _, _, _, _, after in rows:  # who reads those alone has read what they need
        assert number not in core or {*after.split()} <= core
    assert sum(int(minutes) for *_, minutes, star, _ in rows if star) <= 300
    assert "tutorials/README.md" in "\n".join((ROOT / "README.md").read_text().splitlines()[:15])


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
def test_the_readmes_command_draws_the_tutorials_picture(tmp_path, capsys):
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(
        r"\$ (?:python -m minifsdp\.|minifsdp )sim ([^$]*?--svg limiter.svg)", readme
    )
    words = shlex.split(command.replace("\\\n", " "))
    assert main([*words[:-1], str(tmp_path / words[-1])]) == 0
    capsys.readouterr()
    drawn = (tmp_path / words[-1]).read_text()
    assert drawn == (ROOT / "tutorials" / "11_limiter.svg").read_text()


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
