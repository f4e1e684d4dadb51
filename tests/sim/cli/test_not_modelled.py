"""sim/cli/not_modelled.py: what is known elsewhere is refused by its name."""

import pytest

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.not_modelled import check_modelled


@pytest.mark.parametrize(
    "option, what",
    [
        ("--tp", "tensor parallelism cuts each matrix product"),
        ("--tensor_parallel", "tensor parallelism cuts"),
        ("--sp", "sequence parallelism cuts"),
        ("--cp", "context parallelism cuts each text"),
        ("--context-parallel-size", "context parallelism"),
        ("--PP", "pipeline parallelism gives each GPU some of the layers"),
        ("--ep", "expert parallelism gives each GPU some experts"),
        ("--fp8", "fp8 computes products of numbers of 8 bits"),
        ("--float8", "fp8 computes"),
    ],
)
def test_each_is_refused_with_what_it_is(option, what):
    with pytest.raises(ValueError, match=f"^{option}: {what}.* not modelled"):
        check_modelled(option)
    with pytest.raises(ValueError, match="not modelled"):
        parser().parse_args([option, "2"])


def test_nothing_else_is():
    for option in ("--batch", "--tpp", "plan", "--", ""):
        check_modelled(option)
    for option in parser()._option_string_actions:
        check_modelled(option)
