"""Scripts that were written for torch: changing the import is enough.

Each script runs as it is and with `minifsdp` in place of `torch.distributed.fsdp` in its imports,
and both have to return the same figures. What differs in the last bits is the norm of all
gradients, which is a sum in another order. A run that is clipped by it is compared less strictly.
"""

import re
import warnings
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch.distributed.algorithms._comm_hooks import default_hooks

from tests.ranks import device, on_ranks
from tests.torchrun import torchrun

FOLDER = Path(__file__).parent


def on_minifsdp(source: str) -> str:
    """What a user does: `sed -E 's/^from torch\\.distributed\\.fsdp[.a-z_]* /from minifsdp /'`."""
    changed, count = re.subn(
        r"^from torch\.distributed\.fsdp[.a-z_]* ", "from minifsdp ", source, flags=re.M
    )
    assert count
    return changed


def results(name: str, changed: bool, arguments: str) -> dict:
    path = FOLDER / f"{name}.py"
    source = on_minifsdp(path.read_text()) if changed else path.read_text()
    script = ModuleType(name)
    exec(compile(source, str(path), "exec"), script.__dict__)
    if name == "train_fsdp1" and not changed and device().type == "cpu":
        # torch pins the shards' memory, for which it needs a GPU. Where they are makes no
        # difference for what is computed.
        arguments = arguments.replace("--cpu-offload", "")
    with patch.object(default_hooks, "_decompress", decompress), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*NO_SHARD.*deprecated", FutureWarning)  # torch's
        return script.main(arguments.split())


def decompress(state, grad) -> None:
    """torch's own also calls record_stream(), which fails on a CPU."""
    grad.data = grad.data.to(state.parameter_type)


def compare(name: str, arguments: str) -> None:
    theirs, ours = (results(name, changed, arguments) for changed in (False, True))
    exact = "--max-norm" not in arguments
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for figure in ("losses", "scales"):
        torch.testing.assert_close(ours[figure], theirs[figure], **close)
    if "fp16" in arguments.split("--comm-hook")[0]:
        before_and_after = pairwise(ours["scales"])
        up_and_down = {after > before for before, after in before_and_after if after != before}
        assert up_and_down == {True, False}  # otherwise no rank would have found an overflow
    torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-5, atol=0)
    if theirs["state"]:  # torch's full state dicts may be on the first rank only
        assert ours["state"].keys() == theirs["state"].keys()
    for key, value in theirs["state"].items():
        # Adam makes much of the last bits of a gradient that is nearly zero.
        assert torch.equal(ours["state"][key], value) or not exact, key


@pytest.mark.few(5)
@pytest.mark.parametrize("arguments", [
    "",
    "--use-orig-params --checkpoint",
    "--precision bf16 --strategy SHARD_GRAD_OP",
    "--precision bf16 --use-orig-params --checkpoint --accumulate 1",
    "--precision fp16 --init-scale 2e5 --steps 6",
    "--precision fp16 --init-scale 2e5 --steps 6 --use-orig-params --checkpoint",
    "--comm-hook fp16",
    "--comm-hook bf16 --use-orig-params",
    "--comm-hook fp16 --strategy NO_SHARD --accumulate 1",
    "--cpu-offload --use-orig-params",
    "--max-norm 0.1",
    "--max-norm 0.1 --use-orig-params",
])  # fmt: skip
@on_ranks(2)
def test_a_script_for_fsdp1(arguments):
    compare("train_fsdp1", arguments)


@pytest.mark.few(4)
@pytest.mark.parametrize("arguments", [
    "",
    "--checkpoint --keep",
    "--precision bf16",
    "--precision bf16 --accumulate 3 --keep",
    "--precision fp16 --init-scale 2e5 --steps 6",
    "--cpu-offload",
    "--max-norm 0.1",
])  # fmt: skip
@on_ranks(2)
def test_a_script_for_fsdp2(arguments):
    compare("train_fsdp2", arguments)


@pytest.mark.parametrize("name", ["train_fsdp1", "train_fsdp2"])
def test_a_script_runs_under_torchrun(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(on_minifsdp((FOLDER / f"{name}.py").read_text()))
    result = torchrun(path, 2)
    assert result.returncode == 0, result.stderr
    assert "step 3: loss" in result.stdout
