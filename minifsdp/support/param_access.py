"""What a module sees of its parameters.

A layer asks for ``self.weight`` and has to get the right thing: while its unit is unsharded a view
of the flat tensor, which computes like any tensor; while it is sharded a *placeholder*, which has
the parameter's shape and refuses to compute. Without that a layer called at the wrong time would
read memory that is not there, and take the whole process down.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


@dataclass
class ParamInfo:
    """One original parameter: its place in the flat tensor is its place in ``Unit.param_infos``."""

    name: str  # fully qualified, below the unit's module
    shape: torch.Size
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)  # several: it is shared

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself, before it is sharded."""
        module, attribute = self.owners[0]
        param = module._parameters[attribute]
        assert param is not None, self.name
        return param

    def use_unsharded_views(self, view: Tensor, hidden: bool) -> None:
        """Let all owners see ``view`` as a parameter: also ``module.parameters()`` lists it.

        Args:
            hidden: they see a placeholder now.

        Raises:
            RuntimeError: somebody has put another parameter in its place.
        """
        for module, attribute in self.owners:
            if type(module).__setattr__ is not _SETATTR:
                _tell(module, attribute, view)
            found = module.__dict__.pop(attribute, None)  # it would be found before the parameter
            if hidden and found is None:
                raise RuntimeError(
                    f"parameter {self.name!r} was replaced after wrapping. Its unit was made of "
                    f"the old one, and trains that; the new one would be trained by nobody. "
                    f"Replace it before you wrap the model, or set its values inside of "
                    f"FSDP.summon_full_params(model)."
                )
            module._parameters[attribute] = view  # type: ignore[assignment]  # not a leaf

    def use_sharded_views(self, placeholder: "Placeholder") -> None:
        """Let all owners see ``placeholder`` as an attribute, and no parameter."""
        for module, attribute in self.owners:
            if type(module).__setattr__ is not _SETATTR:
                _tell(module, attribute, placeholder)
            # The name stays, with nothing in it: it keeps its place in the order of the parameters,
            # and torch refuses to assign what is no parameter to it.
            module._parameters[attribute] = None
            module.__dict__[attribute] = placeholder


_SETATTR = nn.Module.__setattr__


def _tell(module: nn.Module, attribute: str, value: object) -> None:
    """An RNN keeps a list of its weights, up to date with a ``__setattr__`` of its own."""
    module._parameters.pop(attribute, None)  # else torch would take it for a wrong parameter
    setattr(module, attribute, value)


class Owner(Protocol):
    """What a placeholder knows of its unit."""

    @property
    def sharded_flat_param(self) -> nn.Parameter: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def label(self) -> str: ...

    @property
    def on_demand(self) -> Callable[[Any], bool]: ...


class Placeholder:
    """Stands where a parameter was while its unit is sharded. What is known without the values it
    says as the parameter would: shape, dtype, device, ``requires_grad``. Whatever else is asked of
    it is refused, with the parameter's name; but in a backward the unit can be gathered, and the
    parameter itself is what is asked."""

    def __init__(self, unit: Owner, info: ParamInfo) -> None:
        self._unit, self._slot = weakref.ref(unit), info
        self._name, self.shape = info.name, info.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._owner.sharded_flat_param.dtype

    @property
    def device(self) -> torch.device:
        return self._owner.device

    @property
    def requires_grad(self) -> bool:
        return self._owner.sharded_flat_param.requires_grad

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def _owner(self) -> Owner:
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

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(self._message())

    def _parameter(self) -> Tensor:
        """The view that the module has now.

        Raises:
            RuntimeError: it has none.
        """
        unit = self._unit()
        if unit is None or not unit.on_demand(unit):
            self._refuse()
        return self._slot.parameter

    def __setattr__(self, attribute: str, value: object) -> None:
        # Taken without a word, ``weight.data = ...`` and ``bias.requires_grad = False`` would be
        # read by nobody.
        if attribute not in ("_unit", "_slot", "_name", "shape"):
            raise RuntimeError(f"{attribute!r} cannot be set: {self._message()}")
        object.__setattr__(self, attribute, value)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Python asks a copy for these before it has a name
            raise AttributeError(attribute)
        try:
            parameter = self._parameter()
        except RuntimeError as error:
            raise AttributeError(str(error)) from None
        return getattr(parameter, attribute)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def real(item: object) -> object:  # also in a list: an RNN's weights, say
            return item._parameter() if isinstance(item, cls) else item

        args, kwargs = tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)


# Operators are looked up in the class. Without these a placeholder were true, and equal to nothing.
_OPERATORS = """
    abs add and bool contains eq float floordiv ge getitem gt int invert iter le len lt matmul mod
    mul ne neg or pos pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub rtruediv rxor setitem
    sub truediv xor
"""


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._parameter(), name)(*args)


for _name in _OPERATORS.split():
    setattr(Placeholder, f"__{_name}__", _operator(f"__{_name}__"))
Placeholder.__hash__ = object.__hash__  # type: ignore[method-assign]  # goes with __eq__ otherwise
