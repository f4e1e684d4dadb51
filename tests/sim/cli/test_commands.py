"""sim/cli/commands.py: what a run and calibrate take besides settings. Others have what it does."""

import pytest

from minifsdp.sim.__main__ import main, parser
from minifsdp.sim.cli.commands import FILES, OTHERS


def test_what_is_no_setting_is_known():
    """All that a run takes and plan does not: nothing of that can be swept."""
    taken = set(vars(parser().parse_args([])))
    settings = {name.lstrip("-").replace("-", "_") for name in plans_options()}
    assert taken - settings == {*OTHERS} > {*FILES}


def plans_options():
    from minifsdp.sim.cli.options import Parser, add_settings

    p = Parser(add_help=False)
    add_settings(p)
    return p._option_string_actions


def test_nothing_is_done_unless_it_is_asked_for():
    options = parser().parse_args([])
    assert not any(getattr(options, name) for name in OTHERS)


def test_calibrates_help_says_where_it_writes(capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("--ranks VALUE", "--profile FILE", "--gpu VALUE", "default: cluster.json"):
        assert word in shown
