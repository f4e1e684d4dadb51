"""full_params.py: reading and changing whole parameters between steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.groups import HYBRID
from tests.models import Odd, Unit
from tests.parity import check_at_rest, grid
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step

every_strategy = pytest.mark.parametrize("strategy", ShardingStrategy)
OFFLOAD = CPUOffload(offload_params=True)


def make(strategy, **settings) -> FSDP:
    mesh = grid(strategy) if strategy in HYBRID else None
    return stack(sharding_strategy=strategy, device_mesh=mesh, **settings)


def assert_parameters(model: FSDP, plain: nn.Module) -> None:
    with FSDP.summon_full_params(model, writeback=False):
        found = dict(model.named_parameters())
        for name, param in plain.named_parameters():
            assert found[name].dtype is param.dtype
            assert torch.equal(found[name].to(device()), param), name


@every_strategy
@on_ranks(3)
def test_parameters_are_whole_and_under_their_own_names(strategy):
    model, plain = make(strategy), layers()
    with FSDP.summon_full_params(model):
        found = dict(model.named_parameters())
        expected = dict(plain.named_parameters())
        assert found.keys() == expected.keys()
        for name, param in expected.items():
            assert isinstance(found[name], nn.Parameter) and torch.equal(found[name], param)
    assert all("_flat_param" in name for name, _ in model.named_parameters())
    check_at_rest(model)


@on_ranks(2)
def test_changes_are_dropped_without_writeback():
    model, plain = stack(), layers()
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.module[1].module[0].weight.zero_()
    assert torch.equal(model(batch()), plain(batch()))


@on_ranks(2)
def test_one_unit_alone():
    model = stack()
    with FSDP.summon_full_params(model, recurse=False):
        names = [name for name, _ in model.named_parameters()]
    assert names[:2] == ["0.weight", "0.bias"] and names[2] == "1._flat_param"
    with FSDP.summon_full_params(model.module[2]):
        assert [n for n, _ in model.module[2].named_parameters()] == ["0.weight", "0.bias"]


@on_ranks(2)
def test_training_goes_on_after_it_and_after_an_exception_in_it():
    model, plain = stack(), layers()
    with pytest.raises(KeyError), FSDP.summon_full_params(model):
        raise KeyError
    check_at_rest(model)
    assert torch.equal(step(model), plain(batch()).pow(2).sum())


@on_ranks(2)
def test_it_is_refused_where_parameters_come_and_go_by_themselves():
    model = stack()

    def summon(*_):
        with FSDP.summon_full_params(model):
            pass

    handle = model.module[1].module[0].register_forward_hook(summon)
    with pytest.raises(RuntimeError, match="summon_full_params was called in a forward"):
        model(batch())
    handle.remove()
    handle = model.module[1].module[0].register_full_backward_hook(summon)
    loss = model(batch()).sum()
    with pytest.raises(RuntimeError, match="summon_full_params was called in a forward"):
        loss.backward()
    handle.remove()
    step(model)
    check_at_rest(model)


@on_ranks(2)
def test_modules_may_compute_with_them():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.LSTM(6, 4)).to(device()))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LSTM(6, 4)).to(device())
    with FSDP.summon_full_params(model):
        found, expected = model.module[0](batch())[0], plain[0](batch())[0]
        assert torch.equal(found, expected)
        found.sum().backward()  # gradients of the ordinary parameters; nothing of them stays
        expected.sum().backward()
        assert torch.equal(model.module[0].weight_hh_l0.grad, plain[0].weight_hh_l0.grad)
    assert all(param.grad is None for param in model.parameters())


@every_strategy
@on_ranks(2)
def test_a_look_between_a_forward_and_its_backward_changes_nothing(strategy):
    model, plain = make(strategy), layers()
    outputs = []
    for m in (model.module[1], plain[1]):
        m.register_forward_hook(lambda module, args, output: outputs.append(output))
    x, y = batch().requires_grad_(), batch().requires_grad_()
    model(x)
    with FSDP.summon_full_params(model, writeback=False):
        pass
    plain(y)
    for output in outputs:
        output.sum().backward()  # through what is around the unit, too
    assert torch.equal(x.grad, y.grad)


# ------------------------------------------------------------------------- blocks within blocks

BLOCKS = {  # which part of the model, and whether the units inside come along; what is then shown
    "all": (lambda m: m, True, {"0", "1", "2", "3", "4"}),
    "root": (lambda m: m, False, {"0"}),
    "one": (lambda m: m.module[1], True, {"1"}),
    "another": (lambda m: m.module[2], True, {"2"}),
}


def shown(model: FSDP) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if "_flat" not in name}


def units_of(names) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("inner", BLOCKS)
@pytest.mark.parametrize("outer", BLOCKS)
@on_ranks(2)
def test_blocks_may_lie_within_each_other(outer, inner, offload):
    model, plain = stack(), layers()
    (first, first_all, in_first), (second, second_all, in_second) = BLOCKS[outer], BLOCKS[inner]
    with FSDP.summon_full_params(first(model), recurse=first_all, offload_to_cpu=offload):
        with pytest.raises(KeyError), FSDP.summon_full_params(second(model), recurse=second_all):
            assert units_of(shown(model)) == in_first | in_second
            for name, param in shown(model).items():
                assert torch.equal(param.to(device()), plain.get_parameter(name))
            raise KeyError
        assert units_of(shown(model)) == in_first
        for name, param in shown(model).items():
            param.data.add_(1)
            plain.get_parameter(name).data.add_(1)
    assert not shown(model)
    assert_parameters(model, plain)
    check_at_rest(model)
    assert torch.equal(model(batch()), plain(batch()))


@on_ranks(2)
def test_the_inner_block_writes_back_what_is_its_own():
    model, plain = stack(), layers()
    outer = FSDP.summon_full_params(model, recurse=False, writeback=False)
    with outer, FSDP.summon_full_params(model):
        for param in model.parameters():
            param.data.add_(1)
    for name, param in plain.named_parameters():
        param.data.add_(not name.startswith("0."))
    assert_parameters(model, plain)


# ---------------------------------------------------------------------------------- on one rank


@pytest.mark.parametrize("offload", [True, False])
@every_strategy
@on_ranks(4)
def test_the_first_rank_alone_may_see_them(strategy, offload):
    model, plain = make(strategy), layers()
    flat = [name for name, _ in model.named_parameters()]
    with FSDP.summon_full_params(
        model, writeback=False, rank0_only=True, offload_to_cpu=offload, with_grads=True
    ):
        found = dict(model.named_parameters())
        if dist.get_rank() == 0:
            assert found.keys() == dict(plain.named_parameters()).keys()
            assert all(torch.equal(found[n].to(device()), p) for n, p in plain.named_parameters())
        else:
            assert list(found) == flat
            assert model.engine.stats.unsharded_units == 0  # no memory is held for nothing
    check_at_rest(model)
    step(model)


@on_ranks(2)
def test_what_one_rank_sees_cannot_be_written_back():
    model = stack()
    with pytest.raises(ValueError, match=r"rank0_only=True\) needs writeback=False"):
        FSDP.summon_full_params(model, rank0_only=True).__enter__()
    step(model)


# ------------------------------------------------------------------------- in the host's memory


@pytest.mark.parametrize("cpu_offload", [None, OFFLOAD])
@pytest.mark.parametrize("writeback", [True, False])
@every_strategy
@on_ranks(4)
def test_they_may_be_in_the_hosts_memory(strategy, writeback, cpu_offload):
    model, plain = make(strategy, cpu_offload=cpu_offload), layers()
    with FSDP.summon_full_params(model, writeback=writeback, offload_to_cpu=True):
        assert model.engine.stats.unsharded_units == 0
        assert model.engine.stats.peak_unsharded_units <= 1  # one at a time on the device
        for name, param in model.named_parameters():
            assert param.device.type == "cpu"
            assert torch.equal(param.to(device()), plain.get_parameter(name))
            param.data.mul_(3)
    if writeback:
        for param in plain.parameters():
            param.data.mul_(3)
    assert_parameters(model, plain)
    assert torch.equal(model(batch()), plain(batch()))


@every_strategy
@on_ranks(2)
def test_offloaded_parameters_are_shown_where_they_are_computed_with(strategy):
    model, plain = make(strategy, cpu_offload=OFFLOAD), layers()
    with FSDP.summon_full_params(model):
        for name, param in model.named_parameters():
            assert param.device == plain.get_parameter(name).device
            param.data.add_(1)
    for param in plain.parameters():
        param.data.add_(1)
    assert_parameters(model, plain)


@every_strategy
@on_ranks(2)
def test_they_are_exact_whatever_is_computed_with(strategy):
    model = make(strategy, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    plain, x = layers(), batch()
    before = model(x)
    assert_parameters(model, plain)
    with FSDP.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.add_(2**-20)  # less than bfloat16 could hold
    for param in plain.parameters():
        param.data.add_(2**-20)
    assert_parameters(model, plain)
    after = model(x)
    assert after.dtype is torch.bfloat16 and torch.equal(after, before)


# ---------------------------------------------------------------------------------- gradients


@on_ranks(3)
def test_units_without_gradients_have_none():
    module = Odd().to(device())
    module.wide.requires_grad_(False)
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Unit}))
    model(torch.rand(4, 8, device=device())).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        found = {name: param.grad is not None for name, param in model.named_parameters()}
        frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    assert [name for name, has in found.items() if not has] == frozen
    assert frozen == ["wide.0.weight", "wide.0.bias", "wide.1.weight"]


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


@on_ranks(2)
def test_in_rows_what_no_rank_has_used_has_none():
    model = FSDP(Spare().to(device()), use_orig_params=True)
    model(torch.ones(2, 3, device=device())).sum().backward()
    for _ in range(2):  # and gets none by what is written back
        with FSDP.summon_full_params(model, with_grads=True):
            found = {name for name, param in model.named_parameters() if param.grad is not None}
            model.module.used.bias.grad.fill_(7)
        assert found == {"used.weight", "used.bias"}
        assert model.module.unused.bias.grad is None
    assert (model.module.used.bias.grad.full_tensor() == 7).all()


@on_ranks(2)
def test_gradients_that_wait_are_not_shown_as_if_they_were_whole():
    model = stack()
    with model.no_sync():
        step(model)
    with pytest.raises(RuntimeError, match=r"unit <root> has gradients from no_sync\(\) that have"):
        FSDP.summon_full_params(model, writeback=False, with_grads=True).__enter__()
    model.zero_grad()
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert all(param.grad is None for param in model.parameters())
    step(model)
    check_at_rest(model)


# ------------------------------------------------------------------------------------ apply()


@every_strategy
@on_ranks(2)
def test_apply_sees_whole_parameters_and_inner_modules_first(strategy):
    model, plain, seen = make(strategy), layers(), []

    def init(module):
        if isinstance(module, nn.Linear):
            seen.append(module.weight.shape)
            with torch.no_grad():
                module.weight.copy_(torch.arange(36.0).view(6, 6) / 36)
                module.bias.add_(len(seen))
        elif isinstance(module, nn.Sequential):
            seen.append(type(module).__name__)

    assert model.apply(init) is model
    order = list(seen)
    seen.clear()
    plain.apply(init)
    assert order == seen == [(6, 6), *[(6, 6), "Block"] * 4, "Sequential"]
    assert_parameters(model, plain)
    model.module[1].register_forward_hook(lambda *_: model.apply(init))
    with pytest.raises(RuntimeError, match="in a forward"):
        model(batch())
