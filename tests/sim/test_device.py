"""sim/device.py: what operators cost on a virtual GPU, and what memory they take."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp.sim import cluster
from minifsdp.sim.memory.allocator import MiB
from minifsdp.sim.tape import Op, Use

KINDS = pytest.mark.parametrize("kind", ["meta", "cpu"])


def ops(gpu, stream=None) -> list[Op]:
    return [e for e in gpu.tape if isinstance(e, Op) and stream in (None, e.stream)]


@KINDS
def test_an_operator_is_launched_by_the_host_and_runs_later(kind):
    with cluster(kind=kind) as gpu:
        x = torch.zeros(1024, 1024)
        gpu.tape.clear()
        y = x @ x
        y.add_(1)
    product, sum_ = ops(gpu)
    assert (product.name, sum_.name) == ("mm", "add_")
    assert product.flops == 2 * 1024**3 and sum_.flops == 0
    assert product.start >= product.launched and sum_.start == product.end
    assert sum_.launched == pytest.approx(product.launched + gpu.cluster.launch)
    assert product.reads == [gpu.buffer(x)] * 2 and product.writes == [gpu.buffer(y)]


@KINDS
def test_views_and_empty_tensors_are_no_work(kind):
    with cluster(kind=kind) as gpu:
        x = torch.empty(8, 8)
        x.view(64), x.t(), x[0], x.detach(), torch.empty_like(x)
    assert ops(gpu) == []


def test_asking_for_a_value_makes_the_host_wait():
    with cluster() as gpu:
        x = torch.ones(16 * MiB)
        x.add_(1)
        assert gpu.clock.now < gpu.clock.idle_at()
        assert x.sum().item() == 1.0  # there is none; one is as good as any
        assert gpu.clock.now == gpu.clock.idle_at()
    with cluster(kind="cpu") as gpu:
        assert torch.ones(3).sum().item() == 3.0


def test_the_cpu_is_the_host_of_a_gpu_without_values():
    with cluster() as gpu:
        x = torch.ones(4 * MiB)
        y = x.to("cpu")
        assert y.device.type == "cpu" and gpu.buffer(y).owner == "host"
        assert gpu.allocator.allocated.now == 16 * MiB
        assert gpu.clock.now == gpu.clock.idle_at()  # it has waited for the copy
        before = gpu.clock.idle_at()
        y.mul_(2)  # by the host itself
        assert gpu.clock.idle_at() == before < gpu.clock.now
        assert y.to("meta").is_meta
    assert [op.stream for op in ops(gpu)] == ["compute", "compute", "host", "compute"]


def test_work_goes_to_the_stream_that_is_current_and_takes_its_memory_there():
    with cluster() as gpu:
        with gpu.on("unshard", "a label"):
            x = torch.ones(4 * MiB)
        torch.ones(3)
        gpu.record_stream(x, "compute")
    first, second = ops(gpu)
    assert (first.stream, first.label) == ("unshard", "a label")
    assert (second.stream, second.label) == ("compute", "")
    assert gpu.buffer(x).owner == "unshard"
    (use,) = [e for e in gpu.tape if isinstance(e, Use)]
    assert (use.buffer, use.stream) == (gpu.buffer(x), "compute")
    assert use.why.startswith("test_device.py:")


@KINDS
def test_an_ordinary_model_trains_without_knowing(kind):
    with cluster(kind=kind) as gpu:
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        levels = []
        for _ in range(4):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
            levels.append(gpu.allocator.allocated.now)
    assert levels[1] == levels[2] == levels[3]  # no leak
    assert gpu.report()["flops"] > 0


def test_the_report_says_how_often_memory_was_asked_for_and_given_back():
    with cluster("a100-40") as gpu:
        x = torch.empty(30 * 1024 * MiB, dtype=torch.uint8)
        counts = gpu.report()
        assert (counts["cudaMallocs"], counts["retries"]) == (1, 0)
        del x
        y = torch.empty(35 * 1024 * MiB, dtype=torch.uint8)  # not beside the first one's segment
        counts = gpu.report()
        assert (counts["cudaMallocs"], counts["retries"]) == (2, 1)
        del y


def test_a_cpus_host_computes_itself_while_others_send():
    """It goes on when a kernel is done, and does not wait for what is on other streams."""
    with cluster(host_computes=True) as gpu:
        x = torch.ones(64 * MiB)
        now = gpu.clock.now
        x.add_(1)
        (*_, add) = ops(gpu)
        assert add.end - add.start > 100e-6 and gpu.clock.now == add.end > now
        with gpu.on("unshard"):
            x.add_(1)
        (*_, beside) = ops(gpu)
        assert gpu.clock.now < beside.end


def test_each_further_group_of_nccl_takes_memory_when_it_is_first_used():
    with cluster(nodes=2) as gpu:
        capacity = gpu.cluster.capacity
        world, columns = dist.group.WORLD, dist.new_group([0, 8])
        x = torch.empty(16)
        left = []
        for group in (world, world, columns, columns):
            dist.all_reduce(x, group=group)
            left.append(capacity - gpu.allocator.capacity)
    assert left == [0, 0, *[gpu.cluster.taken_by_group] * 2]
