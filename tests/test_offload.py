"""offload.py: parameters that live in the host's memory."""

import weakref
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.streams import CpuEvent, CpuStream, Streams
from minifsdp.core.unshard import OwnShard
from minifsdp.offload import HOST, Download, Upload, host_copy
from minifsdp.sim import cluster
from minifsdp.sim.tape import Op
from tests.lagging import DeferringStream
from tests.lone_unit import lone_unit
from tests.parity import check_at_rest, grid
from tests.ranks import device, on_ranks, run
from tests.small import batch, layers, mean_gradients, stack, step

OFFLOAD = CPUOffload(offload_params=True)
STRATEGIES = list(ShardingStrategy)


def offloaded(strategy=ShardingStrategy.FULL_SHARD, **settings) -> FSDP:
    mesh = grid(strategy) if "HYBRID" in strategy.name else None
    return stack(sharding_strategy=strategy, cpu_offload=OFFLOAD, device_mesh=mesh, **settings)


def gradients(model) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {
            name: param.grad.clone()
            for name, param in model.named_parameters()
            if param.grad is not None
        }


def assert_gradients(model, expected):
    """Equal in every bit, up to two ranks: one sum of two numbers, and in the same order."""
    found, tolerance = gradients(model), 0.0 if dist.get_world_size() <= 2 else 1e-6
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def sums(plain, *steps) -> dict[str, torch.Tensor]:
    """The mean gradients of several batches, added up."""
    each = [mean_gradients(plain, plain(batch(step=at)).pow(2).sum()) for at in steps]
    return {name: sum(grads[name] for grads in each) for name in each[0]}


@pytest.mark.direct
class TestDirectly:
    """On streams on which nothing happens before somebody waits for it."""

    def test_the_unshard_stream_gets_a_chunk_that_has_arrived(self):
        with lone_unit(offload=True) as lone:
            streams, arrived, chunk = late_streams(), [], lone.unit.padded_shard
            source = Upload(OwnShard(lone.unit.shard_group))
            source.prepare(lone.unit, streams)

            def launch():
                arrived.append(source.tensor(lone.unit, streams))
                return lambda: None

            streams.unshard.submit(launch).wait()
            assert arrived[0].tolist() == [1, 2, 3, 4, 5]
            assert arrived[0] is not chunk, "the chunk stays on the host; this is a copy"
            assert source.group is lone.unit.shard_group

    def test_what_is_copied_is_prepared_first(self):
        with lone_unit(offload=True) as lone:
            inner = Mock(**{"tensor.return_value": torch.arange(3.0)})
            source = Upload(inner)
            source.prepare(lone.unit, lone.streams)
            assert source.tensor(lone.unit, lone.streams).tolist() == [0, 1, 2]
            assert [name for name, *_ in inner.method_calls] == ["prepare", "tensor"]

    def test_a_source_does_not_keep_what_it_has_copied(self):
        with lone_unit(offload=True) as lone:
            source = Upload(OwnShard(lone.unit.shard_group))
            source.prepare(lone.unit, lone.streams)
            copy = weakref.ref(source.tensor(lone.unit, lone.streams))
            assert copy() is None, "the device would hold each shard as long as the model lives"

    def test_a_download_starts_when_its_source_is_ready_and_ends_with_its_event(self):
        streams, source = late_streams(), torch.zeros(3)
        ready = CpuEvent(lambda: source.fill_(7))
        streams.download.wait_event(ready)
        copies = []

        def launch():
            copy, finish = Download(streams).launch(None, source)
            copies.append(copy)
            return finish

        arrived = streams.download.submit(launch)
        assert not arrived.query(), "the host goes on meanwhile"
        arrived.synchronize()
        assert copies[0].tolist() == [7, 7, 7] and copies[0] is not source

    def test_only_what_is_offloaded_is_copied(self):
        tensor = torch.arange(3.0)
        assert host_copy(tensor, None) is tensor
        copy = host_copy(tensor, torch.device("cpu"))
        assert copy.tolist() == [0, 1, 2] and copy.data_ptr() != tensor.data_ptr()


def late_streams():
    return Streams(HOST, CpuStream(), *(DeferringStream() for _ in range(5)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_what_the_optimizer_sees_is_on_the_host_and_stays_there(strategy):
    model = offloaded(strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for at in range(2):
        step(model, at)
        for unit in model.engine.units:
            assert (
                unit.sharded_flat_param.device
                == unit.padded_shard.device
                == unit.sharded_flat_param.grad.device
                == HOST
            )
            assert unit.unsharded.flat_param.device == device()
        optimizer.step()
    for state in optimizer.state.values():
        assert state["exp_avg"].device == state["exp_avg_sq"].device == HOST


@pytest.mark.gpus(1)
@on_ranks(1)
def test_on_a_gpu_the_hosts_memory_is_pinned():
    model = offloaded()
    step(model)
    for unit in model.engine.units:
        assert unit.padded_shard.is_pinned() and unit.sharded_flat_param.grad.is_pinned()


def test_after_wrapping_the_device_has_no_part_of_the_parameters():
    with cluster(gpus_per_node=2) as gpu, torch.device("meta"):
        model = FSDP(nn.Sequential(nn.Linear(512, 512)), cpu_offload=OFFLOAD)
        assert gpu.allocator.allocated.now < 512 * 512 * 4 / 2, model  # a shard


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_uploads_and_downloads_touch_both_memories_and_each_on_its_own_stream(strategy):
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu:
        model = stack(sharding_strategy=strategy, cpu_offload=OFFLOAD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for at in range(2):
            start = len(gpu.tape)
            step(model, at)
            optimizer.step()
        kept = [state["momentum_buffer"] for state in optimizer.state.values()]
        assert {gpu.buffer(tensor).owner for tensor in kept} == {"host"}
    assert not gpu.races()
    ops = [entry for entry in gpu.tape[start:] if isinstance(entry, Op)]
    streams = {op.stream for op in ops if touches(op, "host")}
    assert streams == {"host", "upload", "download"}


def evaluation(model):
    with torch.no_grad():
        model(batch())


def forward_without_backward(model):
    model(batch())


def look(model):
    with FSDP.summon_full_params(model, writeback=False):
        pass


@pytest.mark.parametrize("rows", [False, True], ids=["chunks", "rows"])
@pytest.mark.parametrize("before", [evaluation, forward_without_backward, look, FSDP.state_dict])
def test_a_program_may_write_to_shards_that_the_device_has_just_copied(before, rows):
    """The device copies them while the host goes on: they must have been read when it writes."""
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu:
        model = stack(cpu_offload=OFFLOAD, use_orig_params=rows)
        step(model)
        before(model)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    assert not gpu.races()


def touches(op: Op, owner: str) -> bool:
    return any(buffer.owner == owner for buffer in (*op.reads, *op.writes))


def check_accumulation(strategy):
    """PyTorch's FSDP loses all but the last, because each download writes over the one before."""
    model, plain = offloaded(strategy), layers()
    for at in range(3):
        step(model, at)
    assert_gradients(model, sums(plain, 0, 1, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_several_backwards_add_up(strategy, world_size):
    run(check_accumulation, world_size, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_that_wait_are_reduced_with_the_next(strategy):
    model, plain = offloaded(strategy), layers()
    step(model, 0)
    with model.no_sync():
        step(model, 1)
        step(model, 2)
    step(model, 3)
    expected = sums(plain, 0)
    plain.zero_grad()
    for at in (1, 2, 3):
        step(plain, at)
    for name, param in plain.named_parameters():
        dist.all_reduce(param.grad.div_(2))
        expected[name] += param.grad
    assert_gradients(model, expected)


def check_move(strategy):
    model = offloaded(strategy)
    step(model)
    model.to("meta")
    for _ in range(2):  # and not only at first
        with pytest.raises(RuntimeError) as error:
            model(batch())
        assert "unit <root> were moved to meta, but with CPUOffload they live on the CPU" in str(
            error.value
        )
        assert f"Do not move the model after wrapping; it computes on {device()}" in str(
            error.value
        )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_moving_the_model_after_wrapping_is_refused_on_every_rank(strategy, world_size):
    run(check_move, world_size, ShardingStrategy[strategy])


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_shard_that_the_user_replaced_is_uploaded(strategy):
    model, plain = offloaded(strategy), layers()
    step(model)
    for param in model.parameters():
        param.data = param.data * 2
    for param in plain.parameters():
        param.data.mul_(2)
    assert torch.equal(model(batch()), plain(batch()))
    unit = model.engine.units[1]
    assert (
        unit.padded_shard.data_ptr() == unit.sharded_flat_param.data_ptr()
        and unit.padded_shard.device == HOST
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_frozen_units_are_uploaded_and_nothing_is_downloaded_for_them(strategy):
    model, plain = offloaded(strategy), layers()
    for sharded in (model.engine.units[1], model.engine.units[3]):
        sharded.sharded_flat_param.requires_grad_(False)
    for block in (plain[1], plain[3]):
        block.requires_grad_(False)
    step(model)
    assert_gradients(model, sums(plain, 0))
    assert [unit.sharded_flat_param.grad is None for unit in model.engine.units] == [0, 1, 0, 1, 0]
    assert model.engine.stats.reductions == 3
    check_at_rest(model)


def interrupt(*_):
    raise InterruptedError


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_after_an_exception_nothing_is_left_of_the_step(strategy, hook):
    model, plain = offloaded(strategy), layers()
    step(model, 0)
    handle = getattr(model.module[2], hook)(interrupt)
    with pytest.raises(InterruptedError):
        step(model, 1)
    handle.remove()
    step(model, 2)
    assert_gradients(model, sums(plain, 0, 2))
    check_at_rest(model)


@on_ranks(4)
def test_sizes_that_no_number_of_ranks_divides():
    """Six elements over four ranks: chunks of two, and nothing on the last one."""
    model = FSDP(nn.Linear(6, 1, bias=False).to(device()), cpu_offload=OFFLOAD)
    weight = torch.arange(6.0, device=device())
    with FSDP.summon_full_params(model):
        model.weight.data.copy_(weight)
    x = batch()
    assert torch.equal(model(x), nn.functional.linear(x, weight[None]))
    model(x).sum().backward()
    assert model._unit.sharded_flat_param.grad.numel() == [2, 2, 2, 0][dist.get_rank()]


@on_ranks(2)
def test_some_units_may_be_on_the_host_and_others_not():
    plain = layers()
    inside = FSDP(layers()[1], cpu_offload=OFFLOAD)
    rest = list(layers())
    model = FSDP(nn.Sequential(rest[0], inside, *rest[2:]))
    assert [unit.offload_from for unit in model.engine.units] == [None, device()]
    step(model)
    assert_gradients(model, sums(plain, 0))


@on_ranks(2)
def test_what_is_downloaded_is_in_the_dtype_of_the_reduction():
    """Half the bytes on the way; it is the host that makes exact numbers of them."""
    model, dtypes = offloaded(mixed_precision=MixedPrecision(torch.bfloat16)), []

    def noted(stage, unit, tensor):
        dtypes.append(tensor.dtype)
        return launch(stage, unit, tensor)

    launch = Download.launch
    with patch.object(Download, "launch", noted):
        step(model)
    assert dtypes == [torch.bfloat16] * 5
    assert model.engine.units[1].sharded_flat_param.grad.dtype is torch.float32


@on_ranks(1)
def test_offload_is_off_unless_asked_for():
    assert stack(cpu_offload=CPUOffload()).engine.root.offload_from is None
    assert stack(cpu_offload=None).engine.root.offload_from is None
    assert offloaded().engine.root.offload_from == device()
