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
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_map

from minifsdp.core import unit
from minifsdp.support.tensor_attribute import TensorAttribute


@dataclass
class ParamInfo(unit.ParamInfo):
    """One original parameter, with the attributes of its owners.

    Attributes:
        owners: where modules have it; several if it is shared.
        attributes: what a program has set on it; see chunks/param_attributes.py.
        spec: how it is distributed already (tensor_parallel.py). ``shape`` is then that of this
            rank's part. None for a plain parameter.
        dim: along which it is divided in rows (wrapping/shard_placement.py).
    """

    owners: list[TensorAttribute] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    spec: DTensorSpec | None = None
    dim: int = 0

    @property
    def parameter(self) -> nn.Parameter:
        """As in the core; of one that is distributed already, what this rank has."""
        found: Any = super().parameter
        if self.spec is None:
            return found  # type: ignore[no-any-return]
        return nn.Parameter(found._local_tensor, found.requires_grad)


class Placeholder(Tensor):
    """Stands where a parameter was while its unit is sharded: a tensor without memory.

    It answers what is known without the values: shape, dtype, device, ``requires_grad``. In a
    backward, and in a forward that records no gradients, the unit can be gathered
    (``FeaturedUnit.on_demand``), and other uses get the parameter itself. Elsewhere they are
    refused, with the parameter's name.

    It is a tensor because modules look at weights before they compute with them.
    ``nn.TransformerEncoder`` asks whether a weight of its first layer has a ``__torch_function__``,
    and if so computes in a different way, with different outputs at padding.
    """

    _unit: Callable[[], Any]
    _info: ParamInfo
    _name: str

    def __new__(cls, unit: Any, info: ParamInfo) -> "Placeholder":
        self: Placeholder = Tensor._make_wrapper_subclass(
            cls,
            info.spec.shape if info.spec else info.shape,
            dtype=unit.dtype_of(info),
            device=unit.device,
            storage_size=0,
        )
        self.__dict__.update(_unit=weakref.ref(unit), _info=info, _name=info.name)
        return self

    # Asked of the unit, not of this tensor: the model may have been moved, cast or frozen since.

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        # The dtype of the computation: inputs may be cast to it.
        return self._living_unit().dtype_of(self._info)

    @property
    def device(self) -> Any:  # type: ignore[override]
        return self._living_unit().device

    @property
    def requires_grad(self) -> Any:  # type: ignore[override]
        unit = self._living_unit()
        return unit.trained[unit.param_infos.index(self._info)]

    @property
    def is_cuda(self) -> Any:  # type: ignore[override]
        return self.device.type == "cuda"

    def is_floating_point(self) -> Any:
        return self.dtype.is_floating_point

    def element_size(self) -> int:
        return self.dtype.itemsize  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        return 0  # as of all tensors without memory

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
        found: Tensor = self._info.owners[0].get()
        return found

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<Placeholder: {self._message()}>"

    __format__ = object.__format__  # a tensor's would read the value of a scalar
    __reduce_ex__ = _refuse

    def __deepcopy__(self, memo: object) -> "Placeholder":
        unit = self._unit()
        return self if unit is None else Placeholder(unit, self._info)

    def __copy__(self) -> "Placeholder":
        return self.__deepcopy__(None)

    def __setattr__(self, attribute: str, value: object) -> None:
        # If ``weight.data = ...`` or ``bias.requires_grad = False`` were accepted, the value would
        # never be used.
        raise RuntimeError(f"{attribute!r} cannot be set: {self._message()}")

    def __getattribute__(self, attribute: str) -> Any:
        # Names that begin with "_" are torch's: it asks each tensor for `_is_param`, for example.
        if attribute.startswith("_") or attribute in _KNOWN:
            return super().__getattribute__(attribute)
        try:
            parameter = self._parameter()
        except RuntimeError as error:  # hasattr() expects an AttributeError
            raise AttributeError(str(error)) from None
        return getattr(parameter, attribute)

    @property
    def __torch_function__(self) -> Callable[..., Any]:  # type: ignore[override]
        """torch calls this in place of a function that gets a placeholder as an argument. In a
        backward, autograd has to see the parameter; elsewhere torch goes on to the operation."""
        in_backward = torch._C._current_graph_task_id() >= 0
        return _with_parameters if in_backward else torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """torch calls this in place of an operation that gets a placeholder as an argument."""
        return _with_parameters(func, types, args, kwargs)


def _with_parameters(
    func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    def real(item: object) -> object:
        return item._parameter() if isinstance(item, Placeholder) else item

    args, kwargs = tree_map(real, (args, kwargs or {}))  # also in a list, as torch.cat takes it
    return func(*args, **kwargs)


# Of any tensor. Tools that count memory read those of the second line, and so do messages of torch.
_OF_TENSORS = {"shape", "ndim", "dim", "numel", "size", "layout", "is_sparse"}
_OF_TENSORS |= {"nelement", "untyped_storage", "type", "is_cpu", "is_cuda", "is_meta"}
_KNOWN = _OF_TENSORS | {*vars(Placeholder)}
"""What a placeholder answers itself."""


# For these, torch reads the values before there is an operation, or refuses without a name.
def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._parameter(), name)(*args)


for _name in ("bool", "complex", "float", "index", "int", "iter"):
    setattr(Placeholder, f"__{_name}__", _operator(f"__{_name}__"))
