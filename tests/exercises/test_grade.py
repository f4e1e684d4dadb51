"""tutorials/exercises: what the grader says of solutions that are broken, endless or dishonest.

Right and wrong solutions are in tutorials/exercises/ and are graded by `make kit-check`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.patience import run_command
from tutorials.exercises.catalog import exercises_alone

ROOT = Path(__file__).parent.parent.parent
SHARD = (ROOT / "minifsdp/core/shard.py").read_text()
RIGHT = "return -(-numel // world_size)"
WRONG = SHARD.replace(RIGHT, "return numel // world_size")
"""A wrong shard.1; in the same file shard.2 is right."""

OWN_FOLDER = """
import os, torch
from pathlib import Path
opened = (os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())
own = next(Path(file).parent for file in opened if file.endswith("/stack.0"))
"""
"""Finds the folder that the grader reads the report of this process from."""

DISHONEST = {
    "overwrites the reference": """
from pathlib import Path
here = Path(__import__("minifsdp").__file__).parent / "core" / "limiter.py"
here.write_text(here.read_text() + "#")
""",
    "overwrites the checks": """
from pathlib import Path
import tutorials.exercises.checks.shard as checks
Path(checks.__file__).write_text("")
""",
    "patches the judge": """
import tutorials.exercises.judge as judge
judge.verdict = judge._difference = lambda *args: ""
judge.equal = lambda want, got: True
""",
    "patches the checks": """
from tests.patience import run_command
from tutorials.exercises import catalog
for _, check in catalog._registered:
    object.__setattr__(check, "function", lambda: iter(()))
""",
    "patches the sandbox": """
import sys
sys.modules["tutorials.exercises.sandbox"].plain = lambda value: 0
""",
    "ends the process": "import os; os._exit(0)",
    "ends the process politely": "raise SystemExit(0)",
    "writes results": """
import json, os
text = json.dumps({"score": 100, "tests": []})
if os.fork() == 0:
    os.setsid()
    import time
    for _ in range(300):
        open(RESULTS, "w").write(text)
        time.sleep(0.1)
    os._exit(0)
""",
    "an empty report": OWN_FOLDER + "torch.save([], own / 'seen.0'); os._exit(0)",
    "a report of nonsense": OWN_FOLDER + "torch.save([('', 5)], own / 'seen.0'); os._exit(0)",
    "a report that cannot be read": OWN_FOLDER + "(own / 'seen.0').write_text('?'); os._exit(0)",
    "a report that runs code": OWN_FOLDER
    + """
class Evil:
    def __reduce__(self):
        return os.system, ("touch " + RESULTS + ".evil",)
torch.save([Evil()], own / "seen.0")
os._exit(0)
""",
    "replays what is expected, from memory": OWN_FOLDER
    + """
import gc, sys
frame, found = sys._getframe(), []
while frame:
    found += frame.f_locals.values()
    frame = frame.f_back
gc.unfreeze()
found += gc.get_objects()
values = [value for one in found if type(one) is dict for value in list(one.values())]
for report in values:
    if type(report).__name__ == "Report" and report.ranks[0]:
        torch.save([tuple(seen) for seen in report.ranks[0]], own / "seen.0")
        os._exit(0)
""",
    "a report for all that comes": OWN_FOLDER
    + """
for name in ("seen.0", "seen.0.partly", "half.0"):
    (own / name).mkdir()
""",
}
AFTER = len(SHARD.splitlines()) + 2  # the line of what is appended after an empty one
FIRST = 1 + next(i for i, line in enumerate(SHARD.splitlines()) if line.startswith("def padded_"))
BROKEN = {
    "a syntax error": (SHARD + "\ndef broken(:\n    pass\n", f"shard.py:{AFTER}: invalid syntax"),
    "no file": (None, "shard.py is not in"),
    "not text": ("\0\0", "shard.py:1: source code string cannot contain null bytes"),
    "a function is gone": (
        SHARD.replace("def padded_shard_numel", "def size"),
        "there is no padded_shard_numel",
    ),
    "other arguments": (
        SHARD.replace("padded_shard_numel(numel: int, world", "padded_shard_numel(n: int, world"),
        f"shard.py:{FIRST}: padded_shard_numel(n, world_size) should have the arguments (numel, wo",
    ),
    "an error at import": (SHARD + "\n1 / 0\n", f"shard.py:{AFTER}: ZeroDivisionError"),
    "exit at import": (SHARD + "\nraise SystemExit\n", f"shard.py:{AFTER}: SystemExit"),
    "an endless loop": (
        SHARD.replace(RIGHT, "while True: pass"),  # of one line: it may be stopped in any
        f"was stopped after 8 s, at shard.py:{SHARD[: SHARD.index(RIGHT)].count(chr(10)) + 1}",
    ),
    "a huge allocation": (
        SHARD.replace(RIGHT, "import torch\n    return torch.ones(10**12).numel()"),
        "RuntimeError",
    ),
    "a crash": (
        SHARD.replace(RIGHT, "import ctypes\n    return ctypes.string_at(0)"),
        "SIGSEGV: it has used memory that is not there",
    ),
    "prints": (SHARD.replace(RIGHT, "print('x' * 10**6)\n    " + RIGHT), ""),
    "endless recursion": (
        SHARD.replace(RIGHT, "return padded_shard_numel(numel, world_size)"),
        "RecursionError",
    ),
}


@pytest.fixture
def root(tmp_path):
    """A copy of what the grader needs, because some solutions change it."""
    for name in ("minifsdp", "tests", "tutorials"):
        ignored = shutil.ignore_patterns("__pycache__", "*.svg")
        shutil.copytree(ROOT / name, tmp_path / "root" / name, ignore=ignored)
    return tmp_path / "root"


def graded(root, folders, keys, results=None):
    """The state and the message of each exercise of each folder, from a process like make's."""
    program = f"""
import json
from pathlib import Path
from tutorials.exercises.catalog import exercises
from tutorials.exercises.grade import grade_all
from tutorials.exercises.report import gradescope, write
cases = [(Path(f), exercises()[k]) for f in {[str(f) for f in folders]} for k in {keys}]
found = grade_all(cases, workers=2, keep={not results})
if {results!r}:
    write(Path({results!r}), gradescope(found))
print(json.dumps([(r.state, r.message) for r in found]))
"""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = run_command(command, seconds=600, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout.splitlines()[-1])
    return [states[i : i + len(keys)] for i in range(0, len(states), len(keys))]


def folder_with(path, text):
    path.mkdir()
    if text is not None:
        (path / "shard.py").write_text(text)
    return path


@pytest.mark.slow
def test_what_is_broken_gets_one_line_and_the_rest_is_graded(root, tmp_path):
    folders = [folder_with(tmp_path / name, text) for name, (text, _) in BROKEN.items()]
    for (name, (_, says)), (first, second) in zip(
        BROKEN.items(), graded(root, folders, ["shard.1", "shard.2"]), strict=True
    ):
        assert first[0] == ("wrong" if says else "right"), (name, first)
        assert says in first[1] and "\n" not in first[1], (name, first)
        alone = "import" not in name and name not in ("a syntax error", "no file", "not text")
        assert not alone or second == ["right", ""], (name, second)


WAITS = """
import functools, os
import tutorials.exercises.inside as inside
ends = os.pipe()
inside.plain = functools.partial(os.read, ends[0])  # of nothing that ever comes
"""


@pytest.mark.slow
def test_what_waits_outside_of_the_students_files_is_inconclusive(root, tmp_path):
    folder = folder_with(tmp_path / "waits", SHARD + WAITS)
    ((state, message),) = graded(root, [folder], ["shard.1"])[0]
    assert state == "inconclusive" and ", twice, outside of your files" in message


def judged(root, tmp_path, tricks):
    """What the grader says of each trick; none gets points, or runs code in the grader."""
    results = tmp_path / "results.json"
    folders = [
        folder_with(tmp_path / name, WRONG + DISHONEST[name].replace("RESULTS", repr(str(results))))
        for name in tricks
    ]
    found = graded(root, folders, ["shard.1"], str(results))
    time.sleep(0.5)  # what still runs would write now
    assert json.loads(results.read_text())["score"] == 0
    assert not Path(f"{results}.evil").exists()
    return {name: one for name, (one,) in zip(tricks, found, strict=True)}


CHANGED = "the files of the grader were changed while the exercises ran"


@pytest.mark.slow
def test_no_trick_makes_a_wrong_solution_right(root, tmp_path):
    """What the student's process does to the grader's modules, reports and results."""
    tricks = [name for name in DISHONEST if not name.startswith("overwrites")]
    for name, (state, message) in judged(root, tmp_path, tricks).items():
        assert state == "wrong" and message and message != CHANGED, name


@pytest.mark.slow
@pytest.mark.parametrize("trick", [name for name in DISHONEST if name.startswith("overwrites")])
def test_what_changes_the_graders_files_makes_everything_wrong(root, tmp_path, trick):
    assert judged(root, tmp_path, [trick]) == {trick: ["wrong", CHANGED]}


@pytest.mark.slow
def test_what_the_reference_gives_is_kept_until_anything_changes(root, tmp_path):
    right = [folder_with(tmp_path / "right", SHARD)]

    def state(results=None):
        return graded(root, right, ["shard.1"], results)[0][0][0]

    def kept():
        return sorted(file for file in (root / ".expected").rglob("*") if file.is_file())

    assert state() == "right"
    (file,) = kept()
    content = file.read_bytes()
    torch.save([("another observation", 1)], file)
    assert state() == "wrong"  # so it is used
    assert state(str(tmp_path / "results.json")) == "right"  # but not where points count
    file.write_text("?")
    assert state() == "right"
    assert kept() == [file] and file.read_bytes() == content
    with (root / "minifsdp/core/shard.py").open("a") as reference:
        reference.write("# another reference\n")
    assert state() == "right" and len(kept()) == 2


@pytest.mark.slow
def test_where_all_together_is_wrong_the_file_is_named(root, tmp_path):
    """Here it is wrong alone, too; the same is said where two right functions do not fit."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for exercise in exercises_alone(2):
        (folder / exercise.file).write_text(exercise.reference)
    reduce = folder / "reduce.py"
    mean = "unit, value, 1 / unit.shard_world_size"
    assert mean in reduce.read_text()
    reduce.write_text(reduce.read_text().replace(mean, "unit, value, 1.0"))
    [[(state, message)]] = graded(root, [folder], ["together.1"])
    assert state == "wrong" and message.endswith(
        "With the reference's reduce.py in the place of yours it is right: look there."
    )


def test_whoever_reads_may_leave(tmp_path):
    words = [sys.executable, "-m", "tutorials.exercises.grade", tmp_path]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 141
