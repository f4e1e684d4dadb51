"""checks/same_launches.py: what NCCL would pair wrongly is noticed, after some steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.checks.rank_agreement import CHECKED_STEPS
from minifsdp.checks.same_launches import EVERY
from minifsdp.comm import message_tags
from minifsdp.comm.message_tags import Kind
from tests.parity import mesh
from tests.ranks import on_ranks
from tests.small import Block, batch, layers

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Swaps(nn.Module):
    """Two units of the same size, one after the other; the other way round while ``swapped``."""

    swapped = False

    def __init__(self):
        super().__init__()
        self.a, self.b = (Block(nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x):
        first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
        return second(first(x))


def wrapped(strategy="FULL_SHARD", **settings):
    torch.manual_seed(0)
    return FSDP(
        Swaps().cuda(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        **settings,
    )


def steps(model, count):
    for _ in range(count):
        model(batch()).sum().backward()
        model.zero_grad()


def error_of(model):
    """What the rank that is second in a step raises; the first one does not learn of it."""
    said = []
    try:
        steps(model, 1)
    except RuntimeError as error:
        said.append(str(error))
    everywhere = [None, None]
    dist.all_gather_object(everywhere, said)
    (error,) = [words for own in everywhere for words in own]
    return error


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [False, True], ids=["chunks", "rows"])
@on_ranks(2, pretended_gpu=True)
def test_units_in_another_order_on_one_rank_are_noticed(strategy, rows):
    model = wrapped(strategy, use_orig_params=rows)
    steps(model, EVERY - 2)
    assert EVERY - 2 > CHECKED_STEPS
    model.swapped = dist.get_rank() == 1
    steps(model, 1)  # wrong, and nobody says so
    error = error_of(model)
    assert "have started different collectives in the last 10 backwards" in error
    assert "equally many, in different orders" in error and "checkpoint" in error


@on_ranks(2, pretended_gpu=True)
def test_what_one_rank_gathers_instead_of_another_is_named():
    model = wrapped()
    steps(model, EVERY - 1)
    unit = model.engine.units[1 + dist.get_rank()]
    model.engine.parameters.unshard(unit, "a test")
    unit.let_go("a test")
    model.engine.parameters.reshard(unit)
    error = error_of(model)
    assert "(gathers of unit 'a': " in error and f" on rank {dist.get_rank()}" in error


@pytest.mark.parametrize("strategy", [*STRATEGIES, "HYBRID_SHARD"])
@on_ranks(2, pretended_gpu=True)
def test_ranks_that_do_the_same_go_on_and_do_not_fill_the_store(strategy):
    model = wrapped(strategy, device_mesh=mesh(2) if strategy == "HYBRID_SHARD" else None)
    steps(model, 3 * EVERY)
    assert notes() <= 2


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Block(nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x):
        return [head(x) for head in self.heads]


@on_ranks(2, pretended_gpu=True)
def test_ranks_may_differ_in_what_gets_a_gradient():
    """They agree on it (rank_agreement.py), and start the same collectives."""
    torch.manual_seed(0)
    model = FSDP(Heads().cuda(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    before = compared()
    for at in range(EVERY):
        model(batch())[(at + dist.get_rank()) % 2].sum().backward()
    assert compared() == before + 1


LABEL = "what the ranks [0, 1] have started"


def compared():
    """How often the two ranks have compared it, for all models of this world."""
    return message_tags.started.get((LABEL, 0, Kind.STORE.value, 1), 0)


def notes():
    """How many notes of it are in the store."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    return sum(store.check([f"minifsdp/{LABEL}/{at}"]) for at in range(1 + compared()))


@on_ranks(2)
def test_messages_with_tags_are_not_compared():
    model = FSDP(layers(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    before = compared()
    steps(model, EVERY)
    assert compared() == before
