"""sim/figures/memory_report.py: what the memory of a step is."""

import pytest
import torch

from minifsdp.sim import cluster
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.figures.memory_report import lives, peak_report
from minifsdp.sim.tape import Buffer, Entry, Memory, Note, Op, Phase
from tests.sim.cli.test_run import SMALL, options

MiB = 2**20


def buffer(label: str = "", kind: str = "") -> Buffer:
    return Buffer(label, "compute", 1, kind)


def tape(*entries: Entry | tuple[Buffer, int]) -> list[Entry]:
    """With memory as buffers and what they change."""
    level, made = 0, []
    for time, entry in enumerate(entries):
        if isinstance(entry, tuple):
            level += entry[1]
            entry = Memory(entry[0], entry[1] < 0, float(time), level, level, level)
        made.append(entry)
    return made


def op(name: str, label: str, reads: list[Buffer], writes: list[Buffer]) -> Op:
    return Op(name, label, "compute", 0.0, 0.0, 0.0, reads, writes)


def test_each_kind_is_told_by_what_is_known_of_it():
    shard, old, gathered = buffer("ones", "parameters"), buffer("ones"), buffer("all-gather 'a'")
    kept, passing, product = buffer("mm"), buffer("mm"), buffer("mm")
    layer, flat, result = buffer("mm"), buffer("cat"), buffer("reduce 'a'")
    entries = tape(
        (shard, 1), (old, 2), Note(0), Phase("forward", 0, 0),
        (gathered, 4), (kept, 8), (passing, 16), (passing, -16), Phase("backward", 0, 0),
        (product, 32), (layer, 64), (flat, 128), op("cat", "", [layer], [flat]),
        (result, 256), op("reduce_scatter", "reduce 'a'", [flat], [result]),
        (kept, -8), (gathered, -4), Note(20),
    )  # fmt: skip
    assert peak_report(entries)["peak allocated is"] == {
        "parameters": 1,
        "gathered parameters": 4,
        "unsharded gradients": 64 + 128 + 256,
        "kept from earlier steps": 2,
        "activations": 8,
        "temporary": 32,
    }
    spans = {life.buffer: (life.begin, life.end) for life in lives(entries)}
    assert spans[shard] == (0, 20) and spans[kept] == (5, 15) and spans[flat] == (11, 20)


def test_a_step_in_which_nothing_was_allocated_has_no_peak():
    assert peak_report(tape(Note(0), Phase("forward", 0, 0), Note(1))) == {
        "peak allocated is": {},
        "peak is in": "",
    }


def test_what_ended_before_the_step_is_not_there():
    entries = tape((a := buffer(), 1), (a, -1), Note(0), (buffer(), 2), Note(9))
    assert [life.nbytes for life in lives(entries)] == [2]


@pytest.mark.parametrize(
    "label, before, after, words",
    [
        ("mm", "a", "b", "backward, mm of b"),
        ("gelu", "a", "", "backward, gelu of a"),
        ("add", "", "", "backward, add of loss"),
        ("all-gather 'c'", "a", "", "backward, all-gather 'c'"),
    ],
)
def test_the_moment_of_the_peak(label, before, after, words):
    def unit(name: str) -> list[Buffer]:
        return [buffer(f"all-gather '{name}'")] if name else []

    peak = buffer(label)
    entries = tape(
        Phase("forward", 0, 0), op("mm", "", unit("x"), []), Phase("backward", 0, 0),
        op("mm", "", unit(before), []), (peak, 5), op(label, "", unit(after), [peak]),
        op("mm", "", unit("y"), []), Note(9),
    )  # fmt: skip
    assert peak_report(entries)["peak is in"] == words


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "--batch 4096",
        "--strategy no_shard",
        "--strategy hybrid_shard --precision bf16-fp32",
        "--precision fp32 --offload yes",
        "--recompute full --batch 4096",
        "--strategy shard_grad_op --unit part",
    ],
)
def test_it_adds_up_to_the_peak(settings):
    figures = simulate(options(f"{SMALL} {settings}")).report()
    assert sum(figures["peak allocated is"].values()) == figures["peak allocated"] > 0


def test_shards_are_as_large_as_they_are():
    """Four blocks of 8.4 M parameters on 16 ranks, in fp32, and two states of each."""
    gpu = simulate(options(SMALL))
    by_kind = dict.fromkeys(("parameters", "optimizer", "gradients"), 0)
    for life in lives(gpu.tape):
        if life.kind in by_kind:
            by_kind[life.kind] += life.nbytes
    shard = 4 * (8 * 1024**2 + 7 * 1024) * 4 / 16
    assert by_kind["parameters"] == pytest.approx(shard, rel=0.01)
    assert by_kind["optimizer"] == pytest.approx(2 * shard, rel=0.01)
    assert by_kind["gradients"] == pytest.approx(shard, rel=0.01)


def test_activations_are_what_autograd_keeps():
    with cluster() as gpu:
        weight = torch.ones(1024, 1024, requires_grad=True)
        x = torch.ones(4096, 1024)
        gpu.step()
        gpu.phase("forward")
        loss = (x @ weight).exp().sum()  # keeps what exp has made, 16 MiB
        gpu.phase("backward")
        loss.backward()
        gpu.step()
    kinds = [(life.kind, life.nbytes // MiB) for life in lives(gpu.tape) if life.nbytes >= MiB]
    assert kinds[:2] == [("kept from earlier steps", 4), ("kept from earlier steps", 16)]
    assert kinds.count(("activations", 16)) == 1 and ("temporary", 16) in kinds
