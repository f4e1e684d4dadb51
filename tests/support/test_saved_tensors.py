"""saved_tensors.py: a description in place of a parameter, and all else as without hooks."""

import gc
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import _CheckpointFrame

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.layers import Call
from minifsdp.core.unit_state import Purpose, TrainingState
from minifsdp.support.saved_tensors import SavedParameters
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step, storage


def lone_unit():
    """A unit of one rank's whole layer, gathered by hand, and what has been asked for it."""
    model = stack(1)
    model.engine.start(Purpose.TRAIN)
    return model.engine.units[1]


@on_ranks(2)
def test_a_graph_holds_no_memory_of_a_unit():
    model = stack()
    loss = model(batch()).sum()
    kept = model.engine.units[0]  # the root stays, for its backward comes at once
    assert storage(kept) and not any(map(storage, model.engine.units[1:]))
    for unit in model.engine.units[1:]:
        unit.views = []
        assert torch._C._storage_Use_Count(unit.unsharded.storage._cdata) == 3
    loss.backward()


@on_ranks(2)
def test_a_checkpoint_around_a_unit_goes_with_a_graph_that_is_dropped():
    model = stack(2)
    for at in (1, 2):
        model.module[at] = checkpoint_wrapper(model.module[at])

    def frames():
        gc.collect()
        return sum(type(item) is _CheckpointFrame for item in gc.get_objects())

    before = frames()
    for _ in range(5):
        model(batch())
    assert frames() == before


@on_ranks(2)
def test_a_parameter_is_asked_for_before_it_is_read():
    unit, asked = lone_unit(), []
    saved = SavedParameters(lambda chain: (asked.append(chain), unit.unsharded.data.fill_(2)))
    unit.unsharded.allocate()
    unit.unsharded.data.fill_(1)
    call = Call(unit, unit.module, True, True)
    x = torch.ones(3, device=device(), requires_grad=True)
    with saved.hooks((call,)):
        y = (x * unit.view_maker.make(unit)[0].flatten()[:3]).sum()
    unit.state.training = TrainingState.FORWARD
    y.backward()
    assert asked == [(call,)] and x.grad.tolist() == [2, 2, 2]


@on_ranks(2)
def test_the_address_of_memory_that_was_left_to_others_means_nothing():
    unit = lone_unit()
    saved = SavedParameters(lambda chain: None)
    unit.unsharded.allocate()
    saved.hooks((Call(unit, unit.module, True, True),))
    part = unit.unsharded.flat_param.detach()[:3]
    assert saved.chain_of(part) is not None
    assert not unit.unsharded.release([])  # `part` refers to it
    assert saved.chain_of(part) is None


@on_ranks(2)
def test_what_was_computed_with_before_parameters_were_frozen_or_thawed_is_let_go():
    """Programs with two networks (CycleGAN, SAC) freeze one of them in each step."""
    model, made = stack(), WeakSet()
    for at in range(8):
        for param in model.parameters():
            param.requires_grad_(at % 2 == 1)
        model(batch().requires_grad_()).sum().backward()
        made.update(unit.unsharded for unit in model.engine.units)
    gc.collect()
    # They are looked through when there are two for each unit. One more: of the last backward.
    assert len(made) <= 3 * len(model.engine.units)


@on_ranks(2)
def test_what_was_computed_with_in_several_dtypes_is_found_in_all():
    model = stack(1)
    unit, saved = model.engine.units[1], SavedParameters(lambda chain: None)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        unit.compute_in(dtype)
        unit.unsharded.allocate()
        saved.hooks((Call(unit, unit.module, True, True),))
        found.append(unit.unsharded)
    for unsharded in found:
        unit.compute_with(unsharded)
        assert saved.chain_of(unsharded.flat_param.detach()) is not None


@on_ranks(1)
def test_what_was_changed_since_it_was_saved_is_refused_as_ever():
    model = FSDP(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    out = model(batch())
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match=r"by an inplace operation: .* expected version 0"):
        out.sum().backward()


@on_ranks(2)
def test_hooks_around_a_model_get_what_they_would_have_got():
    def shapes_packed(model):
        packed = []

        def pack(tensor):
            packed.append((tuple(tensor.shape), tensor.dtype))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(batch()).pow(2).sum()
        loss.backward()
        return packed

    assert shapes_packed(stack(2)) == shapes_packed(layers(2))


@on_ranks(2)
def test_transforms_of_functions_are_refused_with_the_name_of_the_unit():
    class Transforms(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.func.grad(lambda z: z.pow(2).sum())(x)

    model = FSDP(nn.Sequential(FSDP(Transforms(6, 6).to(device()))))
    with pytest.raises(RuntimeError, match=r"of unit '0'.*Use torch\.autograd\.grad there"):
        model(batch())


@on_ranks(2)
def test_hooks_within_a_unit_are_used_too():
    class Offloads(nn.Linear):
        def forward(self, x):
            with save_on_cpu():
                return super().forward(x).tanh()

    parts = (FSDP(Offloads(6, 6).to(device())) for _ in range(2))
    model = FSDP(nn.Sequential(*parts))
    step(model)
    assert all(
        unit.sharded_flat_param.grad.isfinite().all() for unit in model.engine.units if unit.numel
    )


@on_ranks(2)
def test_with_nothing_to_say_to_autograd_nothing_is_said():
    """torch.func sets its own rules: within it, hooks are refused."""
    model = stack(1)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), torch.no_grad():
        assert model(batch()).shape == (3, 6)
