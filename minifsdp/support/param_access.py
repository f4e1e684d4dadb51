"""What a module finds where it had a parameter.

A layer reads ``self.weight``. While its unit is unsharded it finds a *view* of the unsharded flat
parameter, which computes like any tensor. While the unit is sharded it finds a *placeholder*, which
knows the parameter's shape and refuses to compute::

    linear.weight      unsharded: view [3, 2]         sharded: Placeholder "0.weight" [3, 2]

Without placeholders a layer that is called at the wrong time would read freed memory, and the
process would crash without a message.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from minifsdp.support.tensor_attribute import TensorAttribute


@dataclass
class ParamInfo:
    """One original parameter. The order of ``Unit.param_infos`` is that of the flat parameter.

    Attributes:
        name: fully qualified, below the unit's module.
        owners: where modules have it; several if it is shared.
        attributes: what a program has set on it; see param_attributes.py.
    """

    name: str
    shape: torch.Size
    owners: list[TensorAttribute] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the modules have now: before sharding the original one, while the unit
        is unsharded a view."""
        param: nn.Parameter | None = self.owners[0].get()
        assert param is not None, self.name
        return param

    def use_unsharded_views(self, view: Tensor, hidden: bool) -> None:
        """Show ``view`` to all owners as a parameter, which ``module.parameters()`` lists as well.

        Args:
            view: of the parameter's shape; or the DTensor that an optimizer is to find.
            hidden: the owners have a placeholder now.

        Raises:
            RuntimeError: the placeholder was replaced by another parameter.
        """
        for module, name in self.owners:
            found = module.__dict__.pop(name, None)  # Python would find it before the parameter
            if type(module).__setattr__ is not _SETATTR:
                _assign(module, name, view)
                module.__dict__.pop(name, None)
            if hidden and found is None:
                raise RuntimeError(
                    f"parameter {self.name!r} was replaced after wrapping. Its unit was made of "
                    f"the old one, and trains that; the new one would be trained by nobody. "
                    f"Replace it before you wrap the model, or set its values inside of "
                    f"FSDP.summon_full_params(model)."
                )
            module._parameters[name] = view  # type: ignore[assignment]  # not a leaf

    def use_sharded_views(
        self, placeholder: "Placeholder", listed: nn.Parameter | None = None
    ) -> None:
        """Show ``placeholder`` to all owners as an attribute that is no parameter.

        Args:
            listed: what ``module.parameters()`` is to list all the same.
        """
        for module, name in self.owners:
            if type(module).__setattr__ is not _SETATTR:
                _assign(module, name, placeholder)
            # The name stays, also with None: it keeps its place in the order of the parameters, and
            # torch refuses to assign what is no parameter to it.
            module._parameters[name] = listed
            module.__dict__[name] = placeholder


_SETATTR = nn.Module.__setattr__


def _assign(module: nn.Module, name: str, value: object) -> None:
    """Assign as users do, for modules with a ``__setattr__`` of their own: an RNN updates its list
    of weights in there, and computes with that list."""
    module._parameters.pop(name, None)  # or torch would refuse a value that is no nn.Parameter
    setattr(module, name, value)


class Placeholder:
    """Stands where a parameter was while its unit is sharded.

    It answers what is known without the values: shape, dtype, device, ``requires_grad``. All other
    uses are refused with the parameter's name, except in a backward. There the unit can be gathered
    (``Unit.on_demand``), and then the parameter itself is used.
    """

    def __init__(self, unit: Any, info: ParamInfo) -> None:
        self._unit, self._info = weakref.ref(unit), info
        self._name, self.shape = info.name, info.shape

    @property
    def dtype(self) -> Any:
        return self._living_unit().sharded_flat_param.dtype

    @property
    def device(self) -> Any:
        return self._living_unit().device

    @property
    def requires_grad(self) -> Any:
        return self._living_unit().sharded_flat_param.requires_grad

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _living_unit(self) -> Any:
        unit = self._unit()
        return self._refuse() if unit is None else unit

    def _message(self) -> str:
        unit = self._unit()
        if unit is None:
            return (
                f"parameter {self._name!r} was sharded by a FullyShardedDataParallel that is gone, "
                f"and its values with it. Keep the wrapper, or build the module anew."
            )
        return (
            f"parameter {self._name!r} of unit {unit.label} is sharded now, so it has no values "
            f"here. It has them during the forward and backward of its unit: call that unit's "
            f"module (or one around it), or read it inside FSDP.summon_full_params(model). In "
            f"activation checkpointing, use_reentrant=False keeps them long enough."
        )

    def _refuse(self) -> NoReturn:
        raise RuntimeError(self._message())

    def _parameter(self) -> Tensor:
        """The view that the module has now.

        Raises:
            RuntimeError: it has none.
        """
        unit = self._unit()
        if unit is None or not unit.on_demand(unit):
            self._refuse()
        return self._info.parameter

    def __setattr__(self, attribute: str, value: object) -> None:
        # If ``weight.data = ...`` or ``bias.requires_grad = False`` were accepted, the value would
        # never be used.
        if attribute not in ("_unit", "_info", "_name", "shape"):
            raise RuntimeError(f"{attribute!r} cannot be set: {self._message()}")
        object.__setattr__(self, attribute, value)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # copy and pickle ask for these before there is a _name
            raise AttributeError(attribute)
        try:
            parameter = self._parameter()
        except RuntimeError as error:  # hasattr() expects an AttributeError
            raise AttributeError(str(error)) from None
        return getattr(parameter, attribute)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """torch calls this in place of a function that gets a placeholder as an argument."""

        def real(item: object) -> object:
            return item._parameter() if isinstance(item, cls) else item

        args, kwargs = tree_map(real, (args, kwargs or {}))  # also in a list, as torch.cat takes it
        return func(*args, **kwargs)


# Python looks operators up in the class, and not with __getattr__. Without these `if weight:` would
# be true and `weight == x` false.
_OPERATORS = """
    abs add and bool contains eq float floordiv ge getitem gt int invert iter le len lt matmul mod
    mul ne neg or pos pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub rtruediv rxor setitem
    sub truediv xor
"""


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._parameter(), name)(*args)


for _name in _OPERATORS.split():
    setattr(Placeholder, f"__{_name}__", _operator(f"__{_name}__"))
