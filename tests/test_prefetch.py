"""prefetch.py: which unit to gather before it is asked for."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch as TorchBackwardPrefetch

from minifsdp import BackwardPrefetch, ForwardPrefetch, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.prefetch import Order, Prefetcher, forward_prefetch_of
from minifsdp.wrapping.root_settings import make_prefetcher
from tests.core.common import StubUnit
from tests.lone_unit import lone_unit
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step, watch


def linear():
    return FSDP(nn.Linear(6, 6).to(device()))


def recorded(model, at=0, forwards=1):
    """What happened in one step: its forwards, and the backward through them. `|` is where one of
    the units below the root has not begun and the one before it is over, which tells early gathers
    from those on demand."""
    with watch(model) as log, ExitStack() as stack:

        def between(_, inputs):
            x = inputs[0].clone()  # so that it has a place of its own in the backward
            if x.requires_grad:
                x.register_hook(lambda grad: log.append("|"))
            log.append("|")
            return x

        for unit in model.module.children():
            if isinstance(unit, FSDP):
                stack.callback(unit.register_forward_pre_hook(between).remove)
        loss = sum(model(batch(step=at + n)).sum() for n in range(forwards))
        forward = list(log)
        log.clear()
        loss.backward()
    return " ".join(forward), " ".join(log)


@pytest.mark.direct
class TestOrder:
    def test_the_next_is_what_came_next_in_the_last_pass(self):
        order = Order()
        assert [order.visit(unit) for unit in "abc"] == [None, None, None]
        order.start()
        assert [order.visit(unit) for unit in "abc"] == ["b", "c", None]

    def test_a_unit_may_come_several_times(self):
        order = Order()
        for unit in "abac":
            order.visit(unit)
        order.start()
        assert [order.visit(unit) for unit in "abac"] == ["b", "a", "c", None]

    def test_after_a_detour_it_finds_its_way_back(self):
        order = Order()
        for unit in "abcd":
            order.visit(unit)
        order.start()
        assert [order.visit(unit) for unit in "axcd"] == ["b", None, "d", None]

    def test_after_a_detour_it_does_not_go_back(self):
        order = Order()
        for unit in "abcad":
            order.visit(unit)
        order.start()
        assert [order.visit(unit) for unit in "abad"] == ["b", "c", "d", None]

    def test_a_pass_that_broke_off_is_not_taken_for_an_order(self):
        order = Order()
        for unit in "abc":
            order.visit(unit)
        order.start()
        order.visit("a")
        order.forget()
        order.start()
        assert [order.visit(unit) for unit in "ab"] == ["b", "c"]

    def test_before_the_first_visit_the_upcoming_is_the_first_of_the_last_pass(self):
        order = Order()
        assert order.upcoming() is None
        for unit in "ab":
            order.visit(unit)
        order.start()
        assert order.upcoming() == "a"


@pytest.mark.direct
class TestPrefetcher:
    """A root with three units, a, b and c, one after the other."""

    @staticmethod
    def units():
        root = StubUnit("root")
        return root, *(StubUnit(name, [root]) for name in "abc")

    def targets(self, prefetcher, steps=2, units=()):
        """What each of the four moments names in the last of some steps, for c, b and a."""
        root, a, b, c = units or self.units()
        for _ in range(steps):
            named = {name: [] for name in ("pre_forward", "post_forward", "pre_backward")}
            prefetcher.start_forward()
            prefetcher.pre_forward(root)
            for unit in (a, b, c):
                named["pre_forward"].append(prefetcher.pre_forward(unit))
                named["post_forward"].append(prefetcher.post_forward(unit))
            prefetcher.post_forward(root)
            prefetcher.start_backward()
            prefetcher.pre_backward(root)
            named["post_backward"] = []
            for unit in (c, b, a):
                named["pre_backward"].append(prefetcher.pre_backward(unit))
                named["post_backward"].append(prefetcher.post_backward(unit))
        return {
            name: "".join(unit.label if unit is not None else "-" for unit in units)
            for name, units in named.items()
        }

    NOTHING = dict.fromkeys(("pre_forward", "post_forward", "pre_backward", "post_backward"), "---")

    @pytest.mark.parametrize(
        "backward, forward, expected",
        [
            (BackwardPrefetch.BACKWARD_PRE, None, {"pre_backward": "ba-"}),
            (BackwardPrefetch.BACKWARD_POST, None, {"post_backward": "ba-"}),
            (None, ForwardPrefetch.FORWARD_PRE, {"pre_forward": "bc-"}),
            (None, ForwardPrefetch.FORWARD_POST, {"post_forward": "bc-"}),
        ],
    )
    def test_each_kind_names_the_next_unit_at_its_own_moment(self, backward, forward, expected):
        assert self.targets(Prefetcher(backward, forward)) == {**self.NOTHING, **expected}

    def test_the_first_backward_goes_by_a_guess_and_the_first_forward_by_nothing(self):
        both = Prefetcher(BackwardPrefetch.BACKWARD_PRE, ForwardPrefetch.FORWARD_PRE)
        # The reverse of the post-forward order, in which the root comes first; it is no target.
        assert self.targets(both, steps=1) == {**self.NOTHING, "pre_backward": "ba-"}

    def test_a_forward_that_has_raised_leaves_the_orders_of_the_last_step(self):
        both = Prefetcher(BackwardPrefetch.BACKWARD_PRE, ForwardPrefetch.FORWARD_PRE)
        units = self.units()
        before = self.targets(both, units=units)
        both.start_forward()
        both.pre_forward(units[2])
        both.post_forward(units[2])
        both.forget()
        assert self.targets(both, steps=1, units=units) == before

    def test_what_was_left_open_is_decided_by_the_host(self):
        pre = ForwardPrefetch.FORWARD_PRE
        for given, of_a_cpu, of_a_gpu in (
            (None, pre, None),
            (True, pre, pre),
            (False, None, None),
            (ForwardPrefetch.FORWARD_POST, *2 * [ForwardPrefetch.FORWARD_POST]),
        ):
            assert forward_prefetch_of(given, host_runs_ahead=False) is of_a_cpu, given
            assert forward_prefetch_of(given, host_runs_ahead=True) is of_a_gpu, given

    def test_what_is_gathered_or_over_is_no_target(self):
        prefetcher = Prefetcher(BackwardPrefetch.BACKWARD_PRE, None)
        with lone_unit() as lone:
            assert prefetcher.is_sound(lone.unit)
            lone.unit.state.start_backward(0)  # and as it is sharded, it was freed early
            assert not prefetcher.is_sound(lone.unit)
            lone.unit.state.complete_grad()
            assert not prefetcher.is_sound(lone.unit)
        with lone_unit() as lone:
            lone.fill()
            assert not prefetcher.is_sound(lone.unit)


@on_ranks(2)
def test_backward_pre_gathers_the_next_before_the_current_computes():
    model = stack(3)
    for at in range(3):  # by a guess in the first step, by what was recorded from the second
        _, backward = recorded(model, at)
        assert backward == "+3 -root +2 -3 | +1 -2 | -1 |"


@on_ranks(2)
def test_backward_post_gathers_the_next_after_the_current_is_freed():
    model = stack(3, backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=False)
    for at in range(3):
        _, backward = recorded(model, at)
        assert backward == "-root +3 -3 +2 | -2 +1 | -1 |"
    assert model.engine.stats.prefetches == 6, model.engine.stats.prefetches
    assert not mistargets(model)


@on_ranks(2)
def test_one_backward_through_two_forwards_is_one_order():
    for when, expected in {
        BackwardPrefetch.BACKWARD_PRE: "+3 +2 -3 | +1 -2 | +3 -1 | +2 -3 | +1 -2 | -1 | -root",
        BackwardPrefetch.BACKWARD_POST: "+3 -3 +2 | -2 +1 | -1 +3 | -3 +2 | -2 +1 | -1 | -root",
    }.items():
        model = stack(3, backward_prefetch=when, forward_prefetch=False)
        for at in range(3):
            _, backward = recorded(model, at, forwards=2)
            if at > 0:  # the order of the first step is a guess, of one pass
                assert backward == expected
        assert not mistargets(model)


@on_ranks(2)
def test_without_prefetch_each_unit_is_gathered_when_needed():
    model = stack(3, backward_prefetch=None, forward_prefetch=False)
    for at in range(3):
        forward, backward = recorded(model, at)
        assert forward == "+root | +1 -1 | +2 -2 | +3 -3"
        assert backward == "-root +3 -3 | +2 -2 | +1 -1 |"
    assert model.engine.stats.prefetches == 0


@on_ranks(2)
def test_by_default_the_forward_prefetches_where_the_host_does_not_run_ahead():
    """On a GPU the host comes to each gather long before the computation does, without it."""
    model = stack(3)
    forwards = [recorded(model, at)[0] for at in range(3)]
    one_by_one, ahead = "+root | +1 -1 | +2 -2 | +3 -3", "+root +1 | +2 -1 | +3 -2 | -3"
    later = ahead if device().type == "cpu" else one_by_one
    assert forwards == [one_by_one, later, later]  # in the first step nothing is known yet


@pytest.mark.parametrize("forward", [True, ForwardPrefetch.FORWARD_PRE])
@on_ranks(2)
def test_forward_pre_gathers_the_next_before_the_current_computes(forward):
    model = stack(3, forward_prefetch=forward)
    assert recorded(model)[0] == "+root | +1 -1 | +2 -2 | +3 -3"  # nothing is known yet
    for at in range(2):
        assert recorded(model, at)[0] == "+root +1 | +2 -1 | +3 -2 | -3"


@on_ranks(2)
def test_forward_post_gathers_the_next_after_the_current_is_freed():
    model = stack(3, forward_prefetch=ForwardPrefetch.FORWARD_POST)
    recorded(model)
    for at in range(2):
        assert recorded(model, at)[0] == "+root | +1 -1 +2 | -2 +3 | -3"
    # 3 in each backward, 2 in each later forward.
    assert model.engine.stats.prefetches == 3 * 3 + 2 * 2


class Branches(nn.Module):
    """Forward in one order, and not in the reverse of it backward: `b` hangs on the loss last."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.swap = False

    def forward(self, x):
        first, second = (self.b, self.a) if self.swap else (self.a, self.b)
        x = first(x) + second(x)
        return self.c(x)


class Detour(nn.Module):
    """`skip` is ready early in the forward and needed early in the backward."""

    def __init__(self):
        super().__init__()
        self.skip, self.a, self.b = linear(), linear(), linear()

    def forward(self, x):
        aside = self.skip(x)
        return torch.cat([self.b(self.a(x)), aside])


@on_ranks(2)
def test_from_the_second_step_on_the_backward_follows_its_own_order():
    model = FSDP(Detour())
    orders = []
    for at in range(3):
        step(model, at)
        orders.append([unit.name for unit in model.engine.prefetcher.pre_backward_order.current])
    assert orders[0] == orders[1] == orders[2]
    before = mistargets(model)
    step(model)
    assert mistargets(model) == before


class Fork(nn.Module):
    """Two outputs. One comes through a unit without parameters; nothing comes of another unit."""

    def __init__(self):
        super().__init__()
        self.trunk, self.idle, self.tanh = nn.Linear(6, 6).to(device()), linear(), FSDP(nn.Tanh())

    def forward(self, x):
        y = self.trunk(x)
        self.idle(x)
        return y, self.tanh(y)


@on_ranks(2)
def test_a_unit_without_parameters_prefetches_nothing():
    """Ranks do not have to agree on whether they come to it, and none may gather alone."""
    model = FSDP(Fork())
    outputs = model(batch())
    outputs[dist.get_rank()].sum().backward()
    assert [unit.name for unit in model.engine.units] == ["", "idle", "tanh"]
    assert model.engine.stats.prefetches == 1  # by the root, to which all come


def mistargets(model):
    return {kind: n for kind, n in model.engine.prefetcher.stats.mistargets.items() if n}


@on_ranks(2)
def test_mistarget_not_needed_yet():
    """The forward was a, b, c and becomes b, a, c: `a` is gathered for what turns out to be `b`'s
    turn, and then `b` once more, because it came after `a`, for what is `c`'s."""
    model = FSDP(Branches(), forward_prefetch=True)
    for swap, expected in ((False, {}), (False, {}), (True, {"not needed yet": 2})):
        model.module.swap = swap
        with torch.no_grad():
            model(batch())
        assert mistargets(model) == expected


@on_ranks(2)
def test_a_wrong_prefetch_is_counted_once_however_many_units_come_before_it():
    model = FSDP(Twofold(), forward_prefetch=True)
    for order in ("abc", "abc", "bca"):
        model.module.order = order
        model(batch())
    assert mistargets(model) == {"not needed yet": 1}


@pytest.mark.parametrize("forward", ForwardPrefetch)
@pytest.mark.parametrize("backward", BackwardPrefetch)
@on_ranks(2)
def test_units_that_stay_are_no_wrong_targets(backward, forward):
    model = stack(
        3,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=backward,
        forward_prefetch=forward,
    )
    for at in range(3):
        step(model, at)
    assert not mistargets(model), mistargets(model)


@on_ranks(2)
def test_a_unit_that_is_on_its_way_already_is_no_wrong_target():
    """After the inner unit's backward, and again after that of the one around it."""
    outer = FSDP(nn.Sequential(layers(0), linear()))
    model = FSDP(
        nn.Sequential(linear(), outer, layers(0)), backward_prefetch=BackwardPrefetch.BACKWARD_POST
    )
    for at in range(3):
        backward = recorded(model, at)[1]
    assert backward == "-root +1 +1.1 -1.1 +0 -1 | -0"
    assert not mistargets(model), mistargets(model)


@on_ranks(2)
def test_mistarget_already_unsharded():
    """In post-forward order a unit is followed by the one around it, which is in use."""
    inner = FSDP(nn.Sequential(layers(0), linear()))
    model = FSDP(nn.Sequential(inner, linear()), forward_prefetch=ForwardPrefetch.FORWARD_POST)
    for at in range(3):
        before = mistargets(model).get("already unsharded", 0)
        with torch.no_grad():
            model(batch(step=at))
        assert mistargets(model).get("already unsharded", 0) - before == (at > 0)


class Twofold(nn.Module):
    """The unit used last and first: by its second turn in the recorded order it is done."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.order = "abc"

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x).tanh()
        return x


@on_ranks(2)
def test_mistarget_already_resharded():
    """Recorded: c, b, a. Then the backward goes a, c, b: after b the recorded next is a, over."""
    model = FSDP(Twofold())
    for order in ("abc", "bca"):
        model.module.order = order
        step(model)
    assert mistargets(model)["already resharded"] == 1


@pytest.mark.parametrize(
    "backward", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]
)
@pytest.mark.parametrize("forward", [False, *ForwardPrefetch])
@on_ranks(2)
def test_mistargets_never_change_results(backward, forward):
    def losses(**settings):
        torch.manual_seed(0)
        model = FSDP(Twofold(), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for order in ("abc", "bca", "cab", "bac", "abc", "ab", "cba"):
            model.module.order = order
            found.append(step(model).item())
            assert model.engine.stats.unsharded_units == 0
            optimizer.step()
            optimizer.zero_grad()
        return found, model

    expected, _ = losses(sharding_strategy=ShardingStrategy.NO_SHARD)
    found, model = losses(backward_prefetch=backward, forward_prefetch=forward)
    assert found == expected
    assert mistargets(model)


@on_ranks(2)
def test_a_unit_gathered_for_a_forward_that_did_not_come_is_freed_when_it_ends():
    model = FSDP(Twofold(), forward_prefetch=True)
    for order in ("abc", "abc", "ab"):
        model.module.order = order
        loss = model(batch()).sum()
    units = {unit.name: unit for unit in model.engine.units}
    assert units["c"].unsharded.flat_param.untyped_storage().size() == 0
    loss.backward()


@on_ranks(2)
def test_evaluation_in_between_does_not_confuse_it():
    model = stack(3, forward_prefetch=True)
    for at in range(2):
        step(model, at)
    with torch.no_grad():
        model(batch())
    forward, backward = recorded(model)
    assert forward == "+root +1 | +2 -1 | +3 -2 | -3"
    assert backward == "+3 -root +2 -3 | +1 -2 | -1 |"
    assert not mistargets(model), mistargets(model)


class Fails(nn.Identity):
    """Fails in its forward or in its backward, if it is told to."""

    fails_in = ""

    def forward(self, x):
        if self.fails_in == "forward":
            raise InterruptedError
        if self.fails_in == "backward" and x.requires_grad:
            x.register_hook(interrupt)
        return x.clone()


def interrupt(*_):
    raise InterruptedError


@pytest.mark.parametrize("forward", ForwardPrefetch)
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_a_step_that_broke_off_does_not_say_what_comes_next(where, forward):
    fails = Fails()
    units = [FSDP(nn.Sequential(layers(0), *[fails] * (at == 1))) for at in range(3)]
    model = FSDP(nn.Sequential(*units), forward_prefetch=forward)
    for _ in range(2):
        before = model.engine.stats.prefetches
        expected = recorded(model)
    made = model.engine.stats.prefetches - before
    fails.fails_in = where
    with pytest.raises(InterruptedError):
        recorded(model)
    fails.fails_in = ""
    before = model.engine.stats.prefetches
    after, backward = recorded(model)
    assert model.engine.stats.prefetches - before == made
    # First, what was left is freed.
    assert (after.lstrip("-012 "), backward) == expected
    assert not mistargets(model), mistargets(model)


@pytest.mark.direct
def test_what_is_no_prefetch_of_ours_is_refused():
    """torch's own enum would be none of these, and silently mean no prefetch at all."""
    for wrong in ("pre", TorchBackwardPrefetch.BACKWARD_PRE, ForwardPrefetch.FORWARD_PRE):
        with pytest.raises(TypeError, match=r"is not one of minifsdp.BackwardPrefetch's"):
            make_prefetcher(wrong, None)
