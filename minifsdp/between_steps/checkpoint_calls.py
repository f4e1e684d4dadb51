"""What torch.distributed.checkpoint does with a state dict, and what it must not do.

``torch.distributed.checkpoint.load({"model": model.state_dict()})`` changes the values in place,
which is enough for a plain module. If a value has a method ``load_state_dict``, torch calls it
afterwards. So the dict that state_dict.py returns has one, which loads the values into the model.
If the dict itself is given to ``load``, torch assigns to its entries, one by one; the dict then
loads all of them into the model after the last one.

torch does not tell which of its functions is calling. So this file looks for it on the stack.
"""

import sys
import weakref
from collections import OrderedDict
from types import FrameType
from typing import Any

from minifsdp.wrapping.attributes import ModuleWrapper
from minifsdp.wrapping.module_tree import unit_of

WrapperRef = weakref.ref[ModuleWrapper]


class ModelStateDict(OrderedDict[str, Any]):
    """What ``state_dict()`` of a wrapped model returns. It is saved and copied as an ordinary dict.

    Attributes:
        wrapper_ref: the model that it was made from.
    """

    wrapper_ref: "WrapperRef | None" = None
    _metadata: Any = None

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") == _LOADER and frame.f_locals["keys"][-1] == key:
            self._load()  # dcp.load(model.state_dict()): this was the last entry

    def state_dict(self) -> "OrderedDict[str, Any]":
        """The dict that torch.distributed.checkpoint saves, and writes into."""
        return OrderedDict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load into the model what torch.distributed.checkpoint has written."""
        self.update(state)
        self._load()

    def _load(self) -> None:
        wrapper = self.wrapper_ref() if self.wrapper_ref is not None else None
        if wrapper is not None:
            wrapper.load_state_dict(self, strict=False)  # a program may have added entries

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter(self.items())


def refuse_full_options() -> None:
    """Refuse the options of torch's set_model_state_dict() that distribute unsharded values by the
    names of parameters, if the model has flat parameters.

    Raises:
        NotImplementedError: that function is among the callers, with such an option. All ranks
            call it, so all of them raise this.
    """
    frame = asked_by("_load_model_state_dict")
    if frame is None:
        return
    info, whole = frame.f_locals["info"], frame.f_locals["model"]
    wrappers: list[Any] = [module for module in whole.modules() if unit_of(module) is not None]
    flat = [w for w in wrappers if w._unit.mesh is None and not w._hooks.summoned.get(w._unit)]
    if flat and (info.full_state_dict or info.broadcast_from_rank0):
        raise NotImplementedError(
            "minifsdp: set_model_state_dict() with full_state_dict=True or "
            "broadcast_from_rank0=True cannot distribute values to flat parameters. Call it "
            "inside of `with minifsdp.as_dtensors(model):`. Or give the whole state dict to every "
            "rank, without these options."
        )


def asked_by(function: str) -> FrameType | None:
    """The frame of a function of torch.distributed.checkpoint.state_dict that is among the callers;
    None if it is not."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name == function and module == _FUNCTIONS:
            return frame
        frame = frame.f_back
    return None


_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_FUNCTIONS = "torch.distributed.checkpoint.state_dict"
