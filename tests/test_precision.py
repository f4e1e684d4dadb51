"""precision.py: small numbers to compute and send with, exact ones to keep."""

import copy
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from operator import not_

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp import (
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm import collectives
from tests.parity import check_at_rest, grid
from tests.ranks import device, on_ranks, run
from tests.small import Block, batch, layers, replaced, stack, step, travels

EXACT, LOW, HALF = torch.float32, torch.bfloat16, torch.float16
BF16 = MixedPrecision(LOW)
STRATEGIES = list(ShardingStrategy)


def mixed(strategy=ShardingStrategy.FULL_SHARD, precision=BF16, **settings) -> FSDP:
    mesh = grid(strategy) if "HYBRID" in strategy.name else None
    return stack(
        sharding_strategy=strategy, mixed_precision=precision, device_mesh=mesh, **settings
    )


@contextmanager
def sent():
    """What goes over the network: how often which collective, and with which dtype."""
    log = Counter()

    def noted(name):
        def change(method):
            def wrapper(comm, unit, tensor, *others):
                log[name, tensor.dtype] += 1
                return method(comm, unit, tensor, *others)

            return wrapper

        return change

    def halves(tensor, *others):
        log["reduce", tensor.dtype] += 1
        return all_reduce(tensor, *others)

    all_reduce = collectives.all_reduce
    with (
        travels("all_gather", noted("gather")),
        travels("reduce_scatter", noted("scatter")),
        travels("all_reduce", noted("reduce")),
        replaced(all_reduce, halves),
    ):
        yield log


# ------------------------------------------------------------------------------------- the dtypes


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_shards_and_their_gradients_are_exact_and_what_is_computed_with_is_not(strategy):
    model, seen = mixed(strategy), []
    model.module[2].module[0].register_forward_pre_hook(
        lambda linear, args: seen.append((linear.weight.dtype, args[0].dtype))
    )
    out = model(batch())
    assert out.dtype is LOW and seen == [(LOW, LOW)]
    out.sum().backward()
    for unit in model.engine.units:
        assert (
            unit.sharded_flat_param.dtype
            is unit.sharded_flat_param.grad.dtype
            is unit.padded_shard.dtype
            is EXACT
        )
        assert unit.unsharded.flat_param.dtype is LOW
    check_at_rest(model)


@pytest.mark.parametrize("precision, gathered, reduced", [
    (MixedPrecision(), EXACT, EXACT),
    (MixedPrecision(LOW), LOW, LOW),
    (MixedPrecision(LOW, EXACT), LOW, EXACT),
    (MixedPrecision(None, LOW), EXACT, LOW),
    (MixedPrecision(LOW, HALF), LOW, HALF),
], ids=str)  # fmt: skip
@on_ranks(2)
def test_gathers_and_reductions_send_what_they_are_told_to(precision, gathered, reduced):
    with sent() as log:
        step(mixed(precision=precision))
    assert log == {("gather", gathered): 9, ("scatter", reduced): 5}


@pytest.mark.parametrize("reduce_dtype", [None, EXACT], ids=str)
@on_ranks(4)
def test_replicas_add_up_in_the_reduce_dtype_too(reduce_dtype):
    with sent() as log:
        step(mixed(ShardingStrategy.HYBRID_SHARD, MixedPrecision(LOW, reduce_dtype)))
    dtype = reduce_dtype or LOW
    assert log == {("gather", LOW): 9, ("scatter", dtype): 5, ("reduce", dtype): 5}


@on_ranks(2)
def test_parameters_that_are_not_sharded_are_cast_without_a_word_to_anybody():
    model = mixed(ShardingStrategy.NO_SHARD)
    with sent() as log:
        step(model)
    assert log == {("reduce", LOW): 5}
    unit = model.engine.units[1]
    assert (
        unit.unsharded.needs_unshard
        and unit.unsharded.flat_param.data_ptr() != unit.sharded_flat_param.data_ptr()
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_whole_parameters_and_state_dicts_are_exact(strategy):
    model = mixed(strategy)
    step(model)
    expected = layers().state_dict()
    with FSDP.summon_full_params(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]) and param.dtype is EXACT
    state = model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert model(batch()).dtype is LOW


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.ones(6))
        self.register_buffer("count", torch.tensor(300))
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))

    def forward(self, x):
        return self.linear(x) * self.table * self.mask


@pytest.mark.parametrize("dtype", [None, LOW, HALF], ids=str)
@on_ranks(1)
def test_floating_point_buffers_are_cast_and_others_are_not(dtype):
    model = FSDP(Buffered().to(device()), mixed_precision=MixedPrecision(buffer_dtype=dtype))
    model(batch())
    inside = model.module
    assert inside.table.dtype is (dtype or EXACT)
    assert inside.count.dtype is torch.int64 and inside.mask.dtype is torch.bool


@on_ranks(1)
def test_buffers_are_saved_shown_and_loaded_in_the_dtype_that_they_had_at_wrapping():
    model = FSDP(Buffered().to(device()), mixed_precision=MixedPrecision(buffer_dtype=LOW))
    module, loss = model.module, model(batch()).sum()
    state = model.state_dict()
    assert state["table"].dtype is EXACT and module.table.dtype is LOW
    with FSDP.summon_full_params(model, writeback=False):
        assert module.table.dtype is EXACT
    loss.backward()  # which does not mind that it was saved in between
    state["table"] *= 2
    model.load_state_dict(state)
    assert module.table.dtype is LOW and module.table.tolist() == [2] * 6


class Shift(nn.Module):
    """Has integers that bfloat16 would round: 301 to 302."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.arange(300, 306), requires_grad=False)

    def forward(self, x):
        return x.roll(int(self.by[1]), 1)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_integer_parameters_are_not_cast(strategy, keep):
    precision = MixedPrecision(LOW, cast_forward_inputs=True, keep_low_precision_grads=keep)
    mesh = grid(strategy) if "HYBRID" in strategy.name else None
    shift = FSDP(
        Shift().to(device()),
        sharding_strategy=strategy,
        mixed_precision=precision,
        device_mesh=mesh,
    )
    x = batch()
    assert torch.equal(shift(x), x.roll(301, 1))
    assert torch.equal(FSDP(nn.Sequential(shift), mixed_precision=BF16)(x), x.roll(301, 1).to(LOW))


# ------------------------------------------------------------------------- the same numbers as DDP


def check_parity(strategy, precision, offload):
    """Against exact parameters by hand: cast, computed with, gradients averaged, stepped. With one
    or two ranks equal in every bit."""
    model = mixed(strategy, precision, cpu_offload=offload)
    exact = layers()
    low = copy.deepcopy(exact).to(precision.param_dtype)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, exact)]
    for at in range(3):
        found = step(model, at)
        for param, master in zip(low.parameters(), exact.parameters(), strict=True):
            param.data.copy_(master)
            param.grad = None
        expected = low(batch(step=at).to(precision.param_dtype)).pow(2).sum()
        expected.backward()
        assert torch.equal(found, expected)
        for param, master in zip(low.parameters(), exact.parameters(), strict=True):
            grad = param.grad.to(precision.reduce_dtype or param.dtype) / dist.get_world_size()
            dist.all_reduce(grad)
            master.grad = grad.to(EXACT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offload", [None, CPUOffload(True)], ids=["", "offload"])
@pytest.mark.parametrize("low", [LOW, HALF], ids=str)
@pytest.mark.parametrize("reduce_dtype", [None, EXACT], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numbers_are_those_of_a_cast_model_with_exact_parameters(
    strategy, reduce_dtype, low, offload, world_size
):
    run(check_parity, world_size, strategy, MixedPrecision(low, reduce_dtype), offload)


@on_ranks(2)
def test_several_forwards_add_up_in_the_low_dtype_as_in_any_module():
    model, low = mixed(), layers().to(LOW)
    (model(batch(step=1)) * model(batch(step=2))).sum().backward()
    (low(batch(step=1).to(LOW)) * low(batch(step=2).to(LOW))).sum().backward()
    expected = low[0].weight.grad / 2
    dist.all_reduce(expected)
    with FSDP.summon_full_params(model, with_grads=True):
        assert torch.equal(model.module[0].weight.grad, expected.float())


@on_ranks(2)
def test_gradients_of_several_backwards_add_up_exactly():
    """256 + 1 in bfloat16 is 256."""
    model = FSDP(nn.Linear(1, 1, bias=False).to(device()), mixed_precision=BF16)
    for factor in (256.0, 1.0):
        model(torch.full((1, 1), factor, device=device())).sum().backward()
    grads = [unit.sharded_flat_param.grad.tolist() for unit in model.engine.units]
    assert grads == [[257.0] if dist.get_rank() == 0 else []]


# ------------------------------------------------------------------------- low-precision gradients

KEEP = MixedPrecision(LOW, keep_low_precision_grads=True)


@pytest.mark.parametrize("offload", [None, CPUOffload(True)], ids=["", "offload"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_may_stay_low_and_an_optimizer_can_step_with_them(strategy, offload):
    model = mixed(strategy, KEEP, cpu_offload=offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [unit.sharded_flat_param.detach().clone() for unit in model.engine.units]
    step(model)
    step(model, 1)
    model.clip_grad_norm_(1.0)
    optimizer.step()
    for unit, its_before in zip(model.engine.units, before, strict=True):
        assert unit.sharded_flat_param.grad.dtype is LOW and unit.sharded_flat_param.dtype is EXACT
        expected = its_before.add(unit.sharded_flat_param.grad, alpha=-0.1)
        assert torch.equal(unit.sharded_flat_param, expected)


@on_ranks(1)
def test_kept_as_they_are_they_follow_a_cast_of_the_model():
    model = mixed(precision=MixedPrecision(keep_low_precision_grads=True)).double()
    model(batch().double()).sum().backward()
    assert model.engine.root.sharded_flat_param.grad.dtype is torch.float64


@on_ranks(2)
def test_low_gradients_may_wait_and_may_be_reduced_in_full():
    precision = MixedPrecision(LOW, EXACT, keep_low_precision_grads=True)
    model = mixed(precision=precision)
    with model.no_sync():
        step(model)
    with sent() as log:
        step(model)
    assert log["scatter", EXACT] == 5
    assert all(unit.sharded_flat_param.grad.dtype is LOW for unit in model.engine.units)


# ------------------------------------------------------------------------------ inputs and outputs


@dataclass
class Inputs:
    x: Tensor
    index: Tensor


class Looks(nn.Module):
    """Notes what it is given."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(6, 6), []

    def forward(self, nest, *, more=None):
        x, inputs = nest["pair"]
        self.seen.append((x.dtype, inputs.x.dtype, inputs.index.dtype))
        self.seen.append(None if more is None else more.dtype)
        return self.linear(x.to(self.linear.weight.dtype))


def nest():
    return {"pair": (batch(), Inputs(batch(), torch.zeros(1, dtype=torch.long, device=device())))}


@pytest.mark.parametrize("casts, expected", [(True, LOW), (False, EXACT)], ids=str)
@on_ranks(1)
def test_the_roots_inputs_are_cast_wherever_they_are(casts, expected):
    precision = MixedPrecision(LOW, cast_root_forward_inputs=casts)
    model = FSDP(Looks().to(device()), mixed_precision=precision)
    given = nest()
    model(given, more=batch())
    assert model.module.seen == [(expected, expected, torch.long), expected]
    assert given["pair"][0].dtype is EXACT and given["pair"][1].x.dtype is EXACT


@pytest.mark.parametrize("casts, expected", [(True, LOW), (False, EXACT)], ids=str)
@on_ranks(1)
def test_a_units_inputs_are_cast_if_it_says_so(casts, expected):
    class Around(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def forward(self, x):
            return self.inside({"pair": (x.float(), Inputs(x.float(), x.long()))}, more=x.float())

    inside = FSDP(Looks(), mixed_precision=MixedPrecision(LOW, cast_forward_inputs=casts))
    model = FSDP(Around(inside).to(device()), mixed_precision=BF16)
    model(batch())
    assert inside.module.seen == [(expected, expected, torch.long), expected]


@on_ranks(1)
def test_inputs_are_not_cast_where_no_dtype_was_asked_for():
    """A wrong dtype is the user's to hear of, as from any module."""
    with pytest.raises(RuntimeError, match="same dtype"):
        stack()(batch().double())


@on_ranks(1)
def test_a_unit_that_casts_its_inputs_to_compute_low_gives_low_outputs():
    low = MixedPrecision(LOW, cast_forward_inputs=True)
    inside = FSDP(nn.Linear(6, 6).to(device()), mixed_precision=low)
    seen = watch_dtypes(inside)
    FSDP(nn.Sequential(inside))(batch())
    assert seen == [(EXACT, LOW)]


@on_ranks(2)
def test_gradients_of_inputs_come_back_in_the_inputs_dtype():
    model, low = mixed(), layers().to(LOW)
    x, same = batch().requires_grad_(), batch().requires_grad_()
    model(x).sum().backward()
    low(same.to(LOW)).sum().backward()
    assert x.grad.dtype is EXACT and torch.equal(x.grad, same.grad)


@on_ranks(2)
def test_a_checkpoint_around_the_root_casts_again_what_it_runs_again():
    model, x, same = mixed(), batch().requires_grad_(), batch().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    mixed()(same).sum().backward()
    assert x.grad.dtype is EXACT and torch.equal(x.grad, same.grad)


@on_ranks(1)
def test_what_is_right_already_is_not_copied():
    model, seen = mixed(), []
    model.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = batch().to(LOW)
    model(x)
    exact = stack()
    exact.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    y = batch().double().float()
    exact(y)
    assert seen[0] is x and seen[1] is y


@pytest.mark.parametrize("own", [True, False])
@on_ranks(2)
def test_a_root_without_parameters_of_its_own_casts_its_inputs(own):
    inside = [nn.Linear(6, 6)] * own + [Block(nn.Linear(6, 6))]
    model = nn.Sequential(*inside).to(device())
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=BF16)
    assert step(model).dtype is LOW


# ------------------------------------------------------ units in full precision among others


def normalized(*norms: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for norm in norms for m in (nn.Linear(6, 6), norm)]
    return nn.Sequential(*parts, Block(nn.Linear(6, 6))).to(device())


def watch_dtypes(module: nn.Module) -> list:
    seen = []
    module.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    return seen


def policies():
    return {
        "of others": ModuleWrapPolicy({Block}),
        "of all": always_wrap_policy,
        "of it": ModuleWrapPolicy({nn.BatchNorm1d}),
    }


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("buffer_dtype", [None, LOW], ids=str)
@on_ranks(2)
def test_batch_norm_is_a_unit_in_full_precision(buffer_dtype, policy):
    norm = nn.BatchNorm1d(6)
    model = normalized(norm)
    inside, outside = watch_dtypes(norm), watch_dtypes(model[2])
    model = FSDP(
        model,
        auto_wrap_policy=policies()[policy],
        mixed_precision=MixedPrecision(LOW, buffer_dtype=buffer_dtype),
    )
    step(model)
    assert inside == [(EXACT, EXACT)] and outside == [(LOW, LOW)]
    assert norm.running_mean.dtype is EXACT
    unit = model.module[1]._unit
    assert unit.unsharded.flat_param.dtype is unit.sharded_flat_param.grad.dtype is EXACT


@on_ranks(2)
def test_batch_norm_is_left_alone_where_it_is_not_to_be_ignored():
    norm = nn.BatchNorm1d(6)
    precision = MixedPrecision(LOW, buffer_dtype=LOW, _module_classes_to_ignore=())
    policy = ModuleWrapPolicy({Block})
    model = FSDP(normalized(norm), auto_wrap_policy=policy, mixed_precision=precision)
    inside = watch_dtypes(norm)
    step(model)
    assert inside == [(LOW, LOW)] and len(model.engine.units) == 2


@on_ranks(2)
def test_other_norms_are_in_full_precision_by_a_policy():
    norm = nn.LayerNorm(6)
    model = normalized(norm)
    inside, outside = watch_dtypes(norm), watch_dtypes(model[2])

    def settings(module):
        if isinstance(module, nn.LayerNorm):
            return {"mixed_precision": MixedPrecision(cast_forward_inputs=True)}
        return isinstance(module, Block)

    model = FSDP(model, auto_wrap_policy=CustomPolicy(settings), mixed_precision=BF16)
    step(model)
    assert inside == [(EXACT, EXACT)] and outside == [(LOW, LOW)]


@on_ranks(1)
def test_the_outputs_of_full_precision_have_the_dtype_of_its_inputs():
    in_full = FSDP(nn.Identity(), mixed_precision=MixedPrecision(cast_forward_inputs=True))
    low, half, exact, index = (torch.ones(1, dtype=d) for d in (LOW, HALF, EXACT, torch.long))

    def out(*inputs):
        return [tensor.dtype for tensor in in_full(inputs)]

    assert out(low) == [LOW] and out(low, index) == [LOW, torch.long]
    assert out(exact) == [EXACT] and out(low, exact) == [LOW, LOW]
    assert out(low, half) == [EXACT, EXACT]  # no way to tell which of the two


# -------------------------------------------------------------------------------------- evaluation

EXACT_EVAL = MixedPrecision(LOW, buffer_dtype=LOW, full_precision_in_eval=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_an_evaluation_may_be_exact(strategy):
    model, x = mixed(strategy, EXACT_EVAL), batch()
    step(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), layers()(x))
    model.train()
    assert model(x).dtype is LOW


@on_ranks(1)
def test_it_is_not_unless_asked_for():
    model = mixed()
    assert model.eval()(batch()).dtype is LOW


@on_ranks(1)
def test_buffers_are_exact_in_such_an_evaluation_and_cast_again_after_it():
    model = FSDP(Buffered().to(device()), mixed_precision=EXACT_EVAL)
    dtypes = []
    for training in (True, False, True):
        model.train(training)(batch())
        dtypes.append(model.module.table.dtype)
    assert dtypes == [LOW, EXACT, LOW]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grad", [False, True])
@on_ranks(2)
def test_an_evaluation_may_come_between_a_forward_and_its_backward(grad, strategy):
    model, undisturbed = mixed(strategy, EXACT_EVAL), mixed(strategy)
    loss, expected = (m(batch()).pow(2).sum() for m in (model, undisturbed))
    model.eval()
    with torch.set_grad_enabled(grad):
        assert model(batch(step=1)).dtype is EXACT
    model.train()
    loss.backward()
    expected.backward()
    for unit, its_twin in zip(model.engine.units, undisturbed.engine.units, strict=True):
        assert torch.equal(unit.sharded_flat_param.grad, its_twin.sharded_flat_param.grad)
    check_at_rest(model)


class NoElements(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 6))

    def forward(self, x):
        return torch.cat([x, x @ self.weight.T], 1)


@pytest.mark.parametrize("in_rows", [False, True])
@on_ranks(2)
def test_parameters_without_elements_may_be_looked_at_between_a_forward_and_its_backward(in_rows):
    settings = {"mixed_precision": BF16, "use_orig_params": in_rows}
    module = nn.Sequential(NoElements(), nn.Linear(6, 6))
    policy = ModuleWrapPolicy({NoElements})
    model = FSDP(module.to(device()), auto_wrap_policy=policy, **settings)
    loss = model(batch()).sum()
    with FSDP.summon_full_params(model, writeback=False):
        assert model.module[0].weight.dtype is EXACT
    loss.backward()
    check_at_rest(model)


@on_ranks(1)
def test_what_a_checkpoint_runs_again_after_an_evaluation_finds_its_buffers_as_they_were():
    class Checkpointed(Buffered):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model, grads = Checkpointed().to(device()), []
    model.table /= 3
    model = FSDP(model, mixed_precision=EXACT_EVAL)
    start = model.state_dict()
    for evaluates in (False, True):
        model.load_state_dict(start)
        model.zero_grad()
        loss = model.train()(batch()).sum()
        if evaluates:
            model.eval()(batch())
            assert model.module.table.dtype is EXACT
        loss.backward()
        grads.append(model.engine.root.sharded_flat_param.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("low", [(1, 0), (0, 1), (0, 1, 0), (1, 0, 1), (0, 1, 0, 1), (1, 0, 0, 1)])
@on_ranks(2)
def test_one_backward_may_go_through_exact_forwards_and_low_ones(low, strategy):
    sums = []
    for together in (True, False):
        model = mixed(strategy, EXACT_EVAL)
        losses = [
            model.train(bool(is_low))(batch(step=at)).float().pow(2).sum()
            for at, is_low in enumerate(low)
        ]
        # One backward adds the gradients of low forwards in the low precision.
        by_precision = [sum(compress(losses, which)) for which in (low, map(not_, low))]
        for loss in [sum(losses)] if together else by_precision:
            loss.backward()
        check_at_rest(model)
        sums.append([unit.sharded_flat_param.grad for unit in model.engine.units])
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_so_it_may_through_one_from_before_another_backward():
    sums = []
    for together in (True, False):
        model = mixed(precision=EXACT_EVAL)
        before = model.eval()(batch()).pow(2).sum()
        model(batch(step=1)).pow(2).sum().backward()
        low = model.train()(batch(step=2)).float().pow(2).sum()
        exact = model.eval()(batch(step=3)).pow(2).sum()
        for loss in [before + low + exact] if together else [low, before + exact]:
            loss.backward()
        check_at_rest(model)
        sums.append([unit.sharded_flat_param.grad for unit in model.engine.units])
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_the_gradients_of_an_exact_evaluation_may_stay_low():
    precision = MixedPrecision(LOW, keep_low_precision_grads=True, full_precision_in_eval=True)
    model = mixed(precision=precision).eval()
    with model.no_sync():
        step(model)
    step(model)
    assert all(unit.sharded_flat_param.grad.dtype is LOW for unit in model.engine.units)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_model_may_be_cast_after_wrapping_and_is_still_computed_low(strategy):
    model = mixed(strategy).double()
    out = model(batch())
    assert out.dtype is LOW and model.engine.units[1].sharded_flat_param.dtype is torch.float64
    out.sum().backward()
    assert model.engine.units[1].sharded_flat_param.grad.dtype is torch.float64
