"""clip_grad.py: one norm of all gradients, the same on every rank."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from minifsdp import CPUOffload, CustomPolicy, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.groups import HYBRID
from tests.models import CASES, Expert
from tests.parity import alone, build, grid, sharded
from tests.ranks import device, on_ranks, run
from tests.small import Block, batch, layers, mean_gradients, stack, step

STRATEGIES = list(ShardingStrategy)
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_ZERO2 = STRATEGIES
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
P = [2.0, 1.0, 3.0, math.inf]


def make(strategy, **settings) -> FSDP:
    mesh = grid(strategy) if strategy in HYBRID else None
    return stack(sharding_strategy=strategy, device_mesh=mesh, **settings)


def whole_gradients(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        return {
            name: param.grad.to(device())
            for name, param in model.named_parameters()
            if param.grad is not None
        }


def mean_over(plain: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a plain model: averaged, but for those of experts."""
    plain.zero_grad()
    loss.backward()
    for module in plain.modules():
        for param in module.parameters(recurse=False):
            if param.grad is not None and not isinstance(module, Expert):
                param.grad.div_(dist.get_world_size())
                dist.all_reduce(param.grad)
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def same_everywhere(value: torch.Tensor) -> None:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    assert all(torch.equal(other, value) for other in values)


def check(model: FSDP, plain: nn.Module, run_both, experts=()) -> None:
    """Clip `model` and what a plain one has: by a norm it exceeds, and by one that it does not.

    `experts`: names of parameters that each rank has for itself.
    """
    for p in P:
        for max_norm in (0.05, 1e6):
            model.zero_grad()
            run_both(model).backward()
            before = whole_gradients(model)
            found = model.clip_grad_norm_(max_norm, p)
            same_everywhere(found)
            expected = mean_over(plain, run_both(plain))
            of_all = []
            for name, grad in expected.items():
                copies = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
                dist.all_gather(copies, grad)
                of_all += copies if name in experts else copies[:1]
            norm = torch.nn.utils.get_total_norm(of_all, p)
            torch.testing.assert_close(found, norm, rtol=1e-5, atol=0)
            torch.nn.utils.clip_grads_with_norm_(plain.parameters(), max_norm, norm)
            after = whole_gradients(model)
            torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-7)
            if max_norm > norm:
                torch.testing.assert_close(after, before, rtol=0, atol=0)


def check_strategy(strategy, **settings):
    check(make(strategy, **settings), layers(), lambda m: m(batch()).pow(2).sum())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@every_strategy
def test_it_is_torchs_for_a_plain_model(strategy, ranks):
    run(check_strategy, ranks, strategy)


@every_strategy
def test_with_gradients_on_the_host(strategy):
    run(check_strategy, 2, strategy, cpu_offload=CPUOffload(offload_params=True))


MIXTURES = {  # the root's strategy, and those of its units
    "replicated in sharded": (FULL_SHARD, [NO_SHARD, SHARD_GRAD_OP, NO_SHARD, FULL_SHARD]),
    "sharded in replicated": (NO_SHARD, [FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, FULL_SHARD]),
    "a grid in a row": (FULL_SHARD, [HYBRID_SHARD, FULL_SHARD, HYBRID_ZERO2, NO_SHARD]),
    "a row in a grid": (HYBRID_SHARD, [FULL_SHARD, NO_SHARD, HYBRID_SHARD, SHARD_GRAD_OP]),
    "a row in a column": (NO_SHARD, [HYBRID_SHARD, FULL_SHARD, NO_SHARD, NO_SHARD]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("mixture", MIXTURES)
@on_ranks(4)
def test_units_of_several_strategies_count_once_each(mixture):
    root, inner = MIXTURES[mixture]

    def own(strategy):
        mesh = grid(strategy) if strategy in HYBRID else None
        return {"sharding_strategy": strategy, "device_mesh": mesh}

    model = layers()
    policy = {model[1 + place]: own(strategy) for place, strategy in enumerate(inner)}
    chosen = CustomPolicy(lambda module: policy.get(module, False))
    model = FSDP(model, auto_wrap_policy=chosen, **own(root))
    check(model, layers(), lambda m: m(batch()).pow(2).sum())


def case_loss(model):
    case = CASES["experts"]
    torch.manual_seed(dist.get_rank())
    inputs = [tensor.to(device()) for tensor in case.inputs()]
    return case.loss(model(*inputs), *inputs)


def check_experts(strategy):
    case = CASES["experts"]
    model = sharded(case, sharding_strategy=strategy)
    check(model, build(case), case_loss, experts=("1.weight", "1.bias"))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@every_strategy
def test_experts_of_all_ranks_count(strategy, ranks):
    run(check_experts, ranks, strategy)


@on_ranks(3)
def test_the_root_may_be_the_one_that_each_rank_has_for_itself():
    model = build(CASES["experts"])
    policy = CustomPolicy(
        lambda m: {"process_group": dist.group.WORLD} if isinstance(m, type(model[0])) else False
    )
    model = FSDP(model, process_group=alone(), auto_wrap_policy=policy)
    check(model, build(CASES["experts"]), case_loss, experts=("1.weight", "1.bias"))


class Odd(nn.Module):
    """A frozen unit, one that is not used, one smaller than the world; nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.unused = Block(nn.Linear(6, 5)), Block(nn.Linear(6, 2))
        self.tiny, self.last = Block(nn.Linear(5, 1, bias=False)), Block(nn.Linear(1, 1))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(self.tiny(self.frozen(x)))


def check_odd(strategy):
    mesh = grid(strategy) if strategy in HYBRID else None
    torch.manual_seed(0)
    plain = Odd().to(device())
    torch.manual_seed(0)
    policy = CustomPolicy(lambda m: isinstance(m, Block))
    model = FSDP(
        Odd().to(device()), sharding_strategy=strategy, device_mesh=mesh, auto_wrap_policy=policy
    )
    check(model, plain, lambda m: m(batch()).pow(2).sum())


@pytest.mark.parametrize("ranks", [2, 4])
@every_strategy
def test_frozen_unused_empty_and_tiny_units(strategy, ranks):
    run(check_odd, ranks, strategy)


@on_ranks(3)
def test_an_expert_may_have_a_gradient_on_one_rank_only():
    policy = CustomPolicy(lambda m: {"process_group": alone()} if type(m) is nn.Linear else False)
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(device())
    root[0].requires_grad_(False)
    model = FSDP(root, auto_wrap_policy=policy)
    grads = [unit.sharded_flat_param.grad for unit in model.engine.units]
    assert grads == [None, None, None]
    if dist.get_rank() == 1:
        expert = model.engine.units[2].sharded_flat_param
        expert.grad = torch.full_like(expert, 2.0)
    found = model.clip_grad_norm_(1.0)
    assert found == math.sqrt(6 * 4.0)
    same_everywhere(found)


@on_ranks(2)
def test_without_any_gradient_the_norm_is_zero():
    assert torch.equal(stack().clip_grad_norm_(1.0).cpu(), torch.tensor(0.0))


@pytest.mark.parametrize("value", [0.0, 1e-7])
@on_ranks(2)
def test_gradients_that_are_next_to_nothing_are_scaled_as_torch_scales_them(value):
    """By a norm that is a little larger, so that nothing is divided by zero."""
    model, plain = stack(), layers()
    for param in (*model.parameters(), *plain.parameters()):
        param.grad = torch.full_like(param, value)
    model.clip_grad_norm_(1e-6)
    clip_grad_norm_(plain.parameters(), 1e-6)
    found, expected = next(model.parameters()).grad, next(plain.parameters()).grad.flatten()
    torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("p", P)
@on_ranks(2)
def test_what_is_not_finite_on_one_rank_is_not_on_any(p, value):
    model = stack()
    step(model)
    if dist.get_rank() == 1:
        model.engine.units[2].sharded_flat_param.grad[0] = value
    found = model.clip_grad_norm_(1.0, p)
    assert not found.isfinite()


DTYPES = [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("dtype, returned", DTYPES)
@on_ranks(2)
def test_other_dtypes(dtype, returned):
    model = FSDP(layers().to(dtype), auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, Block)))
    plain = layers().to(dtype)
    model(batch().to(dtype)).pow(2).sum().backward()
    mean_gradients(plain, plain(batch().to(dtype)).pow(2).sum())
    found = model.clip_grad_norm_(0.05)
    assert found.dtype is returned
    expected = clip_grad_norm_([p.to(returned) for p in _with_gradients(plain, returned)], 0.05)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def _with_gradients(plain, dtype):
    for param in plain.parameters():
        exact = param.detach().to(dtype)
        exact.grad = param.grad.to(dtype)
        yield exact


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5, dtype=torch.complex64)
        self.own = nn.Linear(6, 3, dtype=torch.complex64)  # ignored

    def forward(self, x):
        x = x.to(torch.complex64)
        return torch.cat([self.linear(x), self.own(x)], 1).abs()


def with_complex_ones() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Complex(), nn.Linear(8, 3)).to(device())


@pytest.mark.parametrize("in_rows", [False, True])
@on_ranks(2)
def test_complex_gradients_count_by_their_absolute_values(in_rows):
    model, plain = with_complex_ones(), with_complex_ones()
    model = FSDP(
        model,
        auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, Complex)),
        ignored_modules=[model[1].own],
        use_orig_params=in_rows,
    )
    check(model, plain, lambda m: m(torch.ones(2, 6, device=device())).pow(2).sum())
    assert model.clip_grad_norm_(1.0).dtype is torch.float32


@on_ranks(2)
def test_gradients_that_stay_low_are_scaled_low():
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = stack(mixed_precision=precision)
    step(model)
    before = [param.grad.float() for param in model.parameters()]
    norm = model.clip_grad_norm_(0.05)
    assert norm.dtype is torch.float32
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad.dtype is torch.bfloat16
        torch.testing.assert_close(param.grad.float(), grad * (0.05 / norm), rtol=2**-8, atol=0)


# ------------------------------------------------------------------------------- what is refused


@on_ranks(2)
def test_what_waits_is_refused_by_name_until_it_is_cleared():
    model = stack()
    with model.no_sync():
        step(model)
    with pytest.raises(RuntimeError, match=r"unit <root> has gradients from no_sync\(\) that are"):
        model.clip_grad_norm_(1.0)
    model.zero_grad()
    assert model.clip_grad_norm_(1.0) == 0


@pytest.mark.parametrize("p", [0, -1, -math.inf, math.nan])
@on_ranks(1)
def test_a_norm_that_is_none_is_refused(p):
    with pytest.raises(ValueError, match=r"norm_type=.*: the p of a norm has to be positive"):
        stack().clip_grad_norm_(1.0, p)


@on_ranks(1)
def test_where_it_may_not_be_called_it_says_so():
    model = stack()
    with pytest.raises(RuntimeError, match="clip_grad_norm_ was called on unit '1', which is ins"):
        model.module[1].clip_grad_norm_(1.0)
    model.module[1].register_forward_hook(lambda *_: model.clip_grad_norm_(1.0))
    with pytest.raises(RuntimeError, match="clip_grad_norm_ was called in a forward or backward"):
        model(batch())


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, HYBRID_ZERO2])
@on_ranks(4)
def test_torchs_own_is_refused_on_chunks(strategy, foreach):
    model = make(strategy)
    step(model)
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"Call the model's own method: model\.clip_grad_norm_"):
        clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_clipping_each_value_needs_nobody_else():
    model, plain = stack(), layers()
    step(model)
    mean_gradients(plain, plain(batch()).pow(2).sum())
    clip_grad_value_(model.parameters(), 0.1)
    clip_grad_value_(plain.parameters(), 0.1)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    torch.testing.assert_close(whole_gradients(model), expected)


def check_torchs(strategy):
    model, plain = make(strategy), layers()
    step(model)
    mean_gradients(plain, plain(batch()).pow(2).sum())
    found, expected = (clip_grad_norm_(m.parameters(), 0.05) for m in (model, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strategy, ranks", [(NO_SHARD, 2), (FULL_SHARD, 1), (HYBRID_SHARD, 2)])
def test_torchs_own_is_right_where_each_rank_has_everything(strategy, ranks):
    run(check_torchs, ranks, strategy)


@on_ranks(2)
def test_torchs_own_is_right_on_whole_parameters():
    model, plain = stack(), layers()
    step(model)
    mean_gradients(plain, plain(batch()).pow(2).sum())
    with FSDP.summon_full_params(model, with_grads=True):
        found = clip_grad_norm_(model.parameters(), 0.05)
    torch.testing.assert_close(found, clip_grad_norm_(plain.parameters(), 0.05))
    expected = {name: param.grad for name, param in plain.named_parameters()}
    torch.testing.assert_close(whole_gradients(model), expected)
