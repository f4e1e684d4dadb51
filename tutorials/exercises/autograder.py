"""`make autograder`: dist/autograder.zip, for Gradescope's default container.

Gradescope unpacks it to /autograder/source, runs setup.sh once, and run_autograder for each
submission, which writes /autograder/results/results.json (Gradescope's documentation, "Autograder
specifications"). INSTRUCTOR.md says how to use it, and what it cannot prevent.
"""

import sys
import zipfile
from pathlib import Path

from tutorials.exercises.catalog import ROOT

SETUP = """#!/usr/bin/env bash
# Installs torch for CPUs: a few hundred MB, once, when the autograder is built.
set -e
cd /autograder/source
apt-get update
apt-get install -y python3 python3-venv
python3 -m venv /autograder/python
/autograder/python/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu \\
    -c constraints.txt torch pytest pytest-timeout
"""

RUN = """#!/usr/bin/env bash
# Grades /autograder/submission. --hidden-seed asks what needs no ranks again with other numbers,
# for half of its points; students see that part when grades are published. Change it every year.
cd /autograder/source
/autograder/python/bin/python -W ignore -m tutorials.exercises.grade /autograder/submission \\
    --results /autograder/results/results.json --hidden-seed 2026 --patience 4 --workers 1
true
"""

FILES = (
    "minifsdp/**/*.py",
    "tests/*.py",
    "tests/core/*.py",
    "tutorials/*.md",
    "tutorials/steps/*.diff",
    "tutorials/exercises/**/*.py",
)
DATA = (
    "constraints.txt",
    "LICENSE",
    "tutorials/fsdp_in_one_file.py",
    "tutorials/grow.py",
    "tutorials/exercises/exercises.toml",
    "tutorials/exercises/labs.toml",
)
NOT_IN_IT = ("right", "wrong", "solutions")  # solutions


def build(path: Path) -> None:
    """Write the zip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {file for pattern in FILES for file in ROOT.glob(pattern)}
    files |= {ROOT / name for name in DATA}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("setup.sh", SETUP), ("run_autograder", RUN)):
            program = zipfile.ZipInfo(name)
            program.external_attr = 0o755 << 16
            archive.writestr(program, text)
        for file in sorted(files):
            if not set(NOT_IN_IT) & set(file.parts):
                archive.write(file, file.relative_to(ROOT))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(sys.argv[1])
