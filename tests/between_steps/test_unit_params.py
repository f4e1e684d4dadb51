"""unit_params.py: what a caller does to whole parameters is found again."""

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.groups import HYBRID
from tests.between_steps.test_full_params import OFFLOAD, assert_parameters, every_strategy, make
from tests.models import SharedTransformer
from tests.parity import grid
from tests.pretended_gpu import PretendedGpu
from tests.ranks import device, on_ranks
from tests.small import batch, gathered_gradients, layers, mean_gradients, stack, step


@pytest.mark.parametrize("assign", ["in place", "data", "copy"])
@every_strategy
@on_ranks(2)
def test_changes_are_kept(strategy, assign):
    model, plain, x = make(strategy), layers(), batch()
    with FSDP.summon_full_params(model), torch.no_grad():
        weight = model.module[1].module[0].weight
        if assign == "in place":
            weight.mul_(3)
        elif assign == "data":
            weight.data = weight.data * 3
        else:
            weight.copy_(weight * 3)
    with torch.no_grad():
        plain[1][0].weight.mul_(3)
    assert torch.equal(model(x), plain(x))


@every_strategy
@on_ranks(2)
def test_a_shared_parameter_may_be_replaced_by_either_name(strategy):
    mesh = grid(strategy) if strategy in HYBRID else None
    module = SharedTransformer().to(device())
    model = FSDP(module, sharding_strategy=strategy, device_mesh=mesh)
    with FSDP.summon_full_params(model):
        assert model.module.output.weight is model.module.embed.weight
        model.module.output.weight = nn.Parameter(torch.full((23, 16), 3.0, device=device()))
    with FSDP.summon_full_params(model):
        assert (model.module.embed.weight == 3).all()


@on_ranks(2)
def test_a_parameter_of_another_shape_is_refused_by_name():
    model, plain = stack(), layers()
    said = r"parameter '0.weight' of unit '2' was replaced inside summon_full_params by"
    small = nn.Parameter(torch.zeros(2, device=device()))
    for weight, shape in ((small, r" \[2\];"), (None, " None")):
        with pytest.raises(ValueError, match=said + shape), FSDP.summon_full_params(model):
            model.module[1].module[0].weight.data.zero_()  # nor is this written, then
            model.module[2].module[0].weight = weight
    with pytest.raises(ValueError, match=said + " None"), FSDP.summon_full_params(model):
        del model.module[2].module[0].weight
    assert_parameters(model, plain)


@on_ranks(2)
def test_changes_before_an_exception_are_dropped():
    model, plain = stack(), layers()
    with pytest.raises(KeyError), FSDP.summon_full_params(model), torch.no_grad():
        model.module[1].module[0].weight.zero_()
        raise KeyError
    assert_parameters(model, plain)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("cpu_offload", [None, OFFLOAD])
@every_strategy
@on_ranks(2)
def test_gradients_come_along_if_asked_for(strategy, cpu_offload, offload):
    model, plain = make(strategy, cpu_offload=cpu_offload), layers()
    step(model)
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    for scale in (1.0, 3.0):
        with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=offload):
            for name, param in model.named_parameters():
                assert param.grad.device == param.device
                assert torch.equal(param.grad.to(device()), expected[name] * scale)
                if scale == 1.0:
                    param.grad.mul_(3)
                else:
                    param.grad = param.grad * 2
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        for param in model.parameters():
            param.grad.zero_()
    with FSDP.summon_full_params(model, with_grads=True):
        model.module[1].module[0].weight.grad = None
    expected["1.0.weight"].zero_()
    found = gathered_gradients(model)
    assert all(torch.equal(found[n].to(device()), grad * 3 * 2) for n, grad in expected.items())
    with FSDP.summon_full_params(model):
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("cpu_offload", [None, OFFLOAD])
@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_values_are_written_back_from_one_device_to_another(rows, cpu_offload, offload):
    expected = {name: 2 * value for name, value in layers().state_dict().items()}
    with PretendedGpu():
        model = FSDP(layers().to("cuda"), cpu_offload=cpu_offload, use_orig_params=rows)
        with FSDP.summon_full_params(model, offload_to_cpu=offload), torch.no_grad():
            for param in model.parameters():
                assert param.device.type == ("cpu" if offload else "cuda")
                param.mul_(4)
        model.apply(halve)
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        if not rows:
            assert_equal(state, expected)
        model.load_state_dict(state)
        with FSDP.summon_full_params(model, writeback=False):
            assert_equal(dict(model.named_parameters()), expected)


def halve(module):
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.div_(2)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value), name
