"""The tests, and the tools that `make matrix`, `make fuzz`, `make mutants` and `make bench` run."""

from minifsdp.sim.cli.terminal import begin

begin()  # before torch is imported

from tests import replace  # noqa: E402

replace.install()  # before anything else of minifsdp is imported
