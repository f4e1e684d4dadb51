"""sim/cli/blame.py: whose line it was."""

import pytest
import torch
from torch import nn

from minifsdp.sim.cli.blame import blaming, place


def line_of(text: str) -> str:
    with open(__file__) as file:
        return f"{__file__}:{next(i for i, line in enumerate(file, 1) if text in line)}"


def layer(x):
    return nn.Linear(3, 3)(x)  # here


def test_the_place_is_the_users_last_line_and_not_torchs():
    with pytest.raises(ValueError) as found, blaming("m", "its forward"):
        layer(torch.zeros(2, 2))
    assert str(found.value).startswith("model 'm' fails in its forward: RuntimeError: mat1 and")
    assert str(found.value).endswith(f"({line_of('# here')})")
    assert "\n" not in str(found.value)
    assert isinstance(found.value.__cause__, RuntimeError)


def test_only_the_first_line_of_a_message_and_something_for_none():
    for error, shown in (
        (TypeError("\none\ntwo"), "its backward: TypeError: one ("),
        (OSError(), "its backward: OSError: (no message) ("),
        (SystemExit(0), "its backward: SystemExit: 0 ("),
    ):
        with pytest.raises(ValueError) as found, blaming("m", "its backward"):
            raise error
        assert shown in str(found.value) and "two" not in str(found.value)


def test_a_file_that_is_no_python_is_named_by_its_own_line(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("x = 1\ndef f(:\n")
    with pytest.raises(SyntaxError) as found:
        compile(file.read_text(), str(file), "exec")
    assert place(found.value) == f"{file}:2"


def test_what_does_not_fit_is_no_mistake():
    with pytest.raises(torch.OutOfMemoryError), blaming("m", "its forward"):
        raise torch.OutOfMemoryError("CUDA out of memory.")
