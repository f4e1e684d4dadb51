"""rank_agreement.py: ranks that diverge are told, and units that only some ranks use are right."""

from contextlib import contextmanager, nullcontext
from itertools import product
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp import (
    BackwardPrefetch,
    CustomPolicy,
    ForwardPrefetch,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.checks.rank_agreement import CHECKED_STEPS, DIVERGED, RankAgreement
from minifsdp.comm import consensus
from minifsdp.comm.collectives import gather
from minifsdp.comm.groups import HYBRID
from minifsdp.comm.message_tags import Kind
from tests.parity import alone, check_at_rest, grid
from tests.ranks import device, on_ranks, run
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    mean_gradients,
    step,
    storage,
)

STRATEGIES = list(ShardingStrategy)
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_ZERO2 = STRATEGIES
WORLDS = [(s, ranks) for ranks in (2, 3) for s in STRATEGIES[:3]] + [(s, 4) for s in STRATEGIES]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_world = pytest.mark.parametrize("strategy, ranks", WORLDS)


def wrap(model: nn.Module, strategy: ShardingStrategy = FULL_SHARD, **settings) -> FSDP:
    mesh = grid(strategy) if strategy in HYBRID else None
    return FSDP(
        model.to(device()),
        sharding_strategy=strategy,
        device_mesh=mesh,
        **{"auto_wrap_policy": ModuleWrapPolicy({Block}), **settings},
    )


# ------------------------------------------------------------------------- ranks that part ways


class Planned(nn.Module):
    """Runs the units that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 6)

    def forward(self, x, plan="abc"):
        for name in plan:
            x = getattr(self, name)(x)
        return self.last(x)


def planned(strategy=FULL_SHARD, **settings) -> FSDP:
    torch.manual_seed(0)
    return wrap(Planned(), strategy, **settings)


def steps_are_right(model: FSDP) -> None:
    """A few more steps, past those that are checked."""
    torch.manual_seed(0)
    plain = Planned().to(device())
    for at in range(CHECKED_STEPS + 2):
        model.zero_grad()
        step(model, at)
        assert_same_gradients(
            gathered_gradients(model), mean_gradients(plain, plain(batch(step=at)).pow(2).sum())
        )
        check_at_rest(model)


def summon(model):
    with FSDP.summon_full_params(model):
        pass


PARTINGS = {  # what the odd rank does, where it is then, and where the others are who do "abc"
    "skips one": ("ac", "forward of 'c'", "forward of 'b'"),
    "takes two in another order": ("bac", "forward of 'b'", "forward of 'a'"),
    "skips the last": ("ab", "end of forward of <root>", "forward of 'c'"),
    "runs one twice": ("abbc", "forward of 'b'", "forward of 'c'"),
    "runs none": ("", "end of forward of <root>", "forward of 'a'"),
    "summons alone": (summon, "summon full params of <root>", "forward of <root>"),
    "saves alone": (FSDP.state_dict, "summon full params of <root>", "forward of <root>"),
}


def check_parting(strategy, name, odd, **settings):
    model = planned(strategy, **settings)
    step(model, 0)  # the second one is checked, too, and prefetches by the orders of the first
    does, there, elsewhere = PARTINGS[name]
    others = ", ".join(str(rank) for rank in range(dist.get_world_size()) if rank != odd)
    ranks = "rank" if dist.get_world_size() == 2 else "ranks"
    with pytest.raises(RuntimeError, match="the ranks are not in step") as error:
        if dist.get_rank() != odd:
            model(batch())
        elif isinstance(does, str):
            model(batch(), does)
        else:
            does(model)
    assert f"rank {odd}: {there}" in str(error.value)
    assert f"{ranks} {others}: {elsewhere}" in str(error.value)
    check_at_rest(model)
    steps_are_right(model)


@every_world
@pytest.mark.parametrize("name", PARTINGS)
def test_ranks_that_part_ways_are_told_where_everybody_is(strategy, ranks, name):
    if strategy is ShardingStrategy.NO_SHARD and name.endswith("alone"):
        return  # that needs nobody else, see tests/promises/test_ranks_agree.py
    run(check_parting, ranks, strategy, name, odd=ranks - 1)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("forward", ForwardPrefetch)
def test_in_a_grid_with_prefetches_too(forward, odd):
    run(check_parting, 4, HYBRID_SHARD, "skips one", odd, forward_prefetch=forward)


@pytest.mark.parametrize("odd", [0, 1])
@on_ranks(2)
def test_a_backward_that_others_do_not_do(odd):
    model = planned()
    loss = model(batch()).sum()
    said = ["forward of <root>", "forward of <root>"]
    said[odd] = "start of a backward below <root>"
    with pytest.raises(RuntimeError, match=f"rank 0: {said[0]}; rank 1: {said[1]}"):
        loss.backward() if dist.get_rank() == odd else model(batch())
    steps_are_right(model)  # one rank has begun two steps, the other one


@on_ranks(2)
def test_a_backward_through_a_frozen_unit_on_some_ranks_only():
    torch.manual_seed(0)
    module = Planned()
    module.b.requires_grad_(False)
    model = wrap(module)
    outputs = {}
    for name in "ab":
        model.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: outputs.update({name: out})
        )
    model(batch())
    with pytest.raises(RuntimeError, match=r"rank 0: backward of 'a'; rank 1: backward of 'b'"):
        outputs["b" if dist.get_rank() else "a"].sum().backward()


@on_ranks(3)
def test_a_backward_inside_of_no_sync_on_some_ranks_only():
    model = planned()
    for at in range(CHECKED_STEPS + 1):
        model.zero_grad()
        step(model, at)
    loss = model(batch()).sum()
    with (
        model.no_sync() if dist.get_rank() == 1 else nullcontext(),
        pytest.raises(RuntimeError, match=r"ranks 0, 2: outside; rank 1: inside"),
    ):
        loss.backward()
    steps_are_right(model)


@on_ranks(2)
def test_what_happens_between_steps_does_not_use_up_the_checks():
    model = planned()
    for _ in range(CHECKED_STEPS + 1):
        summon(model)
    with pytest.raises(RuntimeError, match=r"rank 0: forward of 'a'; rank 1: forward of 'b'"):
        model(batch(), "ba" if dist.get_rank() else "ab")


@on_ranks(2)
def test_a_forward_that_a_checkpoint_runs_again_is_not_a_step():
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model = wrap(nn.Sequential(Block(nn.Linear(6, 6)), Checkpointed(Block(nn.Linear(6, 6)))))
    first, second = model(batch()).sum(), model(batch()).sum()
    assert model.engine.layer(RankAgreement).steps == 2
    for loss in (first, second):
        with FSDP.summon_full_params(model, writeback=False):
            pass
        loss.backward()
        assert model.engine.layer(RankAgreement).steps == 2


# ---------------------------------------------------------------- units that only some ranks use


class Whims(nn.Module):
    """A head that may not count, and a layer that may not look at its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block(nn.Linear(6, 5), nn.Tanh())
        self.layer = Whim(nn.Linear(5, 5), nn.Tanh())
        self.head = Block(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
        self.last = nn.Linear(5, 2)

    def forward(self, x, uses):
        x = self.layer(self.body(x), "layer" in uses)
        head = self.head(x)
        return self.last(x).pow(2).sum() + (head.sum() if "head" in uses else 0)


class Whim(Block):
    def forward(self, x, use):
        return super().forward(x) if use else x * 2


PLANS = [  # what rank r uses
    lambda r: ("head", "layer") if r == 0 else (),
    lambda r: ("head", "layer"),
    lambda r: (),
    lambda r: ("head",) if r == 0 else ("layer",),
    lambda r: ("head",) if r == 1 else (),
    lambda r: ("layer",) if r == 0 else ("head", "layer"),
]


def whims(strategy, **settings) -> tuple[FSDP, nn.Module]:
    torch.manual_seed(0)
    plain = Whims().to(device())
    torch.manual_seed(0)
    settings["auto_wrap_policy"] = ModuleWrapPolicy({Block, Whim})
    return wrap(Whims(), strategy, **settings), plain


def mean_with_zeros(plain: nn.Module, *losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mean over all ranks; nothing for what none of them has used."""
    for param in plain.parameters():
        param.grad = None
    sum(losses).backward()
    used = torch.tensor([p.grad is not None for p in plain.parameters()], device=device())
    dist.all_reduce(used, dist.ReduceOp.MAX)
    expected = {}
    for (name, param), it_is in zip(plain.named_parameters(), used, strict=True):
        if it_is:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            expected[name] = grad / dist.get_world_size()
            dist.all_reduce(expected[name])
    return expected


def check_gradients(model: FSDP, expected: dict[str, torch.Tensor]) -> None:
    found = gathered_gradients(model)
    if dist.get_world_size() > 2:
        assert_same_gradients(found, expected)
    else:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    check_at_rest(model)


def check_whims(strategy):
    for backward_prefetch, forward_prefetch in zip(
        [None, *BackwardPrefetch], [ForwardPrefetch.FORWARD_POST, False, True], strict=True
    ):
        model, plain = whims(
            strategy,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=1,
        )
        for at, plan in enumerate(PLANS):
            uses = plan(dist.get_rank())
            model.zero_grad()
            model(batch(step=at), uses).backward()
            check_gradients(model, mean_with_zeros(plain, plain(batch(step=at), uses)))


@pytest.mark.few(2)
@every_world
def test_a_rank_with_no_use_for_a_unit_gives_zeros(strategy, ranks):
    run(check_whims, ranks, strategy)


@on_ranks(2)
def test_where_all_is_gathered_already_no_prefetch_is_tried():
    """It would only count as one with a wrong target."""
    model, _ = whims(FULL_SHARD, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)
    both = ("head", "layer")
    for at, uses in enumerate((both, both, both[dist.get_rank() :])):
        model(batch(step=at), uses).backward()
    assert model.engine.layer(RankAgreement)._ever_diverged
    mistargets = model.engine.prefetcher.stats.mistargets
    assert not any(mistargets.values()), mistargets


def check_whims_that_wait(strategy):
    model, plain = whims(strategy)
    for first, second in product(PLANS, PLANS):
        plans = [first(dist.get_rank()), second(dist.get_rank())]
        model.zero_grad()
        with model.no_sync():
            model(batch(step=0), plans[0]).backward()
        model(batch(step=1), plans[1]).backward()
        losses = [plain(batch(step=at), uses) for at, uses in enumerate(plans)]
        check_gradients(model, mean_with_zeros(plain, *losses))


@pytest.mark.few(3)
@every_world
def test_so_it_does_where_gradients_have_waited(strategy, ranks):
    run(check_whims_that_wait, ranks, strategy)


@on_ranks(2)
def test_where_ranks_diverge_all_units_are_held_and_gradients_wait():
    model, _ = whims(FULL_SHARD)
    units, seen = model.engine.units, []

    def note(unit):  # asked in each unit's backward, after it is known whether ranks diverge
        seen.append((unit.name, [u.name for u in units if DIVERGED in u.reasons and storage(u)],
                     [u.name for u in units if DIVERGED in u.waits]))  # fmt: skip

    names = [unit.name for unit in units]
    for uses in ((), ("head",) if dist.get_rank() else ()):
        loss = model(batch(), uses)
        with patch.object(model.engine.prefetcher, "pre_backward", note):
            loss.backward()
        assert not any(unit.reasons or unit.waits or storage(unit) for unit in units)
    used = [name for name in names if name != "layer"]
    assert all(not held and not waits for _, held, waits in seen[:2])
    assert seen[-1][1:] == (names, used) and len(seen) > 2


@on_ranks(2)
def test_what_nobody_uses_keeps_no_gradient():
    model, _ = whims(FULL_SHARD)
    model(batch(), ()).backward()
    by_name = {unit.name: unit.sharded_flat_param.grad is None for unit in model.engine.units}
    assert by_name == {"": False, "body": False, "layer": True, "head": True}


@on_ranks(2)
def test_a_unit_whose_parameters_have_no_elements_has_nothing_to_agree_on():
    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return x + self.nothing.sum()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.nothing, self.linear = Nothing(), nn.Linear(6, 6)

        def forward(self, x):
            return self.linear(x).sum(), self.nothing(x).sum()

    model = wrap(Both(), auto_wrap_policy=ModuleWrapPolicy({Nothing}))
    for _ in range(2):
        losses = model(batch())
        sum(losses[: 1 + dist.get_rank()]).backward()
        assert model.engine.units[1].sharded_flat_param.grad is None
        assert not model.engine.layer(RankAgreement).late


@on_ranks(3)
def test_a_backward_that_fails_while_ranks_diverge_is_forgotten():
    model, plain = whims(FULL_SHARD)

    def interrupt(grad):
        raise KeyError

    for plan in PLANS:
        uses = plan(dist.get_rank())
        model.zero_grad()
        handle = model.get_submodule("body").register_forward_hook(
            lambda module, args, output: output.register_hook(interrupt) and None
        )
        with pytest.raises(KeyError):
            model(batch(), uses).backward()
        handle.remove()
        assert all(param.grad is None for param in model.parameters())
        model(batch(), uses).backward()
        check_gradients(model, mean_with_zeros(plain, plain(batch(), uses)))


class Expert(nn.Linear):
    """Belongs to some ranks."""


class Pairs(nn.Module):
    """Ranks 0 and 1 share an expert, and 2 and 3 another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = Block(nn.Linear(6, 6)), Block(nn.Linear(6, 6))
        self.expert, self.last = Expert(6, 6), nn.Linear(6, 6)

    def forward(self, x, use):
        x = self.first(x).tanh()
        expert = self.expert(x)
        return self.last(self.again(x)).pow(2).sum() + (expert.pow(2).sum() if use else 0)


@pytest.mark.parametrize("users", [[0], [3], [1, 2], [0, 1], [0, 1, 2]])
@on_ranks(4)
def test_ranks_that_share_an_expert_may_diverge_about_it(users):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    torch.manual_seed(0)
    plain = Pairs().to(device())
    torch.manual_seed(0)
    policy = CustomPolicy(
        lambda m: {"process_group": pair} if isinstance(m, Expert) else isinstance(m, Block)
    )
    model = wrap(Pairs(), auto_wrap_policy=policy)
    use = dist.get_rank() in users
    for at in range(CHECKED_STEPS + 2):
        model.zero_grad()
        model(batch(step=at), use).backward()
        expected = {}
        plain.zero_grad()
        plain(batch(step=at), use).backward()
        for name, param in plain.named_parameters():
            group = pair if "expert" in name else dist.group.WORLD
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            expected[name] = grad / group.size()
            dist.all_reduce(expected[name], group=group)
        if not set(users) & set(dist.get_process_group_ranks(pair)):
            expected["expert.weight"] = expected["expert.bias"] = None
        with FSDP.summon_full_params(model, writeback=False, with_grads=True):
            found = {name: param.grad for name, param in model.named_parameters()}
        torch.testing.assert_close(found, expected)
        check_at_rest(model)


@on_ranks(4)
def test_experts_that_each_rank_has_for_itself_ask_nobody():
    torch.manual_seed(0)
    own = {"process_group": alone()}
    policy = CustomPolicy(lambda m: own if isinstance(m, Expert) else isinstance(m, Block))
    model = wrap(Pairs(), auto_wrap_policy=policy)
    for at in range(CHECKED_STEPS + 1):
        model.zero_grad()
        model(batch(step=at), dist.get_rank() == 1).backward()
        gradient = model.get_submodule("expert")._unit.sharded_flat_param.grad
        assert (gradient is not None) == (dist.get_rank() == 1)


# ------------------------------------------------------------------------------------ its price


@contextmanager
def messages():
    """What ranks say to each other about units, by its kind."""
    tags = []

    def noted(full, chunk, group, tag, label, kind):
        tags.append(kind)
        gather(full, chunk, group, tag, label, kind)

    def exchanged(group, *args):
        tags.append("units")
        return exchange(group, *args)

    exchange = consensus._ask_all
    with patch.multiple(consensus, gather=noted, _ask_all=exchanged):
        yield tags


@pytest.mark.parametrize("strategy, words", [(FULL_SHARD, 1), (HYBRID_SHARD, 2)])
@on_ranks(4)
def test_after_the_checked_steps_one_message_a_backward_is_left(strategy, words):
    model = planned(strategy)
    for at in range(CHECKED_STEPS):
        with messages() as said:
            step(model, at)
        # Four forwards begin and one ends, four backwards and their start and end.
        assert said.count(Kind.MOMENT) == (5 + 6) * words
        assert said.count("units") == (words if at == 0 else 0)
    for at in range(3):
        with messages() as said:
            step(model, at)
            summon(model)
        assert said == [Kind.AGREEMENT] * words


@every_strategy
@on_ranks(1)
def test_one_rank_says_nothing(strategy):
    with messages() as said:
        model, _ = whims(strategy)
        for plan in PLANS:
            model(batch(), plan(0)).backward()
        summon(model)
    assert said == []


@on_ranks(2)
def test_a_gpu_is_asked_in_the_first_steps_and_then_only_if_it_ever_mattered():
    model, _ = whims(FULL_SHARD)
    asked = []
    on_gpu = patch.object(RankAgreement, "_device", PropertyMock(return_value=torch.device("cuda")))
    for at in range(CHECKED_STEPS + 1):
        model(batch(step=at), ()).backward()
        with on_gpu:
            asked.append(model.engine.layer(RankAgreement).compares_backwards)
    model(batch(), ("head",) if dist.get_rank() else ()).backward()
    with on_gpu:
        asked.append(model.engine.layer(RankAgreement).compares_backwards)
    assert asked == [True] * CHECKED_STEPS + [False, True]
