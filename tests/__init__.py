"""The tests, and the tools that `make matrix`, `make fuzz`, `make mutants` and `make bench` run."""

import os
import warnings

# torch warns in every process that NumPy is not there. Nothing here needs it.
_MESSAGE = "Failed to initialize NumPy"
warnings.filterwarnings("ignore", _MESSAGE)
os.environ.setdefault("PYTHONWARNINGS", f"ignore:{_MESSAGE}:UserWarning")  # of the ranks

from tests import replace  # noqa: E402  # warnings first

replace.install()  # before anything of minifsdp is imported
