"""An optimizer whose parameters are DTensors for a while, whichever way units are divided.

The optimizer of a model in chunks has one flat parameter for each unit, and one state for all
parameters in it. The state of an element-wise optimizer has the layout of its parameter, so it is
divided as the unit's parameters are (unit_dtensors.py), and put together again::

    {_flat_param [5]: {"step": 3, "exp_avg": [5]}}

    {weight [3, 2]: {"step": 3, "exp_avg": [3, 2]},      DTensors; numbers, such as Adam's step,
     bias [3]:      {"step": 3, "exp_avg": [3]}}         are those of each parameter

What is not element-wise, such as a mean of each row, or differs between the parameters of a unit,
is refused. Units in rows have DTensors already.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from minifsdp.checks.agreement_groups import agreement_groups
from minifsdp.chunks.flat_parameter import FlatParameter
from minifsdp.chunks.optim_state import MARK, mark_groups
from minifsdp.chunks.unit_dtensors import (
    Form,
    divide_alike,
)
from minifsdp.comm.consensus import consensus
from minifsdp.featured_unit import FeaturedUnit

State = dict[str, Any]
"""An optimizer's state of one parameter: tensors and numbers by name."""

NAMES = "param_names"  # the key in a parameter group, of optimizers that were given names
RATES = ("lr", "weight_decay")  # keys of what a step multiplies parameters and gradients by
BEFORE_A_STEP = {"step": 0, "mu_product": 1}
"""Numbers in the states of torch's optimizers that change in each step, as they are before it."""


class OptimizerState:
    """Groups and states in the form in which an optimizer has them, without the optimizer: another
    state for it, or one that is still to be loaded.

    Args:
        groups: are copied, so that what is done to them does not change the optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]], state: dict[Tensor, State]) -> None:
        self.param_groups = [{**group, "params": [*group["params"]]} for group in groups]
        self.state = state


def make_states(optimizer: Optimizer) -> None:
    """Give an optimizer that has not stepped its states, as they are before the first step. So they
    can be saved, and programs can load into them. Does nothing if there are gradients.

    They are made by a step in which gradients, learning rate and weight decay are zero. (torch's
    own ``_init_optim_state`` leaves the weight decay on, which some optimizers add to moments.)
    """
    groups = optimizer.param_groups
    params = [param for group in groups for param in group["params"] if param.requires_grad]
    if any(param.grad is not None for param in params):
        return
    settings = [{name: group[name] for name in RATES if name in group} for group in groups]
    for group, own in zip(groups, settings, strict=True):
        for name, rate in own.items():  # a tensor, a number or, of some optimizers, None
            group[name] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        for param in params:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        optimizer.step()
    finally:
        for param in params:
            param.grad = None
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
    for entry in optimizer.state.values():
        for name in BEFORE_A_STEP.keys() & entry.keys():  # the step that is to come is the first
            entry[name] = torch.full_like(torch.as_tensor(entry[name]), BEFORE_A_STEP[name])


class OptimizerDTensors:
    """An optimizer, while the flat parameters that it has are DTensors.

    Args:
        units: whose parameters are shown as DTensors now.
        form: how the DTensors are made.

    Attributes:
        units: the unit of each flat parameter that the optimizer has.
        dtensors: the parts of each flat parameter.
        states: the state of each flat parameter, to be restored.

    Raises:
        RuntimeError: the states differ between ranks, or are not element-wise.
    """

    def __init__(
        self, optimizer: Optimizer | OptimizerState, units: list[FeaturedUnit], form: Form
    ) -> None:
        self.optimizer, self.form = optimizer, form
        self.groups = [(group, group["params"]) for group in optimizer.param_groups]
        held = {param for _, params in self.groups for param in params}
        self.units = {
            unit.sharded_flat_param: unit
            for unit in units
            if unit.mesh is None and unit.param_infos and unit.sharded_flat_param in held
        }
        self.dtensors: dict[FlatParameter, list[Any]] = {
            flat: [info.parameter for info in unit.param_infos] for flat, unit in self.units.items()
        }
        known = optimizer.state
        self.states = {flat: known[flat] for flat in self.units if flat in known}
        self._check_states()
        # Divide all of them before the optimizer is changed: an exchange may fail.
        divided = {
            flat: _divide(self.units[flat], state, form) for flat, state in self.states.items()
        }
        for flat, states in divided.items():
            optimizer.state.update(zip(self.dtensors[flat], states, strict=True))
            del optimizer.state[flat]
        # Names of flat parameters would be wrong for the parts.
        self.names = [group.pop(NAMES, None) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.pop(MARK, None)  # it says which chunks these are
            group["params"] = [
                part for param in group["params"] for part in self.dtensors.get(param, [param])
            ]

    def write_back(self) -> None:
        """Take over the states that the DTensors have now."""
        joined = {}
        for flat, unit in self.units.items():
            states = [self.optimizer.state.get(param) or {} for param in self.dtensors[flat]]
            joined[flat] = _join(unit, self.dtensors[flat], states, self.form)
        self.states = {flat: state for flat, state in joined.items() if state}

    def restore(self) -> None:
        """Give the optimizer its flat parameters again, and their states."""
        flat_of = {}
        for flat, params in self.dtensors.items():
            flat_of.update(dict.fromkeys(params, flat))
            for param in params:
                self.optimizer.state.pop(param, None)
        for flat, entry in self.states.items():
            self.optimizer.state[flat] = entry
        for group in self.optimizer.param_groups:
            params = [flat_of.get(param, param) for param in group["params"]]
            params = list(dict.fromkeys(params))
            # Where nothing was loaded, the same list as before: a new one would be checked again.
            before: list[Any] = next((own for known, own in self.groups if known is group), [])
            same = list(map(id, before)) == list(map(id, params))
            group["params"] = before if same else params
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            if names is not None:
                group[NAMES] = names
        mark_groups(self.optimizer.param_groups)

    def _check_states(self) -> None:
        """Check that the ranks can divide the same tensors.

        Raises:
            RuntimeError: the states differ between ranks, or are not element-wise.
        """
        mine = {
            unit.label: {name: _kind(v, flat) for name, v in self.states.get(flat, {}).items()}
            for flat, unit in self.units.items()
        }
        for group in agreement_groups(list(self.units.values())):
            about, note = "the comparison of an optimizer's states", (dist.get_rank(), mine)
            problem = consensus(group.process_groups, about, note, None, _judge)
            if problem is not None:
                raise RuntimeError(
                    f"the state of an optimizer ({type(self.optimizer).__name__}) cannot be "
                    f"divided among parameters: {problem}"
                )


def _kind(value: Any, flat: FlatParameter) -> str:
    """How an entry of a state is divided, in words."""
    if not isinstance(value, Tensor) or not value.dim():
        return "a number"
    fits = value.shape == flat.shape
    return f"a chunk of {value.dtype}" if fits else f"a tensor of {list(value.shape)}"


Kinds = dict[str, dict[str, str]]


def _judge(notes: list[tuple[int, Kinds]], agreed: list[str | None]) -> str | None:
    """What is wrong with the states of all ranks; None if nothing is.

    Args:
        notes: of each rank its number, and for each unit the kind of each entry.
    """
    first, expected = notes[0]
    for rank, kinds in notes:
        for label, entries in kinds.items():
            for name, kind in entries.items():
                if kind.startswith("a tensor"):
                    return (
                        f"{name!r} of unit {label} is {kind} on rank {rank}, which is not the "
                        f"shape of its chunk, so nobody knows which part belongs to which "
                        f"parameter. With use_orig_params=True each has a state of its own."
                    )
            if entries != expected.get(label):
                return (
                    f"for unit {label} rank {rank} has {entries}, and rank {first} has "
                    f"{expected.get(label)}."
                )
    return next(filter(None, agreed), None)


def _divide(unit: FeaturedUnit, state: State, form: Form) -> list[State]:
    """From the state of a unit's flat parameter to one for each parameter."""
    divided: list[State] = [{} for _ in unit.param_infos]
    for name, value in state.items():
        parts: list[Any] = [value] * len(divided)
        if isinstance(value, Tensor):  # a number in a tensor is counted up in place
            whole = value.dim() > 0
            parts = form.split(unit, value, name) if whole else [value.clone() for _ in divided]
        for part, one in zip(parts, divided, strict=True):
            one[name] = part
    return divided


def _join(unit: FeaturedUnit, params: list[DTensor], states: list[State], form: Form) -> State:
    """From the states of a unit's parameters to that of its flat parameter.

    Raises:
        RuntimeError: they cannot be one state: parameters have different entries, or numbers.
    """
    joined: State = {}
    for info, state in zip(unit.param_infos, states, strict=True):
        if state.keys() != states[0].keys():
            raise _not_one(unit, info.name, f"has {sorted(state)}", sorted(states[0]))
    for name, first in states[0].items():
        values = [state[name] for state in states]
        if any(map(_is_divided, values, params)):
            alike = [divide_alike(v, p) for v, p in zip(values, params, strict=True)]
            joined[name] = form.join(unit, alike, name)
            continue
        for info, value in zip(unit.param_infos, values, strict=True):
            if (isinstance(value, Tensor) and value.dim()) or value != first:
                raise _not_one(unit, info.name, f"has {name!r} = {value}", first)
        joined[name] = first
    return joined


def _is_divided(value: Any, param: DTensor) -> bool:
    """Whether an entry has a value for each element of the parameter, and is not a number."""
    if not isinstance(value, Tensor):
        return False
    return isinstance(value, DTensor) or (value.dim() > 0 and value.shape == param.shape)


def _not_one(unit: FeaturedUnit, name: str, has: str, first: object) -> RuntimeError:
    return RuntimeError(
        f"the state of an optimizer for parameter {name!r} of unit {unit.label} {has}, and for "
        f"{unit.param_infos[0].name!r} {first}. A unit in chunks has one flat parameter, which has "
        f"one state. Load it into a model with use_orig_params=True."
    )
