"""tutorials/problems.md: fifteen problems, and the answers are what a run says."""

import re
import sys
from types import SimpleNamespace

import pytest

from tutorials import build, problems

PAGE = problems.PAGE.read_text()
SHEET = problems.PAGE.with_name("30_formulas.md").read_text()


def test_there_are_fifteen_and_each_has_a_folded_answer():
    parts = re.split(r"^## (\d+)\. .+$", PAGE, flags=re.M)
    assert [int(number) for number in parts[1::2]] == [*range(1, 16)]
    assert len(problems.PROBLEMS) == 15
    for problem in parts[2::2]:
        question, _, answer = problem.partition("<details><summary>Answer</summary>")
        assert re.search(r"\d", question) and "?" in question and "virtual" not in question
        sentences = re.findall(r"[.?](?=\s|$)", question)
        assert 2 <= len(sentences) <= 4, question
        lines, _, says = answer.partition("\nThe virtual GPU: ")
        assert 2 <= lines.count("\n- ") <= 5 and re.search(r"\d", says)
        assert answer.rstrip().endswith("</details>")


@pytest.mark.parametrize("found", [110.0, 90.0])
def test_an_answer_that_is_off_fails(found):
    assert problems.off(100.0, found, within=0.11).startswith("10 % ")
    with pytest.raises(AssertionError):
        problems.off(100.0, found, within=0.09)


def test_who_looks_for_problems_finds_them():
    folder = problems.PAGE.parent
    for page in ("README.md", "30_formulas.md", "exercises/README.md"):
        assert "problems.md" in (folder / page).read_text(), page


def test_the_sheet_says_which_problem_has_a_run():
    titles = dict(re.findall(r"^## (\d+)\. (.+)$", PAGE, re.M))
    rows = re.findall(r"^\| (.+?) \|.* problem (\d+) \|$", SHEET, re.M)
    words = {"checkpoint": "checkpoint", "padded": "Padding", "no_sync": "Accumulating"}
    words["offload"] = "offload"
    assert len(rows) == len(words)
    for row, number in rows:
        assert [word for key, word in words.items() if key in row and word in titles[number]], row


def test_make_tutorials_makes_it(tmp_path, monkeypatch):
    made = []
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "tutorials", lambda names: [])
    monkeypatch.setitem(sys.modules, "problems", SimpleNamespace(main=lambda: made.append(1)))
    build.main(["--frames"])
    assert not made
    build.main([])
    assert made


@pytest.mark.slow
def test_the_page_is_what_the_program_writes(capsys):
    assert problems.text() == PAGE
