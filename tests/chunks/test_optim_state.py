"""optim_state.py: an optimizer's state is that of one chunk, and says so."""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from minifsdp.chunks.optim_state import MARK, Mark, agree
from minifsdp.comm.consensus import gather_objects
from tests.parity import grid
from tests.ranks import device, on_ranks
from tests.small import batch, stack, step


def stepped(width=6, make=torch.optim.Adam, **settings):
    model = stack(2, width, **settings)
    optimizer = make(model.parameters(), lr=0.01)
    model(batch(width)).sum().backward()
    optimizer.step()
    return model, optimizer


def of_rank(rank, state):
    return gather_objects(state, dist.group.WORLD)[rank]


def test_a_mark_is_saved_and_copied_as_what_torch_knows():
    mark = Mark(["chunk 1 of 2 of 3 elements"])
    plain = OrderedDict(places=["chunk 1 of 2 of 3 elements"])
    file = io.BytesIO()
    torch.save({"groups": [{MARK: mark}]}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"groups": [{MARK: plain}]}
    assert copy.deepcopy(mark) == plain and type(copy.deepcopy(mark)) is OrderedDict
    assert pickle.loads(pickle.dumps(mark)) == plain
    assert repr(mark) == "<chunks of 1 parameters>"  # an optimizer may have hundreds
    assert mark == Mark([*mark.places]) and mark != Mark(["another"]) and mark != 1


@on_ranks(2)
def test_groups_say_which_chunks_they_are_of_and_others_say_nothing():
    rank, plain = dist.get_rank(), nn.Linear(6, 6).to(device())
    model = stack(1)
    flat = list(model.parameters())
    groups = [[flat[0], plain.weight], [flat[1]], [plain.bias]]
    optimizer = torch.optim.Adam([{"params": group} for group in groups])
    step(model)
    optimizer.step()
    marks = [group.get(MARK) for group in optimizer.param_groups]
    mine = f"chunk {rank} of 2 of 42 elements"
    assert [mark and mark.places for mark in marks] == [[mine, "a whole parameter"], [mine], None]
    assert [MARK in group for group in optimizer.state_dict()["param_groups"]] == [1, 1, 0]
    _, whole = stepped(sharding_strategy=ShardingStrategy.NO_SHARD)
    assert not any(MARK in group for group in whole.param_groups)


@on_ranks(2)
def test_its_own_state_is_taken_and_marked_again():
    model, optimizer = stepped()
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
        assert type(optimizer.param_groups[0][MARK]) is OrderedDict
        step(model)
        optimizer.step()
        assert type(optimizer.param_groups[0][MARK]) is Mark


@pytest.mark.parametrize("fresh", [False, True])
@on_ranks(2)
def test_another_ranks_state_is_refused_on_all_and_nothing_is_stepped(fresh):
    model, optimizer = stepped()
    state = of_rank(1, optimizer.state_dict())
    if fresh:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(state)
    before = [param.detach().clone() for param in model.parameters()]
    said = "for unit <root> it is that of chunk 1 of 2 of 42 elements, and this is chunk 0 of 2 of"
    begin = "^rank 0: " if dist.get_rank() else "^"
    for _ in range(2):  # whoever tries again is told again
        step(model)
        with pytest.raises(RuntimeError, match=f"{begin}.*{said}"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("chosen", [0, 3])
@on_ranks(4)
def test_of_a_grid_of_ranks_all_hear_what_one_has_found(chosen):
    hybrid = ShardingStrategy.HYBRID_SHARD
    model, optimizer = stepped(sharding_strategy=hybrid, device_mesh=grid(hybrid))
    states = gather_objects(optimizer.state_dict(), dist.group.WORLD)
    rank = dist.get_rank()
    optimizer.load_state_dict(states[(rank + 2) % 4])  # a replica's is its own
    step(model)
    optimizer.step()
    optimizer.load_state_dict(states[rank ^ 1] if rank == chosen else states[rank])
    step(model)
    with pytest.raises(RuntimeError, match="was loaded from elsewhere"):
        optimizer.step()


@on_ranks(2)
def test_sizes_tell_where_there_is_no_mark():
    _, whole = stepped(sharding_strategy=ShardingStrategy.NO_SHARD)
    model, optimizer = stepped()
    optimizer.load_state_dict(whole.state_dict())
    step(model)
    with pytest.raises(RuntimeError, match=r"exp_avg \(42,\), and this is \(21,\)"):
        optimizer.step()
    before_marks = stepped()[1].state_dict()
    for group in before_marks["param_groups"]:
        group.pop(MARK)
    optimizer.load_state_dict(before_marks)
    optimizer.step()


@on_ranks(2)
def test_where_nothing_is_remembered_nothing_is_wrong():
    model, optimizer = stepped(make=torch.optim.SGD)
    optimizer.load_state_dict(of_rank(0, optimizer.state_dict()))
    step(model)
    optimizer.step()
    assert f"chunk {dist.get_rank()} of 2" in optimizer.param_groups[0][MARK].places[0]


@on_ranks(2)
def test_state_that_is_there_from_the_start_is_its_own():
    model = stack(2)
    optimizer = torch.optim.Adagrad(model.parameters())
    assert optimizer.state
    step(model)
    optimizer.step()


@on_ranks(2)
def test_what_one_rank_says_all_raise():
    model = stack(1)  # kept: the optimizer's parameters refer to their units weakly
    params = [{"params": list(model.parameters())}]
    agree(None, params)
    with pytest.raises(RuntimeError, match="^mine" if dist.get_rank() else "^rank 1: mine"):
        agree("mine" if dist.get_rank() else None, params)
    agree(None, [{"params": [nn.Parameter(torch.ones(1))]}])
    if dist.get_rank():  # nobody to tell
        with pytest.raises(RuntimeError, match=r"^alone"):
            agree("alone", [{"params": []}])


@on_ranks(4)
def test_ranks_that_are_in_no_group_together_hear_it_through_one_that_is_in_both():
    pair, others = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    rank, models = dist.get_rank(), []  # which a collector would take, and their groups with them
    for ranks, group in (([0, 1], pair), ([1, 2, 3], others)):
        if rank in ranks:
            models.append(FSDP(nn.Linear(6, 6).to(device()), process_group=group))
    params = [param for model in models for param in model.parameters()]
    with pytest.raises(RuntimeError, match="found by rank 0"):
        agree(None if rank else "found by rank 0", [{"params": params}])


@on_ranks(2)
def test_what_is_whole_may_be_in_a_unit_or_in_none():
    model, plain = stack(1), nn.Parameter(torch.ones(6, device=device()))
    norm = FSDP(
        nn.LayerNorm(6, bias=False).to(device()), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    state = None
    for whole in (plain, *norm.parameters(), plain):
        optimizer = torch.optim.Adam([*model.parameters(), whole])
        if state is not None:
            optimizer.load_state_dict(state)
        step(model)
        whole.grad = torch.ones_like(whole)
        optimizer.step()
        state = optimizer.state_dict()


@on_ranks(2)
def test_a_state_dict_for_a_distributed_checkpoint_is_refused_and_others_are_not():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = stepped()
    with pytest.raises(RuntimeError, match="would take one rank's chunks"):
        get_optimizer_state_dict(model, optimizer)
    mark = optimizer.state_dict()["param_groups"][0][MARK]
    with pytest.raises(RuntimeError, match="would take one rank's chunks"):
        mark.__create_write_items__("optim", mark)
    with pytest.raises(RuntimeError, match="as_dtensors"):  # "_flat_param" is no parameter's name
        get_optimizer_state_dict(*stepped(sharding_strategy=ShardingStrategy.NO_SHARD))
