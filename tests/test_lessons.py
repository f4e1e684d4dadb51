"""What torch's FSDP gets wrong, most of it without a word, works here or is refused by name.

Each of these was seen with torch 2.13. In the order of the damage: training goes on and is wrong;
the process dies; the message says nothing.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from minifsdp import CPUOffload, ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from tests.parity import check_at_rest, mesh
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    stack,
    step,
)


def loss_of(model, at=0):
    return model(batch(step=at)).pow(2).sum()


def assert_right_from_now_on(model):
    """A step gives the gradients that it should."""
    model.zero_grad()
    step(model)
    plain = layers()
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, loss_of(plain)))
    check_at_rest(model)


class Boom(torch.autograd.Function):
    """Runs out of memory in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("no memory for this batch")


HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]


@pytest.mark.parametrize("strategy", HYBRID)
@on_ranks(2)
def test_hybrid_with_a_shard_group_of_one_averages_over_all_ranks(strategy):
    """torch: ranks never agree, and gradients are divided by their number all the same."""
    assert_right_from_now_on(stack(sharding_strategy=strategy, device_mesh=mesh(2)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embed(tokens)))


@on_ranks(2)
def test_a_weight_tied_across_units_is_refused():
    """torch: two independent copies are trained."""
    policy = ModuleWrapPolicy({nn.Embedding, nn.Linear})
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' are one parameter"):
        FSDP(Tied().to(device()), auto_wrap_policy=policy)


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_is_refused():
    """torch: it steps, and nothing ever changes."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=r"SGD\) was built before wrapping"):
        FSDP(model)
    del optimizer


@on_ranks(2)
def test_the_clipping_that_sees_only_chunks_is_refused():
    """torch: each rank scales by another norm."""
    model = stack()
    step(model)
    with pytest.raises(RuntimeError, match=r"model.clip_grad_norm_\(max_norm\)"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.clip_grad_norm_(1.0)


@on_ranks(2)
def test_gradients_asked_for_by_autograd_grad_are_not_silently_missing():
    """The parameters are not part of the graph, which torch's own error says; `allow_unused=True`
    is to ask for None. `backward()` is what reduces."""
    model = stack()
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss_of(model), list(model.parameters()))
    assert_right_from_now_on(model)


@on_ranks(2)
def test_whole_parameters_for_rank_0_in_the_hosts_memory():
    """torch, on the CPU: the process dies, reading freed memory."""
    model = stack()
    options = dict(rank0_only=True, offload_to_cpu=True, writeback=False)
    with FSDP.summon_full_params(model, **options):
        for name, param in model.named_parameters():
            assert (dist.get_rank() == 0) != ("_flat_param" in name)
            assert param.sum().isfinite()
    assert_right_from_now_on(model)


@on_ranks(2)
def test_out_of_memory_in_the_backward_then_the_next_batch():
    """torch: wrong gradients, or none, from then on."""
    model = stack()
    block = model.module[2]
    handle = block.register_forward_hook(lambda module, args, output: Boom.apply(output))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model).backward()
        assert all(unit.sharded_flat_param.grad is None for unit in model.engine.units)
    handle.remove()
    assert_right_from_now_on(model)


@on_ranks(2)
def test_a_loss_from_a_childs_output_then_an_ordinary_step():
    """torch: the next gradients of that child are wrong."""
    model, kept = stack(), []
    handle = model.module[2].register_forward_hook(lambda m, args, output: kept.append(output))
    model(batch())
    kept[0].pow(2).sum().backward()
    handle.remove()
    assert_right_from_now_on(model)


@on_ranks(2)
def test_out_of_memory_in_the_forward_then_a_state_dict():
    """torch: an assertion about a state machine."""
    model, plain = stack(), layers()

    def fail(*_):
        raise torch.OutOfMemoryError("no memory for this batch")

    handle = model.module[2].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(batch())
    handle.remove()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert_right_from_now_on(model)


@on_ranks(2)
def test_two_forwards_then_two_backwards():
    """torch: sizes that are out of bounds for a storage."""
    model, plain = stack(), layers()
    losses = [loss_of(model, at) for at in range(2)]
    for loss in losses:
        loss.backward()
    expected = mean_gradients(plain, *(loss_of(plain, at) for at in range(2)))
    assert_same_gradients(gathered_gradients(model), expected)


@on_ranks(2)
def test_gradients_of_gradients_are_right_for_inputs_and_refused_by_name_for_parameters():
    """torch: both fail."""
    model, plain, x = stack(), layers(), batch().requires_grad_()
    penalties = []
    for each in (model, plain):
        (grad,) = torch.autograd.grad(each(x).pow(2).sum(), x, create_graph=True)
        penalties.append(grad.pow(2).sum())
    penalties[0].backward()
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, penalties[1]))
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"gradients of gradients \(create_graph=True\)"):
        loss_of(model).backward(create_graph=True)
    assert_right_from_now_on(model)


@on_ranks(2)
def test_a_child_called_before_the_root():
    """torch: the child takes itself for the root, and the root's call fails."""
    model = stack()
    model.module[1](batch())
    assert_right_from_now_on(model)


@on_ranks(2)
def test_an_opaque_object_as_output():
    """torch: "expected to be in states [FORWARD_BACKWARD] but current state is IDLE"."""

    class Boxed(nn.Sequential):
        def forward(self, x):
            box = type("Box", (), {})()
            box.inside = super().forward(x)
            return box

    model = FSDP(
        Boxed(*layers().children()).to(device()), auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    model(batch()).inside.pow(2).sum().backward()
    plain = layers()
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, loss_of(plain)))


@on_ranks(2)
def test_offload_accumulates():
    """torch: the second backward's gradients overwrite the first one's."""
    model, plain = stack(cpu_offload=CPUOffload(offload_params=True)), layers()
    for at in range(3):
        loss_of(model, at).backward()
    expected = mean_gradients(plain, *(loss_of(plain, at) for at in range(3)))
    found = {name: grad.cpu() for name, grad in gathered_gradients(model).items()}
    assert_same_gradients(found, {name: grad.cpu() for name, grad in expected.items()})


@on_ranks(2)
def test_a_step_of_fully_shard_while_gradients_wait():
    """torch's fully_shard: there are no gradients, and the step changes nothing, without a word."""
    for way, refusal in ((torchs_fully_shard, ()), (fully_shard, RuntimeError)):
        layer = way(nn.Linear(4, 4).to(device()), mesh=mesh(replicas=1))
        before = layer.weight.full_tensor().clone()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer.set_requires_gradient_sync(False)
        layer(torch.ones(1, 4, device=device())).sum().backward()
        assert nn.utils.clip_grad_norm_(layer.parameters(), 1.0) == 0
        with pytest.raises(refusal, match="wait to be reduced") if refusal else nullcontext():
            optimizer.step()
        assert torch.equal(layer.weight.full_tensor(), before)
