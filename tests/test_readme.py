"""README.md: what it shows works, and what it counts is so."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

from tests.patience import run_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(path: Path) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    source = path.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*LAYOUT, tokenize.COMMENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_the_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.splitlines()) <= 20
    script = tmp_path / "example.py"
    script.write_text(code)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    result = run_command([*launch, script])
    assert result.returncode == 0, result.stderr
    losses = dict(re.findall(r"rank (\d): loss (\d\.\d+)", result.stdout))
    assert losses.keys() == {"0", "1"} and losses["0"] != losses["1"]


def test_the_map_of_files_is_complete_and_counts_right():
    rows = re.findall(r"^\| \[`(.+?)`\]\((.+?)\) \| ([\d,]+) \|", README, re.M)
    files = {
        path.name: path for path in (ROOT / "minifsdp").glob("*.py") if path.stem != "__init__"
    }
    assert {name for name, _, _ in rows} == files.keys()
    for name, link, lines in rows:
        assert link == f"minifsdp/{name}"
        assert int(lines) == code_lines(files[name]), f"{name} has {code_lines(files[name])}"
    (total,) = re.findall(r"^\| all \| ([\d,]+) \|", README, re.M)
    assert int(total.replace(",", "")) == sum(int(lines) for _, _, lines in rows)


def test_files_come_before_those_that_need_them():
    order = re.findall(r"^\| \[`(.+?)\.py`\]", README, re.M)
    for place, name in enumerate(order):
        source = (ROOT / "minifsdp" / f"{name}.py").read_text()
        needed = re.findall(r"^from minifsdp\.(\w+) import", source, re.M)
        assert set(needed) <= set(order[:place]), name


def test_no_concept_file_is_too_long_to_read():
    for path in (ROOT / "minifsdp").rglob("*.py"):
        assert code_lines(path) <= 150, path.name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)(.+?)\)", README):
        assert (ROOT / target).exists(), target
