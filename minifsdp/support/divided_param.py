"""The parameters that an optimizer sees of a unit in rows, and the flat parameter behind them.

With chunks the optimizer sees one flat parameter. With rows it sees a ``DTensor`` for each original
parameter. Both are the same memory, this rank's shard::

    sharded_flat_param   [n]       a a b b x y          what the engine gathers, reduces and checks
    weight               [2, 2]    a a b b              DTensor [3, 2], Shard(0)
    bias                 [2]               x y          DTensor [3], Shard(0)

The engine knows only the flat parameter, a :class:`DividedParameter`: its ``grad``, its
``requires_grad`` and its version are those of the DTensors. So the engine sees ``zero_grad()`` on
some of them, ``weight.requires_grad_(False)`` and an optimizer's step; and each ``weight.grad`` is
its part of the gradient that the engine stores.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minifsdp.chunks.flat_parameter import FlatParameter
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.mixed_rows import MixedRows, rows_of
from minifsdp.offload import host_copy
from minifsdp.support.dtensors import dtensor, like, standalone
from minifsdp.support.tensor_parallel import on_both_meshes


class DividedParameter(FlatParameter):
    """This rank's shard of a unit, ``[n]``, of which users see DTensors.

    Attributes:
        params: one for each parameter of the unit, in the order of ``unit.param_infos``. Their
            local tensors are views of the unit's padded shard.
        local_tensors: these views, each with a storage of its own.
        addresses: of their memory. ``share_memory_()``, or a queue to another process, moves this
            memory, and the unit's shard stays where it was.
        storages: the addresses of the DTensors' own storages, which are empty. An assignment to
            ``data`` changes them.
        unit_grad: a weak reference to the gradient of which the DTensors' gradients are parts.
    """

    params: list[Any]  # of DTensor, each an nn.Parameter
    local_tensors: list[Tensor]
    addresses: list[int]
    storages: list[int]
    unit_grad: Callable[[], "UnitGrad | None"]

    @property
    def grad(self) -> Tensor | None:
        """``[n]``: the gradients of the DTensors. A part that ``zero_grad()`` has cleared is zero;
        None if all parts are cleared."""
        unit, unit_grad = self.unit(), self.unit_grad()
        if all(self.params[number].grad is None for number in unit.layout.with_grad):
            return None
        if unit_grad is None:
            unit_grad = UnitGrad(torch.zeros_like(self, dtype=self.grad_dtype, requires_grad=False))
        elif not all(unit_grad.has(self.params[number]) for number in unit_grad.parts):
            # A program may have kept a part that it has cleared.
            unit_grad = UnitGrad(unit_grad.grad.clone())
        self.unit_grad = ref(unit_grad)
        places = unit.layout.local_tensors(unit_grad.grad, unit.shard_rank)
        unit_grad.parts = []
        for number, (param, place) in enumerate(zip(self.params, places, strict=True)):
            grad = param.grad
            if place is None:
                continue  # frozen when the unit was divided; it may have one from before that
            if grad is None:
                place.zero_()
                continue
            unit_grad.parts.append(number)
            if not unit_grad.has(param) or grad._local_tensor.data_ptr() != place.data_ptr():
                # param.grad stays the program's own tensor, as in a plain model: by that tensor it
                # may clear the gradient next.
                place.copy_(grad._local_tensor)
                unit_grad.take(grad, place)
        return unit_grad.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            for param in self.params:
                param.grad = None
            return
        unit, unit_grad = self.unit(), self.unit_grad()
        if unit_grad is None or unit_grad.grad is not value:
            unit_grad = UnitGrad(value)
            self.unit_grad = ref(unit_grad)
        places = unit.layout.local_tensors(value, unit.shard_rank)
        unit_grad.parts = [number for number, place in enumerate(places) if place is not None]
        for number in unit_grad.parts:
            param = self.params[number]
            if not unit_grad.has(param):
                param.grad = unit_grad.take(like(param, places[number]), places[number])

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def hide_grad(self) -> None:
        """Give each DTensor a gradient of its own: the flat one will be laid out anew."""
        for param in self.params:
            if param.grad is not None:
                param.grad = like(param, param.grad._local_tensor.clone())

    @property
    def data(self) -> Tensor:
        """``[n]``. What is assigned, perhaps of another dtype, is given to the DTensors. accelerate
        casts a model this way."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        unit = self.unit()
        given = unit.layout.local_tensors(value, unit.shard_rank)
        for param, local in zip(self.params, given, strict=True):
            if local is not None:  # None: frozen
                take_over(unit, param, like(param, local).requires_grad_(param.requires_grad))

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether any of the DTensors requires a gradient."""
        return any(param.requires_grad for param in self.params)

    @property
    def _version(self) -> int:  # type: ignore[override]
        """Larger after each change in place: of the shard, through a DTensor, by an optimizer."""
        # The versions of the local tensors count what is done to to_local().
        version: int = _VERSION.__get__(self)
        return version + sum(int(t._version) for t in (*self.local_tensors, *self.params))


def divided_parameter(unit: Any, trained: list[bool]) -> DividedParameter:
    """Make the DTensors of a unit that is divided in rows, and the flat parameter behind them.

    Args:
        unit: the reference to it is weak, or an optimizer would keep the whole unit alive.
        trained: whether each parameter has a gradient.
    """
    params: list[Any] = []
    local = _local_tensors(unit)
    for info, tensor, requires_grad in zip(unit.param_infos, local, trained, strict=True):
        made = dtensor(unit, unit.mesh, info.shape, tensor, info.dim)
        if info.spec is not None:
            made = on_both_meshes(made, info.spec)
        params.append(nn.Parameter(made, requires_grad))
    _watch_steps()
    return _flat_behind(unit, params)


def _flat_behind(unit: Any, params: list[Any]) -> DividedParameter:
    """A flat parameter with the memory of ``unit.padded_shard``, of which ``params`` are views
    after this."""
    # For torch itself it requires no gradient: torch would refuse that for integers.
    data = unit.padded_shard[: unit.layout.optimized_numel(unit.shard_rank)]
    flat = DividedParameter(data, requires_grad=False)
    flat.unit, flat.params, flat.unit_grad = ref(unit), params, lambda: None
    if unit.grad_dtype is not None:
        flat.grad_dtype = unit.grad_dtype
    set_owner(unit, flat)
    _show(unit, flat)
    return flat


def count_cleared(units: Iterable[Any]) -> None:
    """If ``zero_grad(set_to_none=False)`` has cleared a marked gradient (no_sync.py), count that as
    a change. For DTensors torch's foreach kernels count no version, so this looks at values.

    The host waits for the GPU once for all units, and only if a gradient of no_sync() waits.
    """
    marks: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}  # with offload there may be two
    for unit in (u for u in units if u.mesh is not None and u.unreduced_grad is not None):
        grad = unit.sharded_flat_param.grad
        parts = () if grad is None else unit.layout.local_tensors(grad, unit.shard_rank)
        for local in (part for part in parts if part is not None and part.numel()):
            marks.setdefault(local.device, []).append((grad, local.view(-1)[:1]))
    for on_device in marks.values():
        firsts = torch.cat([first for _, first in on_device])
        cleared = ((firsts == 0) & ~firsts.signbit()).tolist()  # a mark of zero is -0
        for (grad, _), was_cleared in zip(on_device, cleared, strict=True):
            if was_cleared:
                increment_version(grad)


class UnitGrad:
    """The gradient of a unit, ``[n]``. Only its parts, the gradients of the parameters, refer to
    it. So its memory is freed when ``zero_grad()`` has cleared the last part, although nobody tells
    the flat parameter.

    Attributes:
        parts: the numbers of the parameters whose gradients are its parts.
    """

    def __init__(self, grad: Tensor) -> None:
        self.grad, self.parts = grad, list[int]()

    def has(self, param: Any) -> bool:
        """Whether the parameter's gradient is a part of this one."""
        return getattr(param.grad, "minifsdp_unit_grad", None) is self

    def take(self, part: Any, place: Tensor) -> Any:
        """Make a DTensor the part that lies at this place. Returns the DTensor."""
        part._local_tensor, part.minifsdp_unit_grad = place, self
        part.minifsdp_storage = _storage(part)  # see _before_step
        return part

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()  # a copy of a part is no part: see UnitRef


@cache
def _watch_steps() -> None:
    """Look at each step of every optimizer, until the process ends."""
    register_optimizer_step_pre_hook(_before_step)


@never_compile_inside
def _before_step(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step if a program has assigned to the ``data`` of a gradient: torch ignores the new
    values, as it does for a parameter (:func:`check_assigned`).

    Raises:
        RuntimeError: naming the parameters.
    """
    lost = []
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        grad: Any = param.grad if is_optimized(param) else None
        # A gradient that a program has assigned to param.grad itself is right as it is.
        if hasattr(grad, "minifsdp_storage") and grad.minifsdp_storage != _storage(grad):
            lost.append(_name_of(param))
    if lost:
        raise RuntimeError(
            f"a program has assigned to the .data of the gradient of {', '.join(lost)}. It is a "
            f"DTensor, and torch ignores the values that are assigned to one, so the optimizer "
            f"would step with those from before. Assign the gradient itself (param.grad = value), "
            f"or copy the new values (param.grad.copy_(value)); both take a DTensor."
        )


def _name_of(param: Any) -> str:
    unit = unit_of_param(param)
    names = zip(unit.optimized_params, unit.param_infos, strict=True) if unit is not None else ()
    found = [f"{info.name!r} of unit {unit.label}" for other, info in names if other is param]
    return found[0] if found else "a parameter"


class UnitRef(ref[Any]):
    """A reference from a DTensor to its unit. A copy of the DTensor, or one that is loaded from a
    file, belongs to no unit."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copy has an empty set in its place, which is false, and which torch.load() allows with
        # weights_only=True.
        return set, ()


def set_owner(unit: Any, flat: DividedParameter) -> None:
    """Give each DTensor a reference to its unit, and the attributes that a program had set on its
    parameter. ``module.to()`` swaps all attributes of a DTensor for those of another one."""
    for info, param in zip(unit.param_infos, flat.params, strict=True):
        if unit_of_param(param) is not unit:
            param.minifsdp_unit = UnitRef(unit)
            vars(param).update(info.attributes)
            if unit.grad_dtype is not None and param.grad is None:
                param.grad_dtype = unit.grad_dtype


def _show(unit: Any, flat: DividedParameter) -> None:
    """Let the DTensors be views of ``unit.padded_shard``."""
    flat.local_tensors = _local_tensors(unit)
    flat.addresses = [tensor.data_ptr() for tensor in flat.local_tensors]
    for param, tensor in zip(flat.params, flat.local_tensors, strict=True):
        # Assigned, because nn.Parameter(DTensor(...)) makes a view with a version of its own.
        param._local_tensor = tensor
    flat.storages = list(map(_storage, flat.params))


def _local_tensors(unit: Any) -> list[Tensor]:
    return [*map(standalone, unit.layout.local_tensors(unit.padded_shard, unit.shard_rank))]


def _storage(param: Tensor) -> int:
    address: int = param.untyped_storage()._cdata
    return address


def check_assigned(unit: Any) -> None:
    """Refuse an assignment to the ``data`` of a DTensor. torch gives the DTensor the shape of the
    new tensor and leaves its local tensor as it was, without an error (2.13).

    Raises:
        RuntimeError: naming the parameters, which have the values from before, and their shapes.
    """
    flat = unit.sharded_flat_param
    if list(map(_storage, flat.params)) == flat.storages:
        return
    lost = []
    for number, (info, tensor) in enumerate(zip(unit.param_infos, flat.local_tensors, strict=True)):
        param = flat.params[number]
        # module.to() swaps both, which divide_again() takes over.
        if param._local_tensor is tensor and _storage(param) != flat.storages[number]:
            param.data = like(param, tensor)
            flat.storages[number] = _storage(param)
            lost.append(info.name)
    if lost:
        raise RuntimeError(
            f"a program has assigned to the .data of {', '.join(map(repr, lost))} of unit "
            f"{unit.label}. It is a DTensor, and torch ignores the values that are assigned to "
            f"one, so it has those from before. Copy the new values: param.data.copy_(value), with "
            f"a DTensor as value; of a whole tensor, distribute_tensor(value, param.device_mesh, "
            f"param.placements) makes one. To exchange two, clone one of them first."
        )


def was_changed(unit: Any) -> bool:
    """Whether a program has moved or cast the DTensors, or their memory, or frozen one or begun to
    train one."""
    flat = unit.sharded_flat_param
    return (flat.requires_grad and unit.trained != unit.layout.trained) or any(
        param._local_tensor is not tensor or tensor.data_ptr() != address
        for param, tensor, address in zip(
            flat.params, flat.local_tensors, flat.addresses, strict=True
        )
    )


@torch.inference_mode(False)  # this memory outlives the mode that a forward may run in
def divide_again(unit: Any) -> None:
    """Take over what :func:`was_changed` has noticed. The unit is sharded.

    Raises:
        ValueError: a DTensor has data of another shape, or those that are trained differ in dtype.
        RuntimeError: one was frozen or thawed while gradients of no_sync wait to be reduced: their
            layout is that from before.
    """
    flat, layout = unit.sharded_flat_param, unit.layout
    if unit.unreduced_grad is not None and unit.trained != layout.trained:
        raise RuntimeError(
            f"a parameter of unit {unit.label} was frozen or thawed while gradients from no_sync() "
            f"wait to be reduced. Run the last backward outside of no_sync() before that, or drop "
            f"these gradients with zero_grad()."
        )
    given = [param._local_tensor.detach() for param in flat.params]
    for info, tensor, before in zip(unit.param_infos, given, flat.local_tensors, strict=True):
        if tensor.shape != before.shape:
            raise ValueError(
                f"parameter {info.name!r} of unit {unit.label} was given data of which this rank "
                f"has {list(tensor.shape)}; it has to have {list(before.shape)}."
            )
    dtypes = {info.name: local.dtype for info, local in zip(unit.param_infos, given, strict=True)}
    anew = rows_of(layout.param_shapes, unit.trained, layout.world_size, dtypes, layout.dims)
    flat.hide_grad()  # its layout is the old one
    unit.layout, unit.mixed = anew, anew if isinstance(anew, MixedRows) else None
    size = anew.padded_numel // anew.world_size  # there may be more marks, or fewer
    padded = given[anew.order[0]].new_zeros(size)
    for place, tensor in zip(
        unit.layout.local_tensors(padded, unit.shard_rank), given, strict=True
    ):
        place.copy_(tensor)
    unit.padded_shard = host_copy(padded, unit.offload_from)
    # A new one: torch lets no tensor of the meta device have data of another device, or back.
    unit.sharded_flat_param = _flat_behind(unit, flat.params)
    unit.unsharded_by_dtype.forget()


def take_over(unit: Any, own: Any, given: Any) -> None:
    """Give a parameter of a unit in rows the values that a program wants in its place. It stays the
    same object, so that an optimizer that has it goes on with the new values.

    Args:
        own: a DTensor of the unit, which is sharded.
        given: another one, divided in the same way. If its dtype or its device is different
            (``own`` on meta, say), the two share its memory until the next forward.
    """
    with torch.no_grad():
        if (given.dtype, given.device) == (own.dtype, own.device):
            own.copy_(given)
        else:  # as module.to() does it; divide_again() follows before the next step
            value: Any = nn.Parameter(given.detach(), requires_grad=False)
            torch.utils.swap_tensors(own, value)  # type: ignore[no-untyped-call]
    own.requires_grad_(given.requires_grad)
    set_owner(unit, unit.sharded_flat_param)


def unit_of_param(param: object) -> Any:
    """The unit that a DTensor or sharded flat parameter belongs to; None for another tensor."""
    if isinstance(param, FlatParameter):
        return param.unit()
    unit = getattr(param, "minifsdp_unit", None)
    return unit() if unit else None


def is_optimized(param: object) -> bool:
    """Whether a tensor is what an optimizer sees of a unit: a flat parameter, or a DTensor of
    ours."""
    return isinstance(param, FlatParameter) or bool(getattr(param, "minifsdp_unit", None))


_DATA: Any = Tensor.data  # the descriptors that the properties here hide
_VERSION: Any = Tensor._version
