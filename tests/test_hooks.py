"""hooks.py: the moments of a training step, and everything that may happen instead of one."""

import warnings
from collections import OrderedDict, namedtuple
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from minifsdp import ForwardPrefetch, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core import streams
from minifsdp.core.streams import CpuStream, Streams
from tests.parity import check_at_rest, full_parameters
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
    storage,
    watch,
)
from tests.test_prefetch import Twofold

STRATEGIES = [s for s in ShardingStrategy if "HYBRID" not in s.name]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def wrap(model, **settings):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **settings)


def check_gradients(make, run, **settings):
    """`run(model)` gives the losses of a step; its gradients under minifsdp and without."""
    torch.manual_seed(0)
    plain = make().to(device())
    torch.manual_seed(0)
    model = wrap(make().to(device()), **settings)
    for _ in range(2):  # a second step finds what the first has left behind
        for param in model.parameters():
            param.grad = None
        losses = run(model)
        sum(losses).backward()
        expected = mean_gradients(plain, *run(plain))
        found = gathered_gradients(model)
        for name in set(found) - set(expected):  # a flat gradient covers what was not used, too
            assert not found.pop(name).any()
        assert_same_gradients(found, expected)
        check_at_rest(model)


# ----------------------------------------------------------------------------- kinds of outputs

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    value: torch.Tensor
    more: list


class Plain:
    def __init__(self, value):
        self.value = value


SHAPES = {
    "tensor": (lambda t: t, lambda o: o),
    "tuple": (lambda t: (1, t), lambda o: o[1]),
    "list of dicts": (lambda t: [{"a": None, "b": t}], lambda o: o[0]["b"]),
    "ordered dict": (lambda t: OrderedDict(x=(t,)), lambda o: o["x"][0]),
    "named tuple": (lambda t: Pair("text", [t]), lambda o: o.second[0]),
    "dataclass": (lambda t: Record(t.detach(), [t]), lambda o: o.more[0]),
    "plain object": (lambda t: Plain({"deep": Plain(t)}), lambda o: o.value["deep"].value),
}


class Shaped(Block):
    shape = "tensor"

    def forward(self, x):
        return SHAPES[self.shape][0](super().forward(x))


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(2)
def test_outputs_of_any_shape_bring_their_unit_back(shape):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Shaped(nn.Linear(6, 6), nn.LayerNorm(6))
            self.block.shape = shape

        def forward(self, x):
            return SHAPES[shape][0](SHAPES[shape][1](self.block(x)) * 2)

    torch.manual_seed(0)
    plain = Model().to(device())
    torch.manual_seed(0)
    model = FSDP(Model().to(device()), auto_wrap_policy=ModuleWrapPolicy({Shaped}))
    out = SHAPES[shape][1]
    out(model(batch())).pow(2).sum().backward()
    expected = mean_gradients(plain, out(plain(batch())).pow(2).sum())
    assert_same_gradients(gathered_gradients(model), expected)


# ------------------------------------------------------------------------- unusual steps, all right


@every_strategy
@on_ranks(2)
def test_two_forwards_then_one_backward(strategy):
    check_gradients(
        layers,
        lambda m: [m(batch(step=i)).pow(2).sum() for i in range(2)],
        sharding_strategy=strategy,
    )


@on_ranks(2)
def test_a_childs_output_then_an_ordinary_step():
    """torch's FSDP1 gets the second step wrong, without a word."""
    torch.manual_seed(0)
    plain = Aside().to(device())
    torch.manual_seed(0)
    model = wrap(Aside().to(device()))
    model(batch())
    model.kept.sum().backward()
    model.zero_grad()

    for m in (model.module, plain):
        m.forward = lambda x, m=m: m.last(m.stage(m.norm(m.first(x))))
    step(model)
    assert_same_gradients(
        gathered_gradients(model), mean_gradients(plain, plain(batch()).pow(2).sum())
    )


@on_ranks(2)
def test_a_child_called_before_and_without_its_root():
    model, plain = stack(), layers()
    with torch.no_grad():
        model.module[1](batch())
    loss = model.module[2](batch()).pow(2).sum()
    loss.backward()
    found = gathered_gradients(model)
    expected = mean_gradients(plain, plain[2](batch()).pow(2).sum())
    assert_same_gradients(found, expected)
    model.zero_grad()
    step(model)
    assert_same_gradients(
        gathered_gradients(model), mean_gradients(plain, plain(batch()).pow(2).sum())
    )


class Skipping(nn.Module):
    """Returns two tensors; the first unit's parameters matter for one of them only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            Block(nn.Linear(6, 6), nn.LayerNorm(6)),
            Block(nn.Linear(6, 6), nn.LayerNorm(6)),
        )

    def forward(self, x):
        return self.a(x), self.b(x)


@pytest.mark.parametrize("used", [0, 1])
@on_ranks(2)
def test_an_output_that_the_loss_does_not_use(used):
    check_gradients(Skipping, lambda m: [m(batch())[used].pow(2).sum()])


@on_ranks(2)
def test_inputs_with_gradients_get_them():
    model, plain, x = stack(), layers(), batch().requires_grad_()
    model(x).pow(2).sum().backward()
    found, x.grad = x.grad, None
    plain(x).pow(2).sum().backward()
    assert torch.equal(found, x.grad)  # not averaged: each rank's inputs are its own


@on_ranks(2)
def test_gradients_of_inputs_alone_leave_nothing_behind():
    model, plain, x = stack(), layers(), batch().requires_grad_()
    (found,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    (expected,) = torch.autograd.grad(plain(x).pow(2).sum(), x)
    assert torch.equal(found, expected)
    check_at_rest(model)
    step(model)
    assert_same_gradients(
        gathered_gradients(model), mean_gradients(plain, plain(batch()).pow(2).sum())
    )


@on_ranks(2)
def test_a_frozen_unit_is_freed_when_its_backward_is_over():
    frozen = layers(3)
    for block in frozen[1:]:
        block.requires_grad_(False)
    model = wrap(frozen)
    seen = []

    def note(*_):
        seen.append([unit.name for unit in model.engine.units if storage(unit)])

    model.module[1].module[0].register_full_backward_hook(note)
    step(model)
    # Unit 1's backward runs: 2 and 3, frozen and done with, are gone, and so is the root.
    assert seen == [["1"]]
    check_at_rest(model)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@every_strategy
@on_ranks(2)
def test_activation_checkpointing(strategy, inside, reentrant):
    class Recomputed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            kind = Recomputed if inside else Block
            self.first = nn.Linear(6, 6)
            self.blocks = nn.ModuleList(
                kind(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(3)
            )

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x) if inside else checkpoint(block, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    plain = Model().to(device())
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(Model().to(device()), auto_wrap_policy=policy, sharding_strategy=strategy)
    for _ in range(2):
        model.zero_grad()
        step(model)
        assert_same_gradients(
            gathered_gradients(model), mean_gradients(plain, plain(batch()).pow(2).sum())
        )
        check_at_rest(model)


@on_ranks(2)
def test_what_is_run_again_after_an_inference_finds_its_own_views():
    class Recomputed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def run(model):
        loss = model(batch()).pow(2).sum()
        with torch.inference_mode():
            model(batch(step=1))
        return [loss]

    check_gradients(lambda: nn.Sequential(nn.Linear(6, 6), Recomputed(nn.Linear(6, 6))), run)


@on_ranks(2)
def test_a_recomputation_that_goes_to_the_end_does_not_free_its_unit():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.block = Block(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))

        def forward(self, x):
            with set_checkpoint_early_stop(False):
                return checkpoint(self.block, self.first(x), use_reentrant=False)

    check_gradients(Model, lambda m: [m(batch()).pow(2).sum()])


@on_ranks(2)
def test_one_checkpoint_around_several_units():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.pair = nn.Sequential(
                Block(nn.Linear(6, 6), nn.LayerNorm(6)), Block(nn.Linear(6, 6))
            )

        def forward(self, x):
            return checkpoint(self.pair, self.first(x), use_reentrant=False)

    check_gradients(Model, lambda m: [m(batch()).pow(2).sum()])


@pytest.mark.parametrize("reshard", [STRATEGIES[0], STRATEGIES[1]])
@on_ranks(2)
def test_a_checkpoint_that_only_some_ranks_run_again(reshard):
    """Its forward gathers for itself, but nobody else would take part now."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Block(nn.Linear(6, 6)), nn.Linear(6, 6)
            self.a, self.b, self.dropped = (Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

        def aside(self, x):
            x = self.b(self.a(x))
            self.dropped(x)
            return self.b(x)

        def forward(self, x):
            x = self.first(x)
            return self.last(x).sum(), checkpoint(self.aside, x, use_reentrant=False).sum()

    torch.manual_seed(0)
    plain = Model().to(device())
    torch.manual_seed(0)
    model = wrap(Model().to(device()), sharding_strategy=reshard)
    for _ in range(2):
        model.zero_grad()
        with set_checkpoint_early_stop(False):
            model(batch())[dist.get_rank()].backward()
        losses = list(plain(batch()))
        losses[1 - dist.get_rank()] *= 0  # DistributedDataParallel's way
        assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *losses))
        check_at_rest(model)


@on_ranks(2)
def test_units_without_parameters_may_run_again_on_some_ranks_only():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.empty = Block(nn.Linear(6, 6)), Block(nn.Tanh())

        def forward(self, x):
            x = self.first(x)
            return x.sum(), checkpoint(self.empty, x, use_reentrant=False).sum()

    model = wrap(Model().to(device()))
    for _ in range(2):
        model(batch())[dist.get_rank()].backward()
        check_at_rest(model)


class Checkpointed(nn.Module):
    """Units that run again in their backward, one by one or two at a time."""

    def __init__(self, together):
        super().__init__()
        self.first, self.together = nn.Linear(6, 6), together
        self.blocks = nn.ModuleList(Block(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for at in range(0, 4, self.together):
            run = nn.Sequential(*self.blocks[at : at + self.together])
            x = checkpoint(run, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("prefetch", ForwardPrefetch)
@pytest.mark.parametrize("together", [1, 2])
@on_ranks(2)
def test_what_runs_again_in_a_backward_is_no_part_of_the_forwards_order(together, prefetch):
    """A backward gathers the same, whatever a forward prefetches; and the next forward knows what
    comes next."""
    logs = []
    for forward in (None, prefetch):
        model = wrap(
            Checkpointed(together).to(device()), backward_prefetch=None, forward_prefetch=forward
        )
        for at in range(3):
            with watch(model) as log:
                loss = model(batch(step=at)).sum()
                forward_log = list(log)
                log.clear()
                loss.backward()
        logs.append(log)
    assert logs[0] == logs[1]
    ahead = {
        ForwardPrefetch.FORWARD_PRE: "+root +0 +1 -0 +2 -1 +3 -2 -3",
        ForwardPrefetch.FORWARD_POST: "+root +0 -0 +1 -1 +2 -2 +3 -3",
    }
    assert " ".join(forward_log).replace("blocks.", "") == ahead[prefetch]
    mistargets = model.engine.prefetcher.stats.mistargets
    assert not any(mistargets.values()), mistargets


@on_ranks(2)
def test_what_was_gathered_for_a_forward_that_did_not_come_is_freed_at_the_end():
    model = FSDP(Twofold(), forward_prefetch=True)
    for order in ("abc", "abc", "ab"):
        model.module.order = order
        with watch(model) as log:
            model(batch())
    assert log == ["+a", "+b", "-a", "+c", "-b", "-c"]
    assert model.engine.stats.unsharded_units == 0


@every_strategy
@on_ranks(2)
def test_after_an_evaluation_nothing_is_kept(strategy):
    """Also of units that need gradients in it, as models do that compute forces."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy, self.last = Block(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)

        def forward(self, x):
            with torch.enable_grad():
                energy = self.energy(x.detach().requires_grad_())
            return self.last(energy)

    model = wrap(Forces().to(device()), sharding_strategy=strategy)
    with torch.no_grad():
        model(batch())
    assert model.engine.stats.unsharded_units == 0


@every_strategy
@on_ranks(2)
def test_a_call_without_gradients_leaves_the_unit_to_a_backward_that_needs_it(strategy):
    """A consistency loss: the same unit once more, without gradients. Where a checkpoint runs both
    again, the backward of the first is under way, and computes with what the second would free."""

    class Consistent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(6, 6), Block(nn.Linear(6, 6), nn.LayerNorm(6))

        def both(self, x):
            y = self.block(x)
            with torch.no_grad():
                target = self.block(x * 1.1)
            return y + target  # of which nothing is saved, so that it runs again inside of `y`

        def forward(self, x):
            with set_checkpoint_early_stop(False):
                return checkpoint(self.both, self.first(x), use_reentrant=False)

    check_gradients(Consistent, lambda m: [m(batch()).pow(2).sum()], sharding_strategy=strategy)


@on_ranks(2)
def test_the_outermost_module_that_is_called_casts_what_it_is_given():
    """Be it the root, a unit inside of it, or the root inside of a checkpoint's recomputation."""
    low = MixedPrecision(torch.bfloat16)
    model, plain = stack(mixed_precision=low), layers().to(torch.bfloat16)
    for m, p in ((model, plain), (model.module[1], plain[1]), (model.module[2:], plain[2:])):
        x = batch().requires_grad_()
        assert torch.equal(m(x), p(x.to(torch.bfloat16)))
    checkpoint(model, x, use_reentrant=False).sum().backward()
    expected = mean_gradients(plain, plain(batch().to(torch.bfloat16)).sum())
    found = gathered_gradients(model)
    assert all(torch.equal(found[name], grad.float()) for name, grad in expected.items())


# --------------------------------------------------------------------------- exceptions, and after


class Boom(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Boom.armed:
            raise ValueError("boom in backward")
        return grad


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.fails = nn.Linear(6, 6), False
        self.a, self.b = Block(nn.Linear(6, 6), nn.LayerNorm(6)), Block(nn.Linear(6, 6))
        self.inner = Block(Boundary())

    def forward(self, x):
        x = self.a(self.first(x))
        x = Boom.apply(self.inner(x))
        return self.b(x)


class Boundary(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("boom in forward")
        return super().forward(x)


def fragile(strategy):
    torch.manual_seed(0)
    plain = Fragile().to(device())
    torch.manual_seed(0)
    return wrap(Fragile().to(device()), sharding_strategy=strategy, forward_prefetch=True), plain


def check_training_goes_on(model, plain, steps=3):
    pair = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    for at in range(steps):
        for optimizer in pair:
            optimizer.zero_grad()
        step(model, at)
        expected = mean_gradients(plain, plain(batch(step=at)).pow(2).sum())
        assert_same_gradients(gathered_gradients(model), expected)
        check_at_rest(model)
        for optimizer in pair:
            optimizer.step()


@every_strategy
@on_ranks(2)
def test_an_exception_in_forward_then_training_goes_on(strategy):
    model, plain = fragile(strategy)
    boundary = model.inner.module[0]
    step(model)
    boundary.fails = True
    with pytest.raises(ValueError, match="boom in forward"):
        model(batch())
    check_at_rest(model)
    found = full_parameters(model)
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
    boundary.fails = False
    check_training_goes_on(model, plain)


@on_ranks(2)
def test_a_forward_that_died_halfway_does_not_say_what_comes_next():
    model, logs = stack(3, forward_prefetch=True), []
    for at in range(4):
        handle = model.module[2].register_forward_hook(interrupt) if at == 2 else None
        with watch(model) as log, suppress(InterruptedError):
            model(batch(step=at))
        logs.append(" ".join(log))
        if handle is not None:
            handle.remove()
    assert logs[1] == "-root +root +1 +2 -1 +3 -2 -3" == logs[3].replace("+root", "-root +root")


def interrupt(*_):
    raise InterruptedError


@on_ranks(2)
def test_a_child_that_fails_may_be_left_out_by_its_parent():
    class Tolerant(Fragile):
        def forward(self, x):
            x = self.a(self.first(x))
            with suppress(ValueError):
                x = self.inner(x)
            return self.b(x)

    torch.manual_seed(0)
    plain = Tolerant().to(device())
    torch.manual_seed(0)
    model = wrap(Tolerant().to(device()))
    for m in (model, plain):
        next(b for b in m.modules() if isinstance(b, Boundary)).fails = True
    step(model)
    assert_same_gradients(
        gathered_gradients(model), mean_gradients(plain, plain(batch()).pow(2).sum())
    )
    check_at_rest(model)


# --------------------------------------------------------------------- refused, and how it is said


@on_ranks(2)
def test_a_parameter_that_leaves_its_unit_keeps_its_memory_and_that_is_said_once():
    class Leaky(Block):
        def forward(self, x):
            return self[0](x), self[0].weight

    module = nn.Sequential(Leaky(nn.Linear(6, 6))).to(device())
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Leaky}))
    with FSDP.summon_full_params(model):
        expected = model.module[0].module[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="a parameter of unit '0' is still referred to"):
        _, weight = model(batch())
    assert model.engine.stats.unsharded_units == 0 and not any(map(storage, model.engine.units))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, again = model(batch())
    for leaked in (weight, again):
        assert torch.equal(leaked, expected)


@on_ranks(2)
def test_a_penalty_on_gradients_of_the_input_keeps_the_memory_and_that_is_said():
    model, plain = stack(2), layers(2)
    x = batch().requires_grad_()

    def penalty(m):
        (grad,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return grad.norm(2)

    with pytest.warns(UserWarning, match=r"parameter of unit '1' .*graph of .*create_graph=True"):
        penalty(model).backward()
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, penalty(plain)))
    assert model.engine.stats.unsharded_units == 0 and not any(map(storage, model.engine.units))


@on_ranks(2)
def test_the_root_may_return_a_parameter():
    class Penalized(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    torch.manual_seed(0)
    plain = Penalized(6, 6).to(device())
    torch.manual_seed(0)
    model = FSDP(Penalized(6, 6).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for at in range(3):
        model.zero_grad()
        sum(out.pow(2).sum() for out in model(batch(step=at))).backward()
        expected = mean_gradients(plain, *[out.pow(2).sum() for out in plain(batch(step=at))])
        assert_same_gradients(gathered_gradients(model), expected)
        optimizer.step()
        reference.step()


class Aside(nn.Module):
    """Keeps what a unit inside has returned; its own output may not need a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.stage = Block(nn.Linear(6, 6), nn.LayerNorm(6), Block(nn.Linear(6, 6)))
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        self.kept = self.stage(self.norm(self.first(x)))
        return self.last(self.kept).detach()


# ------------------------------------------------------------------------------------ what overlaps


class Noted(CpuStream):
    """Notes when what is submitted begins and when somebody has waited for its end."""

    def __init__(self, log):
        self.log = log

    def submit(self, launch, label=""):
        def noted():
            self.log.append(f"start {label}")
            finish = launch()
            return lambda: (finish(), self.log.append(f"end {label}"))[0]

        return super().submit(noted, label)


@on_ranks(2)
def test_the_next_gather_is_under_way_when_the_host_waits_for_this_one():
    """In the forward and in the backward. Else only one could be hidden by each computation."""
    if device().type == "cuda":
        pytest.skip("the streams are placeholders")
    log = []

    def make(where):
        return Streams(where, CpuStream(), Noted(log), *(CpuStream() for _ in range(4)))

    with patch.dict(streams.BACKENDS, cpu=make):
        model = stack(3, forward_prefetch=True)
        for at in range(2):
            log.clear()
            step(model, at)
    gathers = [entry for entry in log if "all-gather" in entry]
    forward, backward = gathers[:8], gathers[8:]
    for half, order in ((forward, "123"), (backward, "321")):
        for this, following in pairwise(order):
            assert half.index(f"start all-gather '{following}'") < half.index(
                f"end all-gather '{this}'"
            )
