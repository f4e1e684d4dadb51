"""Promises about ranks that part ways: within seconds each raises, and says who is where.

These end the connections of their process groups, so each program runs in a world of its own.
"""

import copy
import os
import re
import time
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp.comm import deadlock_watch
from tests.parity import grid
from tests.promises import Block, batch
from tests.ranks import World, device, on_ranks

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy
SHARDED = [FULL_SHARD, SHARD_GRAD_OP]


class Layer(Block):
    """Runs a function of the user's in its forward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.then = None  # called with the output

    def forward(self, x):
        y = self.linear(x).tanh()
        return y if self.then is None else self.then(y)


def stack(strategy: ShardingStrategy = FULL_SHARD, layers: int = 3, **settings) -> FSDP:
    torch.manual_seed(0)
    module = nn.Sequential(*(Layer() for _ in range(layers)), nn.Linear(6, 2)).to(device())
    mesh = grid(strategy) if strategy is HYBRID_SHARD else None
    return FSDP(
        module,
        sharding_strategy=strategy,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        **settings,
    )


def step(model: FSDP, at: int) -> None:
    model(batch(3, 6, step=at)).pow(2).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad
    model.zero_grad()


def out_of_memory(*args):
    raise torch.OutOfMemoryError("out of memory")


@contextmanager
def failing(model: FSDP, where: str, layer: int = 1):
    """An exception in the forward or the backward of a layer."""
    then = out_of_memory
    if where == "backward":

        def then(y):
            y.register_hook(out_of_memory)
            return y

    module = model.module[layer].module
    module.then = then
    yield
    module.then = None


def call(program, *args, ranks: int = 2):
    """Each rank's result of a program, which is run in a world of its own."""
    world = World(ranks)
    try:
        return world.call(run, (program, args), {}, 60)
    finally:
        world.kill()


def run(program, args):
    """The error that ends a program on this rank, with its type; None if it does not raise."""
    with patch.multiple(deadlock_watch, POLL=0.1, PATIENCE=3):
        try:
            program(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def parted(program, *args, words, ranks: int = 2):
    """All ranks raise, and say all of ``words``."""
    for rank, said in enumerate(call(program, *args, ranks=ranks)):
        assert said is not None, f"rank {rank} raised nothing"
        for word in words:
            assert re.search(word, said), f"rank {rank} does not say {word!r}: {said}"


# ------------------------------------------------------------------- exceptions on some ranks only


def caught_on_one_rank(strategy, where, at, layer, odd):
    """As people catch it to skip a batch."""
    model = stack(strategy)
    for now in range(8):
        fails = now == at and dist.get_rank() in odd
        with failing(model, where, layer) if fails else nullcontext():
            try:
                step(model, now)
            except torch.OutOfMemoryError:
                model.zero_grad()
    dist.barrier()


CAUGHT = [
    (strategy, where, at, layer)
    for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)
    for where in ("forward", "backward")
    for at, layer in ((0, 0), (1, 2), (4, 1))
]


@pytest.mark.parametrize("strategy, where, at, layer", CAUGHT)
def test_an_exception_that_one_rank_catches(strategy, where, at, layer):
    parted(
        caught_on_one_rank, strategy, where, at, layer, [0],
        words=["have parted ways", "rank 0: in the start after an exception", "rank 1: in the"],
    )  # fmt: skip


def caught_on_all_ranks(beside, late):
    """A new model that skips a batch, which every rank does. One of them is late, once."""
    model = stack(process_group=dist.new_group() if beside else None)
    for now in range(4):
        with failing(model, "forward") if now == 2 else nullcontext():
            try:
                with patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2):
                    time.sleep(now == 1 and dist.get_rank() == late)
                    step(model, now)
            except torch.OutOfMemoryError:
                model.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("beside", [True, False])
def test_where_ranks_have_parted_a_model_in_a_new_group_trains(beside, where):
    """What only some ranks have counted, or have said, is forgotten; also that they have waited."""
    world, parts = World(2), (FULL_SHARD, where, 4, 1, [0])
    try:
        for said in world.call(run, (caught_on_one_rank, parts), {}, 60):
            assert "have parted ways" in said
            assert "with a store that was not used before, and wrap a new model" in said
        assert beside or world.renew()
        for late in range(2):
            assert world.call(run, (caught_on_all_ranks, (beside, late)), {}, 60) == [None] * 2
    finally:
        world.kill()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("odd", [[0], [1, 3], [2, 3]])
def test_so_in_a_grid(odd, where):
    parted(caught_on_one_rank, HYBRID_SHARD, where, 4, 1, odd, words=["have parted"], ranks=4)


def caught_at_the_very_end():
    """When all its reductions have started, so that the others can finish their backward."""
    model = stack(NO_SHARD)
    for now in range(6):
        x = batch(3, 6, step=now).requires_grad_()
        if now == 3 and dist.get_rank() == 0:
            x.register_hook(out_of_memory)
        try:
            model(x).sum().backward()
        except torch.OutOfMemoryError:
            model.zero_grad()


def test_one_that_comes_when_the_others_can_do_without_this_rank():
    parted(caught_at_the_very_end, words=["rank 0: in the start after an exception", "rank 1"])


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_one_that_all_ranks_catch_is_all_right(where):
    model, other = stack(), stack()
    for now in range(6):
        with failing(model, where) if now in (1, 4) else nullcontext():
            try:
                step(model, now)
            except torch.OutOfMemoryError:
                model.zero_grad()
        if now not in (1, 4):
            step(other, now)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(2)
def test_one_before_anything_was_said_concerns_nobody_else():
    model = stack()
    for now in range(5):
        step(model, now)
        if dist.get_rank():
            shard = model.module[0]._unit.sharded_flat_param
            data = shard.data
            shard.data = torch.zeros(5, device=device())  # refused before the step begins
            with pytest.raises(ValueError, match="5 elements"):
                model(batch(3, 6))
            shard.data = data


# --------------------------------------------------------------------------------- uneven programs


def fewer_batches(strategy, at, end):
    model = stack(strategy)
    for now in range(at + 2):
        if now == at and dist.get_rank() == 0:
            break
        step(model, now)
    end(model)


def barrier(model):
    dist.barrier()


def leave(model):
    dist.destroy_process_group()


def save(model):
    model.state_dict()
    dist.barrier()


def evaluate(model):
    model.eval()
    with torch.no_grad():
        for at in range(3):
            model(batch(3, 6, step=at))
    dist.barrier()


ENDS = {  # how the shorter program ends, and what the longer one says
    barrier: r"rank 0: in torch.distributed.barrier\(\), called from test_ranks_agree.py:\d+",
    leave: "lost the other ranks",
    save: "rank 0: in|not in step",
    evaluate: "rank 0: in|not in step",
}


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("strategy, at", [(FULL_SHARD, 1), (FULL_SHARD, 4), (NO_SHARD, 4)])
def test_a_rank_with_fewer_batches(strategy, at, end):
    _, said = call(fewer_batches, strategy, at, end)
    assert said is not None and re.search(ENDS[end], said), said
    assert "rank 1" in said


def end_process(model):
    os._exit(0)


def test_a_rank_whose_process_has_ended():
    world = World(2)
    try:
        world.call(os.getpid, (), {}, 60)  # all are there
        for connection, end in zip(world.connections, (end_process, barrier), strict=True):
            connection.send((run, (fewer_batches, (FULL_SHARD, 4, end)), {}))
        ok, said, _ = world.connections[1].recv()
    finally:
        world.kill()
    assert ok and re.search("RuntimeError: rank 1 waited in the gather .* called from test_", said)


# -------------------------------------------------------------------- what one rank does by itself


def alone_on_rank_0(act, at, strategy=FULL_SHARD):
    """All train; then rank 0 does something that concerns all, and they train on."""
    model = stack(strategy)
    for now in range(8):
        if now == at and dist.get_rank() == 0:
            act(model)
        step(model, now)


def summon(model):
    with FSDP.summon_full_params(model):
        pass


def load(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("act", [FSDP.state_dict, load, summon], ids=lambda act: act.__name__)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_rank_0_saves_or_loads_alone(at, act):
    words = ["rank 0: .*rank 1: ", "not in step" if at < 2 else "has to be called on every rank"]
    parted(alone_on_rank_0, act, at, words=words)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_so_where_every_rank_has_everything(at):
    """There rank 0 may save alone; what it loads alone makes it another model than the others'."""
    words = "different values in" if at == 0 else "rank 0: in the comparison .*rank 1: in the"
    parted(alone_on_rank_0, load, at, NO_SHARD, words=[words])


@pytest.mark.parametrize("act", [FSDP.state_dict, summon], ids=lambda act: act.__name__)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_where_every_rank_has_everything_one_may_look_alone(at, act):
    assert call(alone_on_rank_0, act, at, NO_SHARD) == [None, None]


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_ranks(2)
def test_all_ranks_load_the_same_between_steps(strategy):
    model = stack(strategy)
    for now in range(5):
        load(model)
        step(model, now)


def load_other_values(strategy, at):
    model = stack(strategy)
    for now in range(6):
        if now == at:
            state = model.state_dict()
            model.load_state_dict({name: value + dist.get_rank() for name, value in state.items()})
        step(model, now)


@pytest.mark.parametrize("strategy, at", [(NO_SHARD, 0), (NO_SHARD, 4), (FULL_SHARD, 4)])
def test_each_rank_loads_other_values(strategy, at):
    parted(load_other_values, strategy, at, words=["different values in"])


def an_optimizer_alone(strategy, at):
    """Rank 0 loads what its optimizer was some steps ago, and the others do not."""
    model = stack(strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    states = []
    for now in range(6):
        if now == at and dist.get_rank() == 0:
            optimizer.load_state_dict(states[0])
        model(batch(3, 6, step=now)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(copy.deepcopy(optimizer.state_dict()))
    dist.barrier()


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_rank_0_loads_the_state_of_an_optimizer_alone(strategy, at):
    words = [
        "rank 0: in the comparison of states before an optimizer's step.*rank 1: in",
        "has to be",
    ]
    parted(an_optimizer_alone, strategy, at, words=words)


def in_other_modes(strategy, at):
    low = MixedPrecision(torch.bfloat16, full_precision_in_eval=True)
    model = stack(strategy, mixed_precision=low)
    for now in range(8):
        model.train(now < at or dist.get_rank() > 0)
        step(model, now)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_ranks_in_train_and_in_eval_where_that_decides_on_the_precision(strategy, at):
    said = r"in eval\(\) mode"  # in the first steps, which are compared
    if at == 4:  # without gathers it is the backward that asks
        said = "or in another mode, and others" if strategy is NO_SHARD else "in the same mode"
    parted(in_other_modes, strategy, at, words=["rank 0: .*rank 1: ", said])


@on_ranks(2)
def test_ranks_in_train_and_in_eval_are_all_right_where_it_does_not():
    model = stack()
    for now in range(4):
        model.train(dist.get_rank() > 0)
        step(model, now)


def other_orders(strategy):
    """After the checked steps one rank runs two units in another order."""
    model = stack(strategy, forward_prefetch=False)
    for now in range(5):
        if now == 4 and dist.get_rank():
            layers = model.module._modules
            layers["0"], layers["1"] = layers["1"], layers["0"]
        step(model, now)
    dist.barrier()


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_units_in_another_order_on_one_rank(strategy):
    parted(other_orders, strategy, words=["of unit '0'", "of unit '1'", "have parted ways"])


def rows_in_other_orders(widths):
    """Both ranks of a row, so that nobody but the columns can notice."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, w), nn.Linear(w, 6)) for w in widths))
    model = FSDP(
        copy.deepcopy(plain),
        sharding_strategy=HYBRID_SHARD,
        device_mesh=grid(HYBRID_SHARD),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
    )
    for now in range(5):
        if now == 4 and dist.get_rank() > 1:
            for layers in (plain._modules, model.module._modules):
                layers.update(zip(list(layers), list(layers.values())[::-1], strict=True))
        plain(batch(3, 6, step=now)).pow(2).sum().backward()
        for param in sorted(plain.parameters(), key=lambda param: param.sum().item()):
            dist.all_reduce(param.grad.div_(4))  # in one order on all ranks
            param.data -= 0.1 * param.grad
        plain.zero_grad()
        step(model, now)
    for name, param in model.state_dict().items():
        torch.testing.assert_close(param, plain.state_dict()[name])


@pytest.mark.parametrize("widths", [(5, 5), (5, 7)], ids=["as long", "longer"])
def test_two_units_in_another_order_in_one_row_of_a_grid(widths):
    assert call(rows_in_other_orders, widths, ranks=4) == [None] * 4


def test_many_units_in_another_order_in_one_row_of_a_grid():
    words = ["all-reduction of the gradient of unit '0'", "of unit '5'", "have parted ways"]
    parted(rows_in_other_orders, (5, 7, 5, 7, 5, 6), words=words, ranks=4)


def build_for_other_groups():
    """The ranks 0 and 1 share on rank 0, and 1 and 2 on rank 1."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    model = FSDP(nn.Linear(6, 6), process_group=pairs[dist.get_rank()])
    model(batch(3, 6))


def test_groups_that_do_not_fit_together():
    words = [r"rank 0: in the comparison of what was wrapped with the ranks \[0, 1\]"]
    parted(build_for_other_groups, words=words, ranks=3)


def a_slow_rank(seconds):
    """Longer than it takes to be suspected. Nothing is wrong with that."""
    model = stack()
    for now in range(4):
        if dist.get_rank() == now % 2:
            time.sleep(seconds)
        step(model, now)
        if now == 2:
            if dist.get_rank():
                time.sleep(seconds)
            dist.barrier()


def test_a_slow_rank_is_waited_for():
    assert call(a_slow_rank, 0.8) == [None, None]
