"""A model and its optimizers in the form of a checkpoint, whichever way units are divided.

torch.distributed.checkpoint knows DTensors: it saves each rank's part once, and loads it into a
model that is sharded in another way, over another number of ranks, or not at all. Units in rows
consist of DTensors. Units in chunks do not, and the optimizer's state is that of chunks without
names. Inside of this block both look alike, so that all of torch's functions are right::

    with as_dtensors(model, optimizer):
        model_state, optimizer_state = get_state_dict(model, optimizer)     # torch's
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=..., optim_state_dict=...)

                              outside                         inside
    model.parameters()        _flat_param [5]                 weight [3, 2], bias [3]
    optimizer.state           {_flat_param: {                 {weight: {"exp_avg": [3, 2], ...},
                                 "exp_avg": [5], ...}}         bias:   {"exp_avg": [3], ...}}

unit_dtensors.py divides the parameters, and optimizer_dtensors.py the states.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from minifsdp.between_steps.full_params import Options, summon
from minifsdp.chunks.optimizer_dtensors import OptimizerDTensors, OptimizerState
from minifsdp.chunks.unit_dtensors import EXCHANGED, Form
from minifsdp.wrapping.module_tree import unit_of


@contextmanager
def as_dtensors(
    model: nn.Module, *optimizers: Optimizer | OptimizerState, writeback: bool = True
) -> Iterator[None]:
    """Inside, the parameters of a model are DTensors under their own names, and its optimizers have
    these as parameters, with states of DTensors. Every rank has to take part.

    To read, ``writeback=False`` is enough and faster; what was read stays valid after the block.
    To save and to load a checkpoint, checkpoint_state.py is faster.

    Args:
        model: a FullyShardedDataParallel, one with such modules inside, or one that fully_shard was
            given.
        optimizers: of ``model.parameters()``.
        writeback: keep what is changed inside, in parameters and in optimizers.

    Raises:
        RuntimeError: in a forward or backward; the state of an optimizer is not element-wise, or
            differs between ranks; or, with ``writeback``, the parameters of a unit in chunks have
            been given states whose numbers differ.
        ValueError: with ``writeback``, a parameter was replaced by something else.
    """
    with shown_as(EXCHANGED, model, optimizers, writeback):
        yield


@contextmanager
def shown_as(
    form: Form,
    model: nn.Module,
    optimizers: Iterable[Optimizer | OptimizerState],
    writeback: bool,
) -> Iterator[None]:
    """:func:`as_dtensors`, with DTensors of any form."""
    wrappers: list[Any] = [module for module in model.modules() if unit_of(module) is not None]
    units = {wrapper._unit: wrapper._hooks for wrapper in wrappers}
    with ExitStack() as stack:
        stack.enter_context(summon(units, Options(writeback, form=form)))
        divided = []
        for optimizer in optimizers:
            divided.append(OptimizerDTensors(optimizer, [*units], form))
            stack.callback(divided[-1].restore)
        yield
        if writeback:
            for one in divided:
                one.write_back()
