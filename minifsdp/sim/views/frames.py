"""Who asked for memory: the lines of Python that were running, for torch's memory viewer."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_SIMULATOR = Path(__file__).parents[1]
_OF_USERS = ("training/models.py", "training/llama.py", "cli/run.py")
"""Of the simulator: what is trained, and the loop that trains it."""
_OF_TORCH = ("optim/", "_tensor.py")
"""Of torch: the optimizer, and the call of a backward."""
_TORCH, _LIBRARY = str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"]

Frame = dict[str, Any]
"""As in torch's snapshots: ``name``, ``filename`` and ``line``."""


def frames() -> list[Frame]:
    """The innermost first. Without those of torch, of Python's library and of the virtual GPU;
    with the model's, the training loop's, the engine's, the optimizer's and ``backward``."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_shown(frame.f_code):
            found.append(_frame(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


@cache
def _frame(code: CodeType, line: int) -> Frame:
    """One object for each line, so that a pickle has it once."""
    return {"name": code.co_name, "filename": code.co_filename, "line": line}


@cache
def _is_shown(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith(tuple(f"{_TORCH}/{part}" for part in _OF_TORCH)):
        return True
    if file.startswith(("<frozen", _TORCH)):
        return False
    if file.startswith(_LIBRARY):
        return "site-packages" in file
    path = Path(file)
    return (
        not path.is_relative_to(_SIMULATOR) or path.relative_to(_SIMULATOR).as_posix() in _OF_USERS
    )
