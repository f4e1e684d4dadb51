"""minifsdp/__init__.py: names that are there, and looked up late."""

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

import minifsdp
import minifsdp.sim
from tests.patience import run_command

PACKAGES = [minifsdp, minifsdp.sim]


def imported_for_type_checkers(package):
    """Names, and the modules that they are from."""
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {alias.name: node.module for node in block.body for alias in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_is_what_type_checkers_take_it_for(package):
    told = imported_for_type_checkers(package)
    assert set(told) == set(package.__all__) <= set(dir(package))
    for name, home in told.items():
        assert getattr(package, name) is getattr(import_module(home), name), name


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_not_there_is_an_attribute_error(package):
    with pytest.raises(
        AttributeError, match=f"module '{package.__name__}' has no attribute 'nome'"
    ):
        _ = package.nome
    assert not hasattr(package, "_home") and not hasattr(package, "__wrapped__")


MAIN = "import minifsdp.sim.__main__ as m\n"


def in_a_new_process(program):
    result = run_command([sys.executable, "-c", program])
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "program",
    [
        f"{MAIN}try: m.main(['--help'])\nexcept SystemExit: pass",
        f"{MAIN}try: m.main(['plan', '--help'])\nexcept SystemExit: pass",
        f"{MAIN}try: m.main(['calibrate', '--help'])\nexcept SystemExit: pass",
        f"{MAIN}assert m.main(['--gpu', 'a1000']) == 2",
        f"{MAIN}assert m.main(['--cluster', 'nowhere']) == 2",
        f"{MAIN}assert m.main(['--against', 'nowhere']) == 2",
        "import minifsdp\nassert 'explain' in dir(minifsdp) and minifsdp.__version__",
    ],
)
def test_what_options_need_loads_no_torch(program):
    assert in_a_new_process(f"{program}\nimport sys\nprint('torch' in sys.modules)").endswith(
        "False\n"
    )


FIND_NAMES = [
    "from minifsdp import *\nFullyShardedDataParallel, CPUOffload, explain",
    "import minifsdp\nminifsdp.core.engine.Engine",  # as if all had been imported at once
    "from minifsdp import OptimStateKeyType",  # refused when it is used
    "import minifsdp.sim\nminifsdp.sim.cluster, minifsdp.sim.virtual_cluster.cluster",
]


@pytest.mark.slow
def test_new_processes_find_names():
    """One program each, forked where torch is imported already: that takes longer than all else."""
    in_a_new_process(
        f"""
import os, torch
for program in {FIND_NAMES}:
    if not os.fork():
        exec(program)
        os._exit(0)
    _, status = os.wait()
    assert status == 0, program
"""
    )


def test_where_torch_has_a_name_too_it_is_minifsdps():
    assert minifsdp.CPUOffload.__module__ == "minifsdp.api"
    assert minifsdp.MixedPrecision.__module__ == "minifsdp.api"
