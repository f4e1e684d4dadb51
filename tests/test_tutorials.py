"""tutorials/: each runs, and its page is what it prints."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from minifsdp.sim.__main__ import main
from tutorials import build

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
    code = [body for kind, body in build.cells(path.read_text()) if kind != build.MARKDOWN]
    assert sum(bool(line) for body in code for line in body.splitlines()) <= 150
    page = re.sub("```.*?```", "", path.with_suffix(".md").read_text(), flags=re.DOTALL)
    for alt, picture in re.findall(r"!\[(.*?)\]\((.*?)\)", page, re.DOTALL):
        assert len(alt) > 40 and (path.parent / picture).is_file()
    for link in re.findall(r"\]\((?!http)(.*?)\)", page):
        assert (path.parent / link.partition("#")[0]).exists(), link


def test_the_path_has_every_page_in_order_with_its_picture():
    path = (ROOT / "tutorials" / "README.md").read_text()
    rows = re.findall(
        r'^\| \*\*\[(\d\d) .*\]\((.*)\.md\)\*\*.*<img src="(.*)\.svg" .*\| (\d+) \|', path, re.M
    )
    assert [name for _, name, _, _ in rows] == [page.stem for page in build.tutorials([])]
    assert all(name.startswith(number) and name == drawn for number, name, drawn, _ in rows)
    minutes = sum(int(minutes) for *_, minutes in rows)
    hours = {"three": 3, "three and a half": 3.5, "four": 4}[re.search("about (.*) hours", path)[1]]
    assert abs(minutes / 60 - hours) <= 0.25
    assert "tutorials/README.md" in "\n".join((ROOT / "README.md").read_text().splitlines()[:15])


@pytest.mark.slow
def test_the_readmes_command_draws_the_tutorials_picture(tmp_path, capsys):
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"\$ python -m minifsdp.sim ([^$]*?--svg limiter.svg)", readme)
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
# {{ minifsdp/limiter.py NoLimit.freed }}
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


def test_an_unknown_tutorial_is_refused_by_name():
    with pytest.raises(SystemExit, match="no such tutorial: 99_dreams"):
        build.tutorials(["99_dreams"])
