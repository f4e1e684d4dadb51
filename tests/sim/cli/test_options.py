"""sim/cli/options.py: all that can be asked for can be done."""

import pytest

from minifsdp.sim.__main__ import main, parser
from minifsdp.sim.cli import options
from minifsdp.sim.cli.commands import OTHERS
from minifsdp.sim.cli.options import grid
from minifsdp.sim.hardware import attention
from minifsdp.sim.training import optimizers, wrapped


@pytest.mark.parametrize(
    "names, known",
    [
        (options.STRATEGIES, wrapped.STRATEGIES),
        (options.PRECISION, wrapped.PRECISION),
        (options.BACKWARD, wrapped.BACKWARD),
        (options.FORWARD, wrapped.FORWARD),
        (options.ENGINES, ("minifsdp", *wrapped.ENGINES)),
        (options.OPTIMIZERS, optimizers.OPTIMIZERS),
        (options.ATTENTION, ("auto", *attention.BACKENDS)),
    ],
)
def test_each_name_means_something(names, known):
    assert list(names) == list(known)


def test_a_grid_has_every_combination_in_order_and_changes_nothing_else():
    given = parser().parse_args(["--batch", "3", "--limit", "7"])
    rows = grid(parser(), given, ["limit=none,1", "no-sync=no,yes"])
    assert [tuple(chosen.values()) for chosen, _ in rows] == [
        ("none", "no"), ("none", "yes"), ("1", "no"), ("1", "yes"),
    ]  # fmt: skip
    assert [(its.limit, its.no_sync) for _, its in rows] == [tuple(c.values()) for c, _ in rows]
    assert {its.batch for _, its in rows} == {3} and given.limit == "7"
    ((chosen, its),) = grid(parser(), given, [])
    assert not chosen and vars(its) == vars(given)


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"]])
def test_help_names_every_setting(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code
    shown = " ".join(capsys.readouterr().out.split())
    assert all(
        f"--{name.replace('_', '-')} " in shown
        for name in vars(parser().parse_args([]))
        if name not in OTHERS
    )
    assert "share of a GPU's peak" in " ".join(shown.split()) and "(default: gpt-125m)" in shown
