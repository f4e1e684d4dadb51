"""sim/cli/run.py: settings in, a virtual GPU that has trained out."""

import pytest
import torch
from torch import nn

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import binds, measure, simulate
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Note, Op
from minifsdp.sim.training.models import Job

SMALL = "--model tests.sim.test_main:small --nodes 2 --batch 64 "


def options(words: str):
    return parser().parse_args(words.split())


@pytest.mark.parametrize(
    "exposed, idle, expected",
    [(0.1, 0.1, "compute"), (0.3, 0.1, "network"), (0.1, 0.3, "host"), (0.3, 0.3, "host")],
)
def test_what_binds_is_what_keeps_the_computation_waiting(exposed, idle, expected):
    assert binds({"step": 1.0, "idle": idle, "exposed communication": exposed}) == expected


def test_recomputing_takes_time_and_saves_memory():
    (no, _), (yes, _) = (measure(options(f"{SMALL} --batch 4096 --recompute {w}")) for w in YES_NO)
    assert yes["flops"] > 1.1 * no["flops"]
    assert yes["peak allocated"] < 0.8 * no["peak allocated"]


YES_NO = ("none", "full")


def test_logits_need_less_memory_fused_and_least_in_chunks():
    gpt = "--model gpt-125m --batch 8 --recompute full --loss"
    runs = {how: measure(options(f"{gpt} {how}"))[0] for how in ("whole", "fused", "chunked")}
    whole, fused, chunked = (runs[how]["peak allocated"] for how in runs)
    assert fused < 0.75 * whole and chunked < fused
    for model in ("vit-h", "tests.sim.cli.test_run:with_a_loss"):
        with pytest.raises(ValueError, match="has its own loss: --loss whole"):
            measure(options(f"--model {model} --loss fused"))


def with_a_loss() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    model.loss = nn.CrossEntropyLoss()
    return model


def test_pytorch_may_be_given_less_memory():
    figures, _ = measure(options(f"{SMALL} --memory 0.01"))
    assert not figures["fits"] and "capacity of 10.24 MiB" in figures["why"]


def test_what_does_not_fit_has_no_figures():
    figures, gpu = measure(options("--model gpt-13b --gpus 1"))
    assert not figures["fits"] and gpu is None
    assert figures["why"].startswith("CUDA out of memory. Tried to allocate")


class Curious(nn.Linear):
    def forward(self, x):
        return super().forward(x)[x[:, 0] > 0]  # how many rows are these?


def curious() -> Job:
    return Job(
        lambda: nn.Sequential(Curious(4, 4)),
        (Curious,),
        lambda model, batch, length: model(torch.zeros(batch, 4)).sum(),
    )


def test_with_offload_a_model_is_wrapped_on_the_host(monkeypatch):
    """Where there is no offload, a block is on the GPU in 32 bits, and flat beside it."""
    words = "--model gpt-1.3b --width 1024 --layers 2 --vocab 512 --batch 1 --seq 64 --offload"
    gpu = simulate(options(f"{words} yes"), steps=2)
    assert gpu.races() == [] and gpu.report()["flops"] > 0
    monkeypatch.setattr("minifsdp.sim.cli.run._train", lambda *args: None)
    peaks = [simulate(options(f"{words} {w}"), 1).allocator.allocated.peak for w in ("no", "yes")]
    assert peaks[0] > 2 * 4 * 12 * 1024**2 and peaks[1] == 0


@pytest.mark.parametrize("together, nodes", [(4, 2), (16, 4)])
def test_groups_of_more_or_less_than_a_node_share_a_model(together, nodes):
    words = f"{SMALL} --nodes {nodes} --strategy hybrid_shard"
    usual, _ = measure(options(words), steps=2)
    its, gpu = measure(options(f"{words} --shard-group {together}"), steps=2)
    assert gpu is not None
    parameters = [f["peak allocated is"]["parameters"] for f in (usual, its)]
    assert parameters[0] / parameters[1] == pytest.approx(together / 8, rel=0.02)
    assert its["fits"] and its["flops"] == usual["flops"]


def test_products_in_tf32_are_faster_and_the_switch_is_put_back():
    steps = {}
    for precision in ("fp32", "tf32", "bf16"):
        figures, _ = measure(options(f"{SMALL} --batch 4096 --precision {precision}"), steps=2)
        steps[precision] = figures["compute"]
        assert 0 < figures["MFU"] < 1 and not torch.backends.cuda.matmul.allow_tf32
    assert steps["fp32"] > 2 * steps["tf32"] > 2 * steps["bf16"]


def test_a_model_that_looks_at_values_is_refused_by_name():
    model = "tests.sim.cli.test_run:curious"
    with pytest.raises(ValueError, match=f"model '{model}' cannot run on tensors without values"):
        simulate(options(f"--model {model}"))


def test_one_hears_what_it_does():
    heard: list[str] = []
    simulate(options(SMALL), steps=2, progress=heard.append)
    assert heard == ["building the model", "step 1 of 2", "step 2 of 2"]


def test_other_constants():
    slow = simulate(options(SMALL), launch=1e-3).report()
    assert slow["idle"] > 0.5 * slow["step"] and binds(slow) == "host"


@pytest.mark.parametrize(
    "faster, slower",
    [
        ("--launch 0", "--launch 50"),
        ("--products 0.9 --launch 0", "--products 0.2 --launch 0"),
        ("--latency 1", "--latency 900"),
        ("--network 400", "--network 10"),
        ("--clip no", "--clip yes"),
        ("--optimizer sgd", "--optimizer adamw"),
    ],
)
def test_constants_that_are_options(faster, slower):
    fast, slow = (simulate(options(f"{SMALL} --batch 1024 {w}")).report() for w in (faster, slower))
    assert slow["step"] > fast["step"]


def test_as_many_steps_as_are_asked_for():
    def ends(gpu):
        return sum(isinstance(entry, Note) for entry in gpu.tape)

    assert [ends(simulate(options(f"{SMALL} --steps {n}"))) for n in (1, 4)] == [1, 4]
    assert ends(simulate(options(f"{SMALL} --steps 4"), steps=2)) == 2


def test_batches_that_are_accumulated_are_reduced_each_or_all_at_once():
    def figures(words):
        gpu = simulate(options(f"{SMALL} {words}"))
        entries, _, _ = last_step(gpu.tape)
        names = [op.name for op in entries if isinstance(op, Op)]
        return gpu.report()["flops"], names.count("_reduce_scatter_base_")

    (flops, once), each, together = map(
        figures, ("", "--accumulate 3", "--accumulate 3 --no-sync yes")
    )
    assert each == (3 * flops, 3 * once)
    assert together == (3 * flops, once)
