"""sim/cli/progress.py: what is being done."""

import sys

from minifsdp.sim.cli.progress import progress


def test_it_is_told_to_whoever_looks_and_nobody_else(capsys, monkeypatch):
    progress("step 1")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress("step 1")
    progress("")
    assert capsys.readouterr().err == "\rstep 1 ...\x1b[K\r\x1b[K"
