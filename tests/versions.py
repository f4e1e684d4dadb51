"""The fast tests on the Pythons and torches that users have: `make versions`.

    python tests/versions.py                   # each Python and each torch once, in few pairs
    python tests/versions.py --all             # all pairs
    python tests/versions.py --python 3.13 --torch 2.14 -- tests/test_unit.py

Each pair gets an environment of its own in .versions/, with what pip gives for it, and a log beside
it. On Linux PyPI's torch takes 5 GB for each, and a build for CPUs one:
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make versions`.

A table at the end says what has passed, and of all else why it was not run: an interpreter that is
not on PATH, a torch that pip does not find. Exits with 1 if tests have failed or none has run.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product, zip_longest
from pathlib import Path

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
TORCHES = ["2.11", "2.12", "2.13", "2.14"]
FOLDER = Path(__file__).parent.parent / ".versions"
PASSED = "passed"  # as pytest's last line says it
Pair = tuple[str, str]
Row = tuple[str, str, str]


def pairs(pythons: Sequence[str], torches: Sequence[str]) -> list[Pair]:
    """Each Python and each torch at least once; the newest ones together, as pip gives them."""
    if not pythons or not torches:
        return []
    newest = pythons[-1], torches[-1]
    both = zip_longest(reversed(pythons), reversed(torches))
    return [(python or newest[0], torch or newest[1]) for python, torch in both]


def interpreter(python: str) -> str | None:
    """The command of a Python of this version that runs; None if there is none on PATH. A name
    alone does not tell: pyenv has one for each version, and runs those that were chosen."""
    command = shutil.which(f"python{python}")
    if command is None:
        return None
    says = [command, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    found = subprocess.run(says, capture_output=True, text=True)
    return command if found.stdout.strip() == python else None


def install(command: str, torch: str, folder: Path) -> str | None:
    """Make an environment, unless it is there. Returns why it could not be made, or None."""
    if (folder / "installed").exists():
        return None
    wanted = [f"torch=={torch}.*", "-e", f"{FOLDER.parent}[test]"]
    for step in (
        [command, "-m", "venv", "--clear", folder],
        [folder / "bin/python", "-m", "pip", "install", "--quiet", *wanted],
    ):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            return _last(done.stderr, "ERROR") or _last(done.stdout + done.stderr)
    (folder / "installed").touch()
    return None


def test(folder: Path, arguments: Sequence[str]) -> str:
    """Run the tests in an environment. Returns what pytest says at its end."""
    how = ["-m", "pytest", "-p", "no:cacheprovider", "-n", "auto", "--dist", "loadgroup"]
    how += ["-m", "not slow", *arguments]
    log = Path(f"{folder}.log")
    with log.open("w") as out:
        code = subprocess.run(
            [folder / "bin/python", *how], cwd=FOLDER.parent, stdout=out, stderr=subprocess.STDOUT
        ).returncode
    last = _last(log.read_text()).strip("= ")
    return last if code == 0 and PASSED in last else f"FAILED, {last}; see {log}"


def _last(text: str, beginning: str = "") -> str:
    lines = [line for line in text.splitlines() if line.strip() and line.startswith(beginning)]
    return lines[-1] if lines else ""


def run(wanted: Sequence[Pair], arguments: Sequence[str]) -> list[Row]:
    """Test each pair. Returns rows of the table: Python, torch, and what came of it."""
    rows = []
    FOLDER.mkdir(exist_ok=True)
    for python, torch in wanted:
        folder, command = FOLDER / f"python{python}_torch{torch}", interpreter(python)
        if command is None:
            outcome = f"not run: no python{python} on PATH that runs"
        else:
            print(f"Python {python}, torch {torch} ...", flush=True)
            missing = install(command, torch, folder)
            outcome = f"not run: {missing}" if missing else test(folder, arguments)
        rows.append((python, torch, outcome))
    return rows


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this one")
    parser.add_argument("--torch", action="append", choices=TORCHES, help="only this one")
    parser.add_argument("--all", action="store_true", help="all pairs")
    parser.add_argument("arguments", nargs="*", help="for pytest")
    options = parser.parse_args(given)
    pythons, torches = options.python or PYTHONS, options.torch or TORCHES
    at_hand = [python for python in pythons if interpreter(python)]
    chosen = [*product(pythons, torches)] if options.all else pairs(at_hand, torches)
    if not options.all:
        chosen += [(python, "-") for python in pythons if python not in at_hand]
    rows = run(chosen, options.arguments)
    print(f"\n{'Python':8}{'torch':8}tests")
    for python, torch, outcome in rows:
        print(f"{python:8}{torch:8}{outcome}")
    outcomes = [outcome for _, _, outcome in rows]
    failed = any(outcome.startswith("FAILED") for outcome in outcomes)
    return int(failed or not any(PASSED in outcome for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
