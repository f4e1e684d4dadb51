"""sim/cli/runs.py: what is printed and written of all runs. test_main.py has it as typed."""

import json

from minifsdp.sim.__main__ import main
from minifsdp.sim.cli.commands import OTHERS
from tests.sim.test_main import SMALL


def test_settings_are_of_the_run_not_of_what_to_do_with_it(capsys):
    main([*SMALL, "--json"])
    (figures,) = json.loads(capsys.readouterr().out)
    assert not {*OTHERS} & figures["settings"].keys() and figures["settings"]["nodes"] == 2


def test_a_picture_says_which_machine_it_is_of(tmp_path, capsys):
    main([*SMALL, "--gpus", "4", "--html", str(tmp_path / "step.html")])
    assert f"{SMALL[1]}, 2 x 4 a100-40" in (tmp_path / "step.html").read_text()
    main([*SMALL, "--sweep", "gpu=h100,h200", "--svg", str(tmp_path / "step.svg")])
    text = (tmp_path / "step.svg").read_text()
    assert "2 x 8 h200, gpu h200" in text and "gpu h100" in text


def test_a_comparison_needs_a_run_that_fits(tmp_path, capsys):
    file = str(tmp_path / "snapshot")
    main([*SMALL, "--snapshot", file])
    capsys.readouterr()
    assert main([*SMALL, "--memory", "0.01", "--against", file]) == 1
    assert "ratio" not in capsys.readouterr().out
