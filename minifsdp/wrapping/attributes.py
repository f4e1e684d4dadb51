"""Attributes: a wrapper stands in a module's place, and has to look like it.

A program that was written for the plain module goes on to say ``model.blocks[0].scale``, and to set
it. What is not the wrapper's own is looked for in the wrapped module, and is set and deleted there,
where its ``forward`` reads it. What a wrapper has of its own (methods of this class, hooks, names
that begin with ``_``) stays with the wrapper.
"""

import inspect
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.checks.members import WRAPPED, check_part
from minifsdp.checks.other_wrappers import FSDP_MARK, refuse_around
from minifsdp.wrapping.module_tree import unit_of

KINDS = ("_parameters", "_buffers", "_modules")
YIELDING = {"engine": "_engine"}  # the wrapper's, unless the wrapped module has one of this name


class Forward(partial[Any]):
    """A wrapper's ``forward``, which says that it takes what the wrapped module's takes. Programs
    ask for that: transformers' Trainer drops the columns of a dataset that it does not take."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].module.forward)


class Transparent(nn.Module):
    """Base of the wrapper."""

    def __getattr__(self, name: str) -> Any:
        # Python comes here for what is not in __dict__ nor in the class, so also for submodules.
        module = self.__dict__.get("_modules", {}).get(WRAPPED)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if module is None:  # not wrapped yet
                raise
        try:
            return getattr(module, name)
        except AttributeError as error:
            # Said by name: else it would be the inner module's message, about a class that the
            # program may never have called.
            if name in YIELDING:
                return getattr(self, YIELDING[name])
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, and neither has the "
                f"{type(module).__name__} that it wraps{self._where()}",
                name=name, obj=self,
            ) from error  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        # Set on all modules before a parameter is touched: refused here, nothing has changed.
        if name == FSDP_MARK or isinstance(value, DTensor):
            refuse_around("torch's FSDP", self)
        if self._is_modules_own(name):
            module = self._modules[WRAPPED]
            self._check_parameter(name, value)
            setattr(module, name, value)
            return
        super().__setattr__(name, value)
        # Set on one module alone, as is done for batch norms, it is the wrapped module's mode.
        if name == "training" and (module := self._modules.get(WRAPPED)) is not None:
            module.training = value

    def __delattr__(self, name: str) -> None:
        if self._is_modules_own(name):
            module = self._modules[WRAPPED]
            assert module is not None
            self._check_parameter(name, None)
            check_part(module, name, None)
            delattr(module, name)
        else:
            super().__delattr__(name)

    # Of nn.Sequential, and of containers. Python looks for these in the class.

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __setitem__(self, key: Any, value: nn.Module) -> None:
        self.module[key] = value

    def __iter__(self) -> Any:
        return iter(self.module)

    def __contains__(self, item: Any) -> bool:
        return item in self.module

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True  # a module without a length is true, too

    # These, too, change what the wrapped module's forward reads.

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.module.add_module(name, module)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self._is_modules_own(name):
            self._check_parameter(name, param)
        super().register_parameter(name, param)

    def _is_modules_own(self, name: str) -> bool:
        """Whether a program that sets ``name`` means the wrapped module's attribute.

        What reads as the wrapper's is set there: setting ``forward`` on the wrapped module, to a
        function that calls the wrapper's, would never end. A new name is for the module, whose
        forward may ask for it; but one that begins with ``_`` is a mark that a framework leaves
        on the module that it was given.
        """
        if "_hooks" not in self.__dict__:  # not built yet
            return False
        if _has(self, name):
            return False
        module = self._modules[WRAPPED]
        return not name.startswith("_") or (module is not None and _has(module, name))

    def _check_parameter(self, name: str, value: object) -> None:
        """Refuse to set a parameter, except where all of them are there (unit_params.py)."""
        unit, module = unit_of(self), self._modules[WRAPPED]
        assert unit is not None
        owned = any((module, name) == owner for info in unit.param_infos for owner in info.owners)
        new = isinstance(value, nn.Parameter) and not owned
        if new or (owned and unit not in self._hooks.summoned):
            raise RuntimeError(
                f"{name!r} of {type(module).__name__}{self._where()} cannot be set or deleted "
                f"here: the parameters of the unit were sharded when it was wrapped. To change "
                f"values, do it inside FSDP.summon_full_params(model); for another parameter, "
                f"change the model before you wrap it."
            )

    def _where(self) -> str:
        unit = unit_of(self)
        return "" if unit is None else f" (unit {unit.label})"


def _has(module: nn.Module, name: str) -> bool:
    """Whether an attribute is there, without asking for it: it may be a property that works."""
    state = module.__dict__
    return (
        name in state or hasattr(type(module), name) or any(name in state[kind] for kind in KINDS)
    )
