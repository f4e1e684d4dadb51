"""no_sync.py: gradients that wait, and what may happen to them meanwhile."""

import copy
import gc
import weakref
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.groups import HYBRID
from minifsdp.core.reduce import Reduction
from minifsdp.no_sync import NO_SYNC, AddUnreduced, NoSync, store_unreduced
from tests.lone_unit import lone_unit
from tests.parity import check_at_rest, grid
from tests.pretended_gpu import PretendedGpu
from tests.ranks import device, on_ranks, run
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

STRATEGIES = list(ShardingStrategy)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
SETTINGS = {
    "fp32": {},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}


def make(strategy, width=6, **settings) -> FSDP:
    mesh = grid(strategy) if strategy in HYBRID else None
    return stack(2, width, sharding_strategy=strategy, device_mesh=mesh, **settings)


def waiting_step(model: FSDP, at: int, width: int = 6) -> None:
    with model.no_sync():
        model(batch(width, at)).pow(2).sum().backward()


# ----------------------------------------------------------------------------- sums are right


def by_hand(pattern: str, dtype=torch.float32, width: int = 6) -> dict[str, torch.Tensor]:
    """The mean of what waits ("w") together with what is then reduced ("s"), and their sum."""
    total: dict[str, torch.Tensor] = {}
    plain, losses = layers(2, width).to(dtype), []
    for at, letter in enumerate(pattern):
        losses.append(plain(batch(width, at).to(dtype)).pow(2).sum())
        if letter == "s":
            for param in plain.parameters():
                param.grad = None
            for loss in losses:  # one after the other, as in bfloat16 the order of sums counts
                loss.backward()
            for name, param in plain.named_parameters():
                grad = param.grad / dist.get_world_size()
                dist.all_reduce(grad)
                total[name] = grad.float() + total.get(name, 0.0)
            losses = []
    return total


def run_pattern(model: FSDP, pattern: str, width: int = 6) -> None:
    for at, letter in enumerate(pattern):
        if letter == "w":
            waiting_step(model, at, width)
        else:
            model(batch(width, at)).pow(2).sum().backward()


@pytest.mark.parametrize("setting", SETTINGS)
@every_strategy
@on_ranks(2)
def test_accumulation_is_the_sum(strategy, setting):
    model = make(strategy, **SETTINGS[setting])
    for pattern in ("ws", "wws", "sws", "wsws", "wwsss"):
        model.zero_grad()
        run_pattern(model, pattern)
        found = gathered_gradients(model)
        expected = by_hand(pattern, torch.bfloat16 if setting == "bf16" else torch.float32)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.equal(found[name], grad.to(found[name].device)), (pattern, name)
        check_at_rest(model)


def check_accumulation(strategy, width):
    model = make(strategy, width)
    for pattern in ("wws", "sws", "wsws"):
        model.zero_grad()
        run_pattern(model, pattern, width)
        assert_same_gradients(gathered_gradients(model), by_hand(pattern, width=width))
        check_at_rest(model)


@pytest.mark.parametrize("width", [6, 1])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@every_strategy
def test_with_any_number_of_ranks_and_units_smaller_than_it(strategy, ranks, width):
    run(check_accumulation, ranks, strategy, width)


@on_ranks(2)
def test_a_unit_that_the_last_backward_does_not_use_is_reduced_all_the_same():
    model, plain = stack(), layers()
    outputs = []
    model.get_submodule("1").register_forward_hook(lambda m, a, output: outputs.append(output))
    waiting_step(model, 0)
    model(batch(step=1))
    outputs[-1].sum().backward()
    expected = mean_gradients(
        plain, plain(batch(step=0)).pow(2).sum(), plain[:2](batch(step=1)).sum()
    )
    assert_same_gradients(gathered_gradients(model), expected)


@on_ranks(2)
def test_so_it_is_where_no_unit_runs_with_gradients():
    class Parts(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x, used):
            for block in self.blocks[:used]:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    def losses(model):
        yield model(batch().requires_grad_(), 2).sum()
        yield model(batch(step=1).requires_grad_(), 1).sum()

    model = FSDP(Parts(layers(2)[1:]), auto_wrap_policy=ModuleWrapPolicy({Block}))
    waits, last = losses(model)
    with model.no_sync():
        waits.backward()
    last.backward()
    plain = Parts(layers(2)[1:])
    expected = mean_gradients(plain, *losses(plain))
    assert_same_gradients(gathered_gradients(model), expected)


@every_strategy
@on_ranks(2)
def test_gradients_that_stay_low_may_wait_too(strategy):
    """An optimizer finds the same dtype in every step, whether something waited or not."""
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = make(strategy, mixed_precision=precision)
    run_pattern(model, "w")
    assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
    model(batch(step=1)).pow(2).sum().backward()
    expected = by_hand("ws", torch.bfloat16)
    for name, grad in gathered_gradients(model).items():
        assert grad.dtype is torch.bfloat16
        assert torch.equal(grad.float(), expected[name]), name


class InParts(Block):
    """A unit whose gradient comes in two parts, each from a backward inside of the backward."""

    def forward(self, x):
        return checkpoint(self[1], checkpoint(self[0], x, use_reentrant=True), use_reentrant=True)


@every_strategy
@on_ranks(2)
def test_what_comes_in_parts_waits_and_is_added_once(strategy):
    mesh = grid(strategy) if strategy in HYBRID else None
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), InParts(nn.Linear(6, 6), nn.Linear(6, 6))).to(device())
    model = FSDP(
        copy.deepcopy(plain),
        auto_wrap_policy=ModuleWrapPolicy({InParts}),
        sharding_strategy=strategy,
        device_mesh=mesh,
    )
    for pattern in ("s", "ws", "wws"):
        model.zero_grad()
        before = model.engine.stats.reductions
        run_pattern(model, pattern)
        reductions = model.engine.stats.reductions - before
        assert reductions == 2  # one for each unit, not for each part, nor for what has waited
        losses = [plain(batch(step=at)).pow(2).sum() for at in range(len(pattern))]
        assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *losses))
        check_at_rest(model)


def test_of_two_gradients_of_one_backward_the_first_is_added_to():
    with lone_unit() as lone:
        store_unreduced(lone.unit, torch.ones(10))
        stage = AddUnreduced()
        sums = [stage.launch(lone.unit, torch.zeros(10))[0] for _ in range(2)]
        assert [total.tolist() for total in sums] == [[1.0] * 10, [0.0] * 10]
        assert lone.unit.unreduced_grad.grad.eq(1).all()  # as this backward may fail


@on_ranks(2)
def test_it_is_the_backward_that_counts():
    model, plain = stack(), layers()
    with model.no_sync():
        loss = model(batch()).pow(2).sum()
    loss.backward()
    assert_same_gradients(
        gathered_gradients(model), mean_gradients(plain, plain(batch()).pow(2).sum())
    )


@on_ranks(2)
def test_it_may_be_nested():
    model = stack(2)
    with model.no_sync():
        waiting_step(model, 0)
        step(model, 1)  # still inside
    assert not any(grad.any() for grad in gathered_gradients(model).values())
    step(model, 2)
    assert_same_gradients(gathered_gradients(model), by_hand("wws"))


# ------------------------------------------------------------------------- nothing is sent inside


@every_strategy
@on_ranks(4)
def test_no_gradient_is_sent_inside(strategy):
    model = make(strategy)
    with patch.object(Reduction, "start", Mock(side_effect=AssertionError("it is sent"))):
        waiting_step(model, 0)
        waiting_step(model, 1)
    assert model.engine.stats.reductions == 0
    step(model, 2)
    assert model.engine.stats.reductions == 3  # the root's and two units', once


@every_strategy
@on_ranks(4)
def test_nor_is_what_waits_sent_when_a_gradient_of_an_input_is_asked_for(strategy):
    model = make(strategy)
    waiting_step(model, 0)
    x = batch(step=1).requires_grad_()
    loss = model(x).pow(2).sum()
    with patch.object(Reduction, "start", Mock(side_effect=AssertionError("it is sent"))):
        torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert model.engine.stats.reductions == 3
    assert_same_gradients(gathered_gradients(model), by_hand("ws"))


# ------------------------------------------------------------------------------- what may clear it


@pytest.mark.parametrize("earlier", ["", "s"])
@pytest.mark.parametrize("set_to_none", [True, False])
@every_strategy
@on_ranks(3)
def test_zero_grad_clears_what_waits(strategy, set_to_none, earlier):
    for width in (6, 1):  # with one, not every rank has a part of each unit
        model = make(strategy, width)
        run_pattern(model, earlier + "w", width)
        model.zero_grad(set_to_none)
        model(batch(width, 0)).pow(2).sum().backward()
        assert_same_gradients(gathered_gradients(model), by_hand("s", width=width))


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad_between_a_forward_and_its_backward_clears_it_too(set_to_none):
    model = stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waiting_step(model, 1)
    loss = model(batch(step=0)).pow(2).sum()
    optimizer.zero_grad(set_to_none)
    loss.backward()
    assert_same_gradients(gathered_gradients(model), by_hand("s"))


@on_ranks(2)
def test_in_rows_a_parameter_whose_gradient_was_cleared_has_one_again():
    model, plain = stack(1, use_orig_params=True), layers(1)
    step(model, 0)
    first = next(iter(model.parameters()))
    first.grad = None
    waiting_step(model, 1)
    assert first.grad is not None
    step(model, 2)
    losses = [plain(batch(step=at)).pow(2).sum() for at in (1, 2)]
    expected = mean_gradients(plain, *losses)["0.weight"]
    assert torch.equal(first.grad.full_tensor(), expected)


@on_ranks(2)
def test_what_zero_grad_has_cleared_is_freed_by_the_next_forward():
    model = stack(2)
    for at in range(2):
        waiting_step(model, at)
    gradient = weakref.ref(model.engine.units[1].unreduced_grad.grad)
    model.zero_grad()
    model(batch(step=2))
    gc.collect()
    assert gradient() is None


@on_ranks(2)
def test_saving_meanwhile_changes_nothing():
    model = stack(2)
    waiting_step(model, 0)
    model.state_dict()
    with FSDP.summon_full_params(model, writeback=False):
        pass
    step(model, 1)
    assert_same_gradients(gathered_gradients(model), by_hand("ws"))


@every_strategy
@on_ranks(2)
def test_what_is_kept_gathered_is_freed_by_the_next_reduction(strategy):
    model = make(strategy)
    units = model.engine.units
    for _ in range(2):
        waiting_step(model, 0)
        check_at_rest(model, kept=True)
        assert [NO_SYNC in unit.reasons for unit in units] == [
            not unit.reshard_after_forward for unit in units
        ]
        if not units[0].reshard_after_forward:
            with pytest.raises(AssertionError, match="was kept"):
                check_at_rest(model)
        step(model, 1)
        check_at_rest(model)
        assert not any(unit.reasons for unit in units)


@every_strategy
@on_ranks(2)
def test_a_root_that_is_made_later_reduces_what_is_left(strategy):
    inner = make(strategy)
    waiting_step(inner, 0)
    outer = FSDP(nn.Sequential(inner), sharding_strategy=strategy)
    step(outer, 1)
    expected = {f"0.{name}": grad for name, grad in by_hand("ws").items()}
    assert_same_gradients(gathered_gradients(outer), expected)
    check_at_rest(outer)


# ------------------------------------------------------------------------------ what is refused


def scale(param):
    param.grad.mul_(0.5)


def replace(param):
    param.grad = param.grad / 2


def clip(param):
    nn.utils.clip_grad_value_([param], 1e-4)


def add_noise(param):
    param.grad.add_(1.0)


def update(param):
    with torch.no_grad():
        param.sub_(0.1)


@pytest.mark.parametrize("earlier", ["", "s"])
@pytest.mark.parametrize("change", [scale, replace, clip, add_noise, update])
@on_ranks(2)
def test_a_change_while_something_waits_is_refused_by_name(change, earlier):
    check_refused_by_name(change, earlier)


@on_ranks(2, pretended_gpu=True)
def test_so_it_is_on_a_gpu_whose_kernels_for_lists_count_no_changes():
    check_refused_by_name(clip, "")


def check_refused_by_name(change, earlier):
    model = stack(2)
    run_pattern(model, earlier + "w")
    loss = model(batch(step=1)).pow(2).sum()
    change(model.engine.units[1].sharded_flat_param)
    what = "parameters were" if change is update else "gradient was"
    said = rf"unit '1': its {what} changed \(.* while gradients from no_sync\(\) wait"
    with pytest.raises(RuntimeError, match=said):
        loss.backward()
    with pytest.raises(RuntimeError, match=said):
        model(batch())
    with pytest.raises(RuntimeError, match=said):
        model.state_dict()
    model.zero_grad()  # as the message says
    step(model)
    if change is not update:
        assert_same_gradients(gathered_gradients(model), by_hand("s"))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@every_strategy
@on_ranks(2)
def test_a_step_while_something_waits_is_refused_before_it_is_made(strategy, optimizer):
    model = make(strategy)
    optimizer = optimizer(model.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    waiting_step(model, 0)
    with pytest.raises(RuntimeError, match=r"unit <root>: an optimizer is about to step"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(model, 1)  # nothing is lost
    assert_same_gradients(gathered_gradients(model), by_hand("ws"))
    optimizer.step()
    waiting_step(model, 0)
    optimizer.zero_grad()
    optimizer.step()  # no gradient, nothing to do


@on_ranks(2)
def test_a_step_is_refused_whichever_group_of_the_optimizer_waits():
    model, other = stack(2), nn.Linear(2, 2)
    groups = [{"params": list(other.parameters())}, {"params": list(model.parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    other(torch.ones(2)).sum().backward()
    waiting_step(model, 0)
    with pytest.raises(RuntimeError, match="an optimizer is about to step"):
        optimizer.step()


@on_ranks(2)
def test_what_waits_in_a_model_that_is_gone_is_gone_too():
    model = stack(2)
    waiting_step(model, 0)
    chunk = weakref.ref(model.engine.units[1].padded_shard)
    del model
    gc.collect()
    assert chunk() is None


@on_ranks(2)
def test_an_optimizer_of_other_parameters_may_step():
    model, other = stack(2), nn.Linear(2, 2)
    waiting_step(model, 0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(2)).sum().backward()
    before = other.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(other.weight, before)
    first, *_ = model.parameters()
    first.grad = None  # cleared, and only this one
    torch.optim.SGD([first], lr=0.1).step()


@on_ranks(2)
def test_parameters_that_were_loaded_meanwhile_are_noticed():
    model = stack(2)
    state = model.state_dict()
    waiting_step(model, 0)
    model.load_state_dict(state)  # the same values: nothing has changed
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    with pytest.raises(RuntimeError, match=r"unit <root>: its parameters were changed"):
        step(model)


# ------------------------------------------------------------------------- exceptions in between


def interrupt(*_):
    raise KeyError


@pytest.mark.parametrize("where", ["inside", "outside"])
@every_strategy
@on_ranks(2)
def test_a_backward_that_fails_loses_nothing_of_what_waited(strategy, where):
    model = make(strategy)
    run_pattern(model, "sw")
    x = batch(step=7).requires_grad_()
    x.register_hook(interrupt)  # last of all: every gradient is there
    with pytest.raises(KeyError):
        if where == "inside":
            with model.no_sync():
                model(x).pow(2).sum().backward()
        else:
            model(x).pow(2).sum().backward()
    step(model, 2)
    assert_same_gradients(gathered_gradients(model), by_hand("sws"))
    check_at_rest(model)


@on_ranks(2)
def test_after_an_exception_in_the_block_gradients_are_reduced_again():
    model = stack(2)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    step(model, 0)
    assert_same_gradients(gathered_gradients(model), by_hand("s"))


@on_ranks(1)
def test_where_it_may_not_be_called_it_says_so():
    model = stack(2)
    with pytest.raises(RuntimeError, match="no_sync was called on unit '1', which is inside"):
        model.module[1].no_sync().__enter__()

    def within(*_):
        model.no_sync().__enter__()

    handle = model.module[1].register_forward_hook(within)
    with pytest.raises(RuntimeError, match="no_sync was called in a forward or backward"):
        model(batch())
    handle.remove()
    model.module[1].module[0].register_full_backward_hook(within)
    with pytest.raises(RuntimeError, match="no_sync was called in a forward or backward"):
        step(model)


# --------------------------------------------------------------- parameters that stay in no_sync


@on_ranks(2)
def test_parameters_that_stay_are_gathered_once_for_all_batches_and_anew_after_a_step():
    model = stack(2, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    plain = layers(2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    gathers = []
    for at in range(3):
        with model.no_sync():
            for micro in range(2):
                step(model, 3 * at + micro)
                gathers.append(model.engine.stats.all_gathers)
        step(model, 3 * at + 2)
        expected = mean_gradients(
            plain, *(plain(batch(step=3 * at + i)).pow(2).sum() for i in range(3))
        )
        assert_same_gradients(gathered_gradients(model), expected)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    assert gathers == [3, 3, 6, 6, 9, 9]


@on_ranks(2)
def test_parameters_that_stay_follow_what_is_done_to_them_in_between():
    for change in ("in place", "data", "evaluation", "state dict"):
        model = stack(1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        plain = layers(1)
        with model.no_sync():
            step(model)
            model.zero_grad()
            if change == "in place":
                with torch.no_grad():
                    for param in (*model.parameters(), *plain.parameters()):
                        param.mul_(2)
            elif change == "data":
                for param in (*model.parameters(), *plain.parameters()):
                    param.data = param.data * 2
            elif change == "state dict":
                plain.load_state_dict({n: 2 * p for n, p in plain.state_dict().items()})
                model.load_state_dict(plain.state_dict())
            else:
                model.eval()(batch())
                model.train()
            assert torch.equal(model(batch()), plain(batch())), change


# ------------------------------------------------------------------------- what the host waits for


def by_hand_in_rows(module):
    for unit in (*module[1:], module):
        fully_shard(unit)
    return module


WRAPPED = {
    "chunks": lambda module: FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block})),
    "rows": lambda module: FSDP(
        module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    ),
    "fully_shard": by_hand_in_rows,
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@on_ranks(2)
def test_the_host_waits_for_a_gpu_at_most_once_in_a_step_for_all_parameters(wrapped):
    with PretendedGpu() as gpu:
        model = WRAPPED[wrapped](layers().to("cuda"))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def backward(at):
            x = batch(step=at)
            gpu.waits.clear()
            model(x).sum().backward()
            return len(gpu.waits)

        for at in range(4):
            waits = [backward(at)]
            optimizer.step()
            optimizer.zero_grad()
            model._hooks.engine.layer(NoSync).unreduced = {*model._hooks.engine.units}
            waits += [backward(at), backward(at)]
            model._hooks.engine.layer(NoSync).unreduced = set()
            waits += [backward(at)]
            gpu.waits.clear()
            optimizer.step()
            optimizer.zero_grad()
            assert gpu.waits == []
            if at > 1:  # in the first steps ranks compare what they do
                in_rows = int(wrapped != "chunks")
                assert waits == [0, 0, in_rows, in_rows]
