"""checksums.py: bytes that have changed in a checkpoint are noticed when it is loaded."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, state_to_load, state_to_save
from minifsdp.between_steps.checksums import KEY, _sum
from tests.between_steps.test_checkpoint_state import load_here
from tests.chunks.test_as_dtensors import (
    OURS,
    WAYS,
    assert_same,
    load,
    make,
    quietly,
    state_of,
    train,
    whole,
)
from tests.ranks import device, on_ranks, run
from tests.small import batch, layers

pytest.importorskip("numpy", reason="torch.distributed.checkpoint of several ranks needs it")


def save(model, optimizer, folder):
    with quietly():
        dcp.save(state_to_save(model, optimizer, checksums=True), checkpoint_id=folder)


@contextmanager
def one_bit_changed(folder, value):
    """Of a tensor that has been saved, in the file; all ranks call it together."""
    dist.barrier()
    if dist.get_rank() == 0:
        data = bytes(value.cpu().contiguous().view(torch.uint8).flatten().tolist())[:8]
        (file,) = (file for file in folder.glob("*.distcp") if file.read_bytes().count(data) == 1)
        content = file.read_bytes()
        place = content.index(data)
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(content)


CHANGED = {
    "model.blocks.0.0.bias": "blocks.0.0.bias",
    "optimizer.state.blocks.1.0.weight.exp_avg_sq": "blocks.1.0.weight exp_avg_sq",
}


def save_at(way, folder):
    model, optimizer = make(way)
    train(model, optimizer, 0)
    save(model, optimizer, folder)
    torch.save(whole(state_of(model, optimizer)), folder / f"expected {dist.get_rank()}")


def load_at(ways, folder):
    expected = torch.load(folder / "expected 0")
    for way in ways:
        model, optimizer = make(way)
        (load_here if way in OURS else load)(model, optimizer, folder)
        assert_same(whole(state_of(model, optimizer)), expected)
    for name, changed in CHANGED.items():
        with one_bit_changed(folder, expected[changed]):
            for way in set(ways) & {*OURS}:
                refused(way, folder, name)


def refused(way, folder, name):
    model, optimizer = make(way)
    train(model, optimizer, 1)
    before = whole(state_of(model, optimizer))
    says = rf"other values than .* in '{name}' \(1 of \d+ tensors"
    with pytest.raises(ValueError, match=says):
        load_here(model, optimizer, folder)
    assert_same(whole(state_of(model, optimizer)), before)
    train(model, optimizer, 2)


@pytest.mark.few(3)
@pytest.mark.parametrize("ranks", [(2, 2), (3, 1), (1, 4)])
@pytest.mark.parametrize("way", OURS)
def test_one_bit_that_has_changed_is_noticed_by_any_model(way, ranks, tmp_path):
    ways = [way, "chunks", "rows"] if ranks != (2, 2) else list(WAYS)
    run(save_at, ranks[0], way, tmp_path)
    run(load_at, ranks[1], list(dict.fromkeys(ways)), tmp_path)


@on_ranks(2)
def test_without_checksums_nothing_is_compared(tmp_path):
    model, optimizer = make("chunks")
    train(model, optimizer, 0)
    with quietly():
        dcp.save(state_to_save(model, optimizer), checkpoint_id=tmp_path)
    with quietly(), state_to_load(model, optimizer) as state:
        dcp.load(state, checkpoint_id=tmp_path)
    assert KEY not in state and list(state) == ["model", "optimizer"]


@on_ranks(2)
def test_as_a_part_of_another_dict_it_is_loaded_without_a_comparison(tmp_path):
    """dcp.load does not ask the inner dict for its keys when it has opened the checkpoint."""
    model, optimizer = make("chunks")
    with quietly():
        state = state_to_save(model, optimizer, checksums=True)
        dcp.save({"app": state}, checkpoint_id=tmp_path)
    with quietly(), state_to_load(model, optimizer) as state:
        dcp.load({"app": state}, checkpoint_id=tmp_path)


@on_ranks(2)
def test_what_is_loaded_in_another_dtype_is_not_compared(tmp_path):
    model = FSDP(layers(1))
    with quietly():
        dcp.save(state_to_save(model, checksums=True), checkpoint_id=tmp_path)
    rounded = FSDP(layers(1).bfloat16())
    with quietly(), state_to_load(rounded) as state:
        dcp.load(state, checkpoint_id=tmp_path)


class WithNorm(nn.Sequential):
    """Each rank has statistics of its own batches, and one rank's are saved."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6))


@on_ranks(2)
def test_any_ranks_statistics_may_be_those_that_are_saved(tmp_path):
    model = FSDP(WithNorm().to(device()))
    model(batch()).sum().backward()
    means = model.state_dict()["1.running_mean"]
    others = means.clone()
    dist.broadcast(others, 1)
    assert dist.get_rank() or not torch.equal(means, others)
    saved = state_to_save(model, checksums=True)[KEY]
    assert {name: len(numbers) for name, _, numbers in saved}["model.1.running_mean"] == 2
    with quietly():
        dcp.save(state_to_save(model, checksums=True), checkpoint_id=tmp_path)
        with state_to_load(model) as state:
            dcp.load(state, checkpoint_id=tmp_path)


@on_ranks(4)
def test_in_a_grid_of_ranks_each_part_counts_once(tmp_path):
    def hybrid():
        mesh = init_device_mesh(device().type, (2, 2))
        return FSDP(layers(2), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)

    model, whole_one = hybrid(), FSDP(layers(2), sharding_strategy=ShardingStrategy.NO_SHARD)
    saved = state_to_save(model, checksums=True)[KEY]
    assert saved == state_to_save(whole_one, checksums=True)[KEY]
    if dist.get_rank() == 3:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    with pytest.raises(RuntimeError, match=r"have the same part of 'model\.\d.* different values"):
        state_to_save(model, checksums=True)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool,
          torch.complex64, torch.complex128, torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.direct
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_does_not_depend_on_the_parts_but_on_each_place(dtype, monkeypatch):
    value = torch.randint(0, 2, (5, 4, 3)).float()
    value[0, 0, 0], value[0, 0, 1], value[0, 1, 0], value[1, 0, 0] = 0, 1, 0, 1
    value = value.to(dtype)
    expected = _sum(value, (0, 0, 0), value.shape) % 2**64
    monkeypatch.setattr("minifsdp.between_steps.checksums._AT_ONCE", 24)  # two rows
    assert _sum(value, (0, 0, 0), value.shape) % 2**64 == expected
    parts = [(slice(0, 2), slice(0, 4)), (slice(2, 5), slice(0, 1)), (slice(2, 5), slice(1, 4))]
    sums = [_sum(value[part], (part[0].start, part[1].start, 0), value.shape) for part in parts]
    assert sum(sums) % 2**64 == expected
    for one, other in (((0, 0, 0), (0, 0, 1)), ((0, 1, 0), (1, 0, 0))):
        exchanged = value.clone()
        exchanged[one], exchanged[other] = value[other].clone(), value[one].clone()
        assert _sum(exchanged, (0, 0, 0), value.shape) % 2**64 != expected
    number = torch.ones((), dtype=dtype)
    assert _sum(number, (), ()) == _sum(number.view(1), (0,), (1,)) != 0
