"""post_forward.py: a smaller group between forward and backward."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from minifsdp import fully_shard
from minifsdp.between_steps.explain import table
from minifsdp.comm import collectives
from minifsdp.comm.groups import smaller_group
from minifsdp.core.streams import CpuEvent
from minifsdp.core.unshard import unshard, wait_for_unshard
from minifsdp.post_forward import PostForwardShard, keep_post_forward_shard
from minifsdp.wrapping.fsdp2_settings import reshards_after_forward
from tests.lone_unit import Group, lone_unit
from tests.ranks import device, on_ranks


@pytest.mark.direct
class TestDirectly:
    def test_what_is_sent_is_the_part_when_it_is_there(self):
        with lone_unit(ranks=4) as lone:
            part = torch.full((6,), torch.nan)
            ready = CpuEvent(lambda: part.copy_(torch.arange(1.0, 7)))
            lone.unit.source = PostForwardShard(part, ready, Group(0, 2))
            unshard(lone.unit, lone.streams)
            wait_for_unshard(lone.unit)
            assert lone.gathered == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
            assert lone.unit.source.group.called == ["all-gather"], "in the smaller group"
            assert lone.unit.shard_group.called == []

    def test_a_unit_without_a_smaller_group_keeps_its_source(self):
        for ranks, lines in ((4, None), (1, ((0, 1),))):
            with lone_unit(ranks=ranks) as lone:
                lone.unit.post_forward_lines = lines
                lone.fill()
                keep_post_forward_shard(lone.unit, lone.streams)
                assert lone.unit.source is lone.unit.own_source


class Block(nn.Module):
    """Its rows do not divide among four ranks."""

    def __init__(self, checkpointed: bool = False):
        super().__init__()
        self.linear, self.out = nn.Linear(6, 7), nn.Linear(7, 6)
        self.checkpointed = checkpointed

    def inner(self, x):
        return x + self.out(torch.tanh(self.linear(x)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True) if self.checkpointed else self.inner(x)


def build(reshard_after_forward, frozen=False, checkpointed=False, **settings) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 6), *(Block(checkpointed) for _ in range(3)), nn.Linear(6, 2)
    )
    model.to(device())
    if frozen:
        model[1].requires_grad_(False)
        model[2].out.requires_grad_(False)
    for block in model[1:4]:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **settings)
    return fully_shard(model, **settings)


def batch() -> torch.Tensor:
    return torch.randn(4, 3, device=device())


def train(model: nn.Module, again: bool = False, steps: int = 4) -> list[torch.Tensor]:
    """The losses, the gradients of the last step and the parameters.

    Args:
        again: two forwards and an evaluation before each backward.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(batch()).float().pow(2).mean()
        if again:
            loss = loss + model(batch()).float().pow(2).mean()
            with torch.no_grad():
                found.append(model(batch()))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    grads = [param.grad for param in params]
    return found + [t.full_tensor() if isinstance(t, DTensor) else t for t in (*grads, *params)]


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CASES = {
    "plain": {},
    "a part frozen": {"frozen": True},
    "checkpointed": {"checkpointed": True},
    "bf16": {"mp_policy": LOW},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "several forwards": {"again": True},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_bit_equal_to_a_gather_from_all_ranks(case):
    settings = dict(CASES[case])
    again = settings.pop("again", False)
    expected, found = (train(build(to, **settings), again) for to in (True, 2))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@on_ranks(4)
def test_a_unit_without_parameters_has_nothing_to_keep():
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Tanh())).to(device())
    fully_shard(model[1], reshard_after_forward=2)
    loss = fully_shard(model)(batch()).sum()
    assert model[1]._unit.source is model[1]._unit.own_source
    loss.backward()


@on_ranks(4)
def test_in_hybrid_sharding_all_ranks_of_a_replica_are_as_true():
    mesh = init_device_mesh(device().type, (1, 4), mesh_dim_names=("replicate", "shard"))
    expected, found = (train(build(to, mesh=mesh)) for to in (True, 2))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    pairs = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    assert build(2, mesh=pairs)[1]._unit.post_forward_lines is None


class Sent:
    """Bytes of parameters and gradients that this rank has sent, by the ranks that got them. (The
    ranks also compare whole numbers, in the first steps.)"""

    def __enter__(self) -> Counter:
        self.count: Counter = Counter()
        as_it_is = collectives.send_recv

        def counted(sent, to, received, source, message):
            to_rank = dist.get_global_rank(message.group, to)
            self.count[to_rank] += sum(t.nbytes for t in sent if t.is_floating_point())
            return as_it_is(sent, to, received, source, message)

        self.patch = patch.object(collectives, "send_recv", counted)
        self.patch.__enter__()
        return self.count

    def __exit__(self, *error) -> None:
        self.patch.__exit__(*error)


@on_ranks(4)
def test_only_the_forward_sends_between_the_groups():
    rank = dist.get_rank()
    neighbour = rank ^ 1
    for to, backward in ((True, {r: 1 for r in range(4) if r != rank}), (2, {neighbour: 2})):
        model = build(to)
        # Without reductions, all that a backward sends are parameters.
        model.set_requires_gradient_sync(False)
        model(batch()).sum().backward()
        shards = [block._unit.padded_shard.nbytes for block in model[1:4]]
        for _ in range(2):
            with Sent() as in_forward:
                loss = model(batch()).sum()
            with Sent() as in_backward:
                loss.backward()
            own = sum(shards) + model._unit.padded_shard.nbytes
            assert +in_forward == {r: own for r in range(4) if r != rank}
            assert +in_backward == {r: n * sum(shards) for r, n in backward.items()}


@on_ranks(4)
def test_it_is_kept_from_the_units_forward_to_its_backward():
    model = build(2)
    units = [block._unit for block in model[1:4]]

    def kept():
        for unit in units:
            if isinstance(unit.source, PostForwardShard):
                yield unit.source.shard.numel()
            else:
                assert unit.source is unit.own_source
                yield None

    halves = [unit.layout.padded_numel // 2 for unit in units]
    seen = []
    model[1].register_full_backward_pre_hook(lambda *_: seen.append([*kept()]))
    for _ in range(2):
        with torch.no_grad():
            model(batch())
            assert [*kept()] == [None] * 3
        loss = model(batch()).sum()
        assert [*kept()] == halves
        assert not any(unit.leaks for unit in units)  # it has memory of its own
        assert all(unit.unsharded.storage.nbytes() == 0 for unit in units)
        loss.backward()
        assert [*kept()] == [None] * 3
        assert seen[-1] == [halves[0], None, None]


@on_ranks(4)
def test_what_a_step_that_never_came_has_kept_is_not_used():
    expected, model = build(True), build(2)
    for one in (expected, model):
        one(batch())  # without a backward
        with torch.no_grad():
            for param in one.parameters():
                param.mul_(2)
    found, right = train(model), train(expected)
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))


@on_ranks(4)
def test_a_unit_that_stays_gathered_keeps_none():
    """It would be memory for a gather that never comes."""
    model = build(2)
    unit = model[1]._unit
    unit.hold("somebody needs it")
    loss = model(batch()).sum()
    assert unit.source is unit.own_source
    assert isinstance(model[2]._unit.source, PostForwardShard)
    unit.let_go("somebody needs it")
    loss.backward()


@on_ranks(4)
def test_it_can_be_switched_off():
    model = build(2)
    assert "4 ranks, 2 after forward" in table(model)
    model.set_reshard_after_forward(True)
    assert "after forward" not in table(model)
    loss = model(batch()).sum()
    assert all(block._unit.source is block._unit.own_source for block in model[1:4])
    loss.backward()


@on_ranks(4)
def test_ranks_with_different_numbers_are_told():
    model = build(2 if dist.get_rank() < 2 else True)
    with pytest.raises(ValueError, match="kept by 2 ranks together"):
        model(batch())


@on_ranks(4)
def test_smaller_groups_are_of_neighbours_and_made_once():
    world, pairs = dist.group.WORLD, ((0, 1), (2, 3))
    group = smaller_group(world, pairs)
    first = dist.get_rank() // 2 * 2
    assert dist.get_process_group_ranks(group) == [first, first + 1]
    assert smaller_group(world, pairs) is group
    assert build(2)[1]._unit.post_forward_lines == pairs


@on_ranks(4)
def test_ranks_may_be_in_different_numbers_of_groups_before():
    """Rank 0 is in one more than rank 1, and in another one it has to meet rank 1."""
    dist.new_group([0, 2])
    smaller_group.cache_clear()
    train(build(2))


@on_ranks(4)
def test_a_mesh_of_some_ranks_is_refused():
    mesh = init_device_mesh(device().type, (1, 4))
    with (
        patch.object(dist, "get_world_size", lambda *_: 8),
        pytest.raises(ValueError, match="all 8 ranks have to do together, and the mesh has 4 of"),
    ):
        reshards_after_forward(2, mesh)
