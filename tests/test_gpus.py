"""What only a machine with GPUs can show. Where there are enough of them, `make test` runs it.

So that these tests themselves are right when they first meet a GPU, those that ask for no time and
no memory run on a pretended one as well.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from tests.gpus import SHARED
from tests.parity import check_parity, mesh
from tests.ranks import device, on_ranks, run
from tests.small import Block, layers, mean_gradients
from tutorials.exercises.evidence import hidden_part

STEPS, WIDTH = 3, 2048  # an all-gather of a block, of 16 MiB, takes long enough to be hidden
PRETENDED_TOO = pytest.mark.parametrize(
    "pretended", [True, pytest.param(False, marks=pytest.mark.gpus(2))], ids=["pretended", "real"]
)


@pytest.mark.gpus(8)
@pytest.mark.parametrize("name", ["transformer", "mlp_nested", "experts"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@on_ranks(8)
def test_eight_ranks_are_as_ddp(strategy, name):
    """Hybrid: two groups of four."""
    settings = {"device_mesh": mesh(2)} if strategy == "HYBRID_SHARD" else {}
    check_parity(name, sharding_strategy=ShardingStrategy[strategy], **settings)


@PRETENDED_TOO
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_model_that_was_wrapped_on_the_cpu_may_be_moved(strategy, pretended):
    settings = {"init": "after", "sharding_strategy": ShardingStrategy[strategy]}
    run(check_parity, 2, "mlp_nested", pretended_gpu=pretended, **settings)


@PRETENDED_TOO
@pytest.mark.parametrize("rows", [False, True], ids=["chunks", "rows"])
def test_the_models_gpu_need_not_be_the_current_one(rows, pretended):
    run(check_not_current, 2, rows, pretended_gpu=pretended)


def check_not_current(rows: bool) -> None:
    mine = torch.cuda.current_device()
    elsewhere = (mine + 1) % torch.cuda.device_count()
    plain = layers().to(f"cuda:{mine}")
    model = FSDP(
        layers().to(f"cuda:{mine}"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=rows,
        device_id=mine,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    torch.cuda.set_device(elsewhere)
    try:
        for at in range(STEPS):
            x = torch.randn(
                3, 6, generator=torch.Generator().manual_seed(at + 10 * dist.get_rank())
            )
            x = x.to(f"cuda:{mine}")
            model(x).pow(2).sum().backward()
            mean_gradients(plain, plain(x).pow(2).sum())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with FSDP.summon_full_params(model):
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(found, expected)
    finally:
        torch.cuda.set_device(mine)


@pytest.mark.gpus(2)
@on_ranks(2)
def test_a_step_may_be_on_a_stream_of_its_own():
    with torch.cuda.stream(torch.cuda.Stream()):
        check_parity("transformer")


@pytest.mark.skipif(SHARED, reason="between ranks on one GPU all is sent by the host, slowly")
@pytest.mark.gpus(2)
@on_ranks(2)
def test_most_of_the_communication_is_hidden():
    """It would be none without streams. On the GPUs of one machine gathers are short, which is why
    this is no measurement."""
    model = FSDP(wide(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    train(model)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        train(model)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    assert hidden_part(events) > 0.5


@pytest.mark.gpus(2)
@on_ranks(2)
def test_it_takes_less_memory_than_ddp():
    """DDP has all parameters and gradients; here a rank has half of both, and two blocks whole."""
    peaks = []
    for wrap in (DDP, lambda m: FSDP(m, auto_wrap_policy=ModuleWrapPolicy({Block}))):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(wrap(wide()))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.75 * peaks[0], peaks


def wide() -> nn.Module:
    return layers(12, WIDTH).to(device())


def train(model: nn.Module) -> None:
    for _ in range(STEPS):
        model(torch.randn(4096, WIDTH, device=device())).pow(2).mean().backward()
        model.zero_grad()
    torch.cuda.synchronize()
