"""The tests, and the tools that `make matrix`, `make fuzz`, `make mutants` and `make bench` run."""

import sys

from minifsdp.sim.cli.terminal import begin

begin(program=sys.argv[0] == "-m")  # `python -m tests.fuzz`, which is just being found

from tests import replace  # noqa: E402

replace.install()  # before anything else of minifsdp is imported
