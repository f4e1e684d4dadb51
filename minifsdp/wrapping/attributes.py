"""Attributes: a wrapper stands in a module's place, and has to look like that module.

A program that was written for the plain module reads and sets ``model.blocks[0].scale``. An
attribute that the wrapper does not have is looked up in the wrapped module. It is set and deleted
there, too, since the wrapped ``forward`` reads it there::

    model.scale           the wrapped module's
    model.scale = 2       set on the wrapped module
    model.no_sync, model.training, model._unit, hooks       the wrapper's own
"""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.checks.members import FSDP_MARK, WRAPPED, check_part
from minifsdp.checks.other_wrappers import refuse_around
from minifsdp.checks.unsupported import join_hook
from minifsdp.support.divided_param import is_optimized
from minifsdp.support.param_views import OTHER_WEIGHTS
from minifsdp.wrapping.module_tree import clean, is_ignored, unit_of
from minifsdp.wrapping.torch_attributes import TORCH_ATTRIBUTES

KINDS = ("_parameters", "_buffers", "_modules")
AVERAGES = (  # a copy is mostly wanted for these: AveragedModel makes one
    "For averages of the parameters (EMA, SWA), make AveragedModel(model) before you shard the "
    "model, and shard its .module in the same way; or keep [p.detach().clone() for p in "
    "model.parameters()] and update these, as by torch._foreach_lerp_()."
)
FALLBACK = {"engine": "_engine"}  # the wrapper's, if the wrapped module has none of this name


class Forward(partial[Any]):
    """A wrapper's ``forward`` with the signature of the wrapped module's. Programs read it:
    transformers' Trainer drops the columns of a dataset that a forward does not take."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].module.forward)


class ModuleWrapper(nn.Module):
    """Base of the wrapper: it has the attributes of the module that it wraps.

    Raises:
        AttributeError: neither of the two has the attribute.
        RuntimeError: a parameter of the wrapped module is set or deleted while it is sharded.
    """

    join_hook = join_hook

    def __getattr__(self, name: str) -> Any:
        # Python calls this for what is neither in __dict__ nor in the class, also for submodules.
        module = self.__dict__.get("_modules", {}).get(WRAPPED)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if module is None:  # __init__ is still running
                raise
        try:
            return getattr(module, name)
        except AttributeError as error:
            if name in FALLBACK:
                return getattr(self, FALLBACK[name])
            if name in TORCH_ATTRIBUTES and unit_of(self) is not None:
                return TORCH_ATTRIBUTES[name](self)
            # Otherwise the message would be about the wrapped class only, or about a wrapper's.
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, and neither has the "
                f"{type(module).__name__} that it wraps{self._where()}",
                name=name, obj=self,
            ) from error  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's FSDP sets its mark on all modules first. Refused here, no parameter has changed.
        # replicate() sets a class, on the module that it is given.
        asked = name in (FSDP_MARK, "__class__") or isinstance(value, DTensor)
        setter = sys._getframe(1).f_globals.get("__name__", "") if asked else ""
        if setter.startswith(("torch.distributed.fsdp.", "torch.distributed._composable.")):
            refuse_around("replicate()" if name == "__class__" else "torch's FSDP", self)
        if self._is_for_module(name):
            module = self._modules[WRAPPED]
            self._check_parameter(name, value)
            setattr(module, name, value)
            return
        super().__setattr__(name, value)
        # Set on one module alone (to keep a batch norm in evaluation), it means the wrapped one.
        if name == "training" and (module := self._modules.get(WRAPPED)) is not None:
            module.training = value

    def __delattr__(self, name: str) -> None:
        if self._is_for_module(name):
            module = self._modules[WRAPPED]
            assert module is not None
            self._check_parameter(name, None)
            check_part(module, name, None)
            delattr(module, name)
        else:
            super().__delattr__(name)

    # The methods of nn.Sequential and of containers. Python looks for these in the class only.

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
        return True  # without this Python would ask __len__, which most modules do not have

    # These change what the wrapped module's forward reads, too.

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.module.add_module(name, module)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self._is_for_module(name):
            self._check_parameter(name, param)
            self.module.register_parameter(name, param)
        else:
            super().register_parameter(name, param)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Names as they were before wrapping. The wrapped module comes after its wrapper, under the
        same name: programs put these and the names of parameters together."""
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            # With a memo a module around this one asks, and names are as that module lists them.
            yield clean(name) if memo is None else name, module

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load full parameters, under their original names; see state_dict.py.

        Raises:
            RuntimeError: names or shapes do not match, as in any module.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise RuntimeError(clean(str(error))) from None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a FullyShardedDataParallel cannot be copied or pickled: it is one part of something "
            "that is spread over processes. Save state_dict(), or build a second model and let it "
            "load_state_dict() of this one's. " + AVERAGES
        )

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint: the values are parts of names that users do not see."""
        return {"": WRAPPED}

    def extra_repr(self) -> str:
        """For ``print(model)``, which then shows where the units are."""
        unit = unit_of(self)
        return "" if unit is None else unit.describe()  # None while __init__ is running

    def _is_for_module(self, name: str) -> bool:
        """Whether a program that sets ``name`` means the wrapped module's attribute.

        What the wrapper has is set on the wrapper: ``forward`` set on the wrapped module, to a
        function that calls the wrapper's forward, would call itself without end. A new name is for
        the module, whose forward may read it. A new name that begins with ``_`` is a mark that a
        framework leaves on the module that it was given, which is the wrapper.
        """
        # Without _hooks __init__ is running.
        if "_hooks" not in self.__dict__ or has_attribute(self, name):
            return False
        module = self._modules[WRAPPED]
        return not name.startswith("_") or (module is not None and has_attribute(module, name))

    def _check_parameter(self, name: str, value: object) -> None:
        """Refuse to set a parameter, except inside summon_full_params (unit_params.py), where it
        may be exchanged for another one. Elsewhere the value would never be used."""
        unit, module = unit_of(self), self._modules[WRAPPED]
        assert unit is not None and module is not None
        own = module._parameters.get(name)
        owned = any((module, name) in info.owners for info in unit.param_infos)
        owned = owned or (is_optimized(own) and value is not own)
        new = isinstance(value, nn.Parameter) and not owned
        new = new and not is_ignored(own)
        if new or (owned and unit not in self._hooks.summoned):
            raise RuntimeError(
                f"{name!r} of {type(module).__name__}{self._where()} cannot be set or deleted "
                f"here: the parameters of the unit were sharded when it was wrapped. To change "
                f"values, do it inside FSDP.summon_full_params(model); for another parameter, "
                f"change the model before you wrap it. {OTHER_WEIGHTS}"
            )

    def _where(self) -> str:
        unit = unit_of(self)
        return "" if unit is None else f" (unit {unit.label})"


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute. ``hasattr`` would compute the value of a property."""
    state = module.__dict__
    return (
        name in state or hasattr(type(module), name) or any(name in state[kind] for kind in KINDS)
    )


def check_names(module: nn.Module) -> None:
    """Refuse a module that has something of its own where its unit and hooks are to be.

    Raises:
        ValueError: naming the attribute.
    """
    for name in ("_unit", "_hooks"):
        if has_attribute(module, name):
            raise ValueError(
                f"{type(module).__name__} has an attribute {name!r} of its own. fully_shard needs "
                f"that name. Give the attribute another one."
            )
