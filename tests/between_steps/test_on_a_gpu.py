"""Everything between steps once, where parameters are on a GPU, and with offload on the host. What
comes out is what it is for the plain model. Where there are no two GPUs, they are pretended."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp import CPUOffload, ModuleWrapPolicy, ShardingStrategy, StateDictType
from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    step,
)

NO_GPUS = torch.cuda.device_count() < 2
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def everywhere(test):
    """In chunks and in rows, on the GPU and offloaded from it; and on both if it is not sharded."""
    test = on_ranks(2, pretended_gpu=NO_GPUS)(test)
    test = pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])(test)
    test = pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])(test)
    return pytest.mark.parametrize("rows", [False, True], ids=["chunks", "rows"])(test)


def make(strategy, offload, rows, whole=None, **settings):
    """A sharded model and its optimizer."""
    model = FSDP(
        whole or layers(2),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload),
        use_orig_params=rows,
        **settings,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(*settings):
    """A sharded model after a step, and the plain one; with their optimizers."""
    model, optimizer = make(*settings)
    plain = layers(2)
    its_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    step(model)
    mean_gradients(plain, plain(batch()).pow(2).sum())
    optimizer.step(), its_optimizer.step()
    return model, optimizer, plain, its_optimizer


def another(*settings):
    """A sharded model that has other values, and its optimizer."""
    model, optimizer = make(*settings)
    model.apply(double)
    return model, optimizer


def double(module):
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.mul_(2)


def assert_equal(found, expected):
    """By name, wherever they are."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        whole = found[name]
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        assert torch.equal(whole.detach().cpu(), value.detach().cpu()), name


def is_home(model, offload):
    """Whether all that an optimizer sees is where it should be."""
    home = "cpu" if offload else "cuda"
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
    return {tensor.device.type for tensor in tensors} == {home}


@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
@everywhere
def test_a_state_dict_is_saved_and_loaded(strategy, offload, rows, kind):
    model, _, plain, _ = trained(strategy, offload, rows)
    other, _ = another(strategy, offload, rows)
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
        state = model.state_dict()
        assert_equal(state, plain.state_dict())
        other.load_state_dict(state)
    assert is_home(other, offload)
    assert torch.equal(other(batch(step=1)), plain(batch(step=1)))


@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
@everywhere
def test_the_state_of_an_optimizer_is_saved_and_loaded(strategy, offload, rows, kind):
    model, optimizer, plain, its_optimizer = trained(strategy, offload, rows)
    other, other_optimizer = another(strategy, offload, rows)
    step(other), other_optimizer.step()
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
        state = FSDP.optim_state_dict(model, optimizer)
        for (name, _), expected in zip(
            plain.named_parameters(), its_optimizer.state_dict()["state"].values(), strict=True
        ):
            assert_equal(state["state"][name], expected)
        other.load_state_dict(model.state_dict())
        loaded = FSDP.optim_state_dict_to_load(other, other_optimizer, state)
    other_optimizer.load_state_dict(loaded)
    other.zero_grad(), plain.zero_grad()
    step(other, 1)
    mean_gradients(plain, plain(batch(step=1)).pow(2).sum())
    other_optimizer.step(), its_optimizer.step()
    with FSDP.summon_full_params(other, writeback=False):
        assert_equal(dict(other.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("to_cpu", [False, True], ids=["", "to_cpu"])
@everywhere
def test_whole_parameters_are_seen_and_written(strategy, offload, rows, to_cpu):
    (model, _), plain = make(strategy, offload, rows), layers(2)
    step(model)
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    # What is not sharded is not copied either, and so changed in any case.
    for writeback in (False, True) if strategy == "FULL_SHARD" else (True,):
        with FSDP.summon_full_params(
            model, writeback=writeback, offload_to_cpu=to_cpu, with_grads=True
        ):
            named = dict(model.named_parameters())
            assert_equal(named, dict(plain.named_parameters()))
            assert_equal({name: param.grad for name, param in named.items()}, expected)
            with torch.no_grad():
                for param in named.values():
                    assert param.device.type == param.grad.device.type
                    assert param.device.type == ("cpu" if to_cpu else "cuda")
                    param.mul_(2), param.grad.mul_(4)
    assert is_home(model, offload)
    assert_equal(gathered_gradients(model), {name: 4 * grad for name, grad in expected.items()})
    plain.apply(double)
    assert torch.equal(model(batch(step=1)), plain(batch(step=1)))


@everywhere
def test_gradients_are_clipped(strategy, offload, rows):
    """Also those of a layer that is left out, which is on the GPU in any case."""
    whole, plain = layers(2), layers(2)
    model, _ = make(strategy, offload, rows, whole, ignored_modules=[whole[0]])
    step(model)
    for param in whole[0].parameters():
        dist.all_reduce(param.grad.div_(2))
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    found_norm = model.clip_grad_norm_(0.5)
    assert found_norm.is_cuda
    torch.testing.assert_close(found_norm, norm)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        found = {name: param.grad.clone() for name, param in model.named_parameters()}
    assert_same_gradients(found, expected)


@everywhere
def test_a_function_is_applied_to_whole_parameters(strategy, offload, rows):
    (model, _), plain, seen = make(strategy, offload, rows), layers(2), []
    model.apply(lambda module: seen.extend(p.shape for p in module.parameters(recurse=False)))
    assert sorted(seen) == sorted(param.shape for param in plain.parameters())
    model.apply(double), plain.apply(double)
    assert is_home(model, offload)
    assert torch.equal(model(batch()), plain(batch()))


@everywhere
def test_a_checkpoint_is_written_and_read(strategy, offload, rows, tmp_path):
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    pytest.importorskip("numpy", reason="torch.distributed.checkpoint of several ranks needs it")
    model, _, plain, _ = trained(strategy, offload, rows)
    other, _ = another(strategy, offload, rows)
    with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
        checkpoint.save(model.state_dict(), checkpoint_id=tmp_path)
        dist.barrier()
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state)
    assert is_home(other, offload)
    assert torch.equal(other(batch(step=1)), plain(batch(step=1)))


@pytest.mark.parametrize("rows", [False, True], ids=["chunks", "rows"])
@on_ranks(2, pretended_gpu=NO_GPUS)
def test_a_model_is_moved_after_wrapping(rows):
    """To the GPU and back, with its gradients. With offload that is refused: test_shard_changes."""
    on_both = dist.new_group(backend="gloo")  # NCCL carries nothing that is on the CPU
    model = FSDP(layers(2).cpu(), on_both, use_orig_params=rows)
    plain = layers(2)
    for place in ("cuda", "cpu", "cuda"):
        model.to(place), plain.to(place)
        assert {param.device.type for param in model.parameters()} == {place}
        x = batch().to(place)
        output = model(x)
        assert output.device.type == place and torch.equal(output, plain(x))
        output.pow(2).sum().backward()
        expected = mean_gradients(plain, plain(x).pow(2).sum())
        assert_same_gradients(gathered_gradients(model), expected)
        model.zero_grad()
