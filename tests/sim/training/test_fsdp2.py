"""sim/training/fsdp2.py: a host that never waits, and memory used again in stream order."""

from unittest.mock import patch

import pytest

from minifsdp.sim.figures.report import ALL_GATHER
from minifsdp.sim.streams import VirtualStream
from minifsdp.sim.tape import COMPUTE, HOST, Memory, Note, Op, Use, Wait
from minifsdp.sim.training import fsdp2
from minifsdp.sim.training.history import APPROACHES
from tests.sim.cli.test_run import SMALL, options, simulate
from tests.sim.training.test_history import straight, train

UNITS = 8  # and a root without parameters of its own


@pytest.fixture(scope="module")
def gpu():
    found, _ = train(APPROACHES["FSDP2"], straight)
    return found


def passes(gpu) -> list[list]:
    """The entries of the last forward, and those of the last backward."""
    ends = [i for i, entry in enumerate(gpu.tape) if isinstance(entry, Note)]
    return [gpu.tape[ends[-3] + 1 : ends[-2]], gpu.tape[ends[-2] + 1 : ends[-1]]]


def most_alive(entries, owner: str) -> int:
    """Of the gathered units, or of their copies on the compute stream, in the order of the host: it
    gives memory away as soon as it has freed it."""
    gathers = {buffer for op in entries if name_of(op) == ALL_GATHER for buffer in op.writes}
    copies = {b for op in entries if name_of(op) == "copy_" and gathers & {*op.reads}
              for b in op.writes}  # fmt: skip
    counted = gathers if owner == "unshard" else copies
    assert {buffer.owner for buffer in counted} == {owner}
    alive = most = 0
    for entry in entries:
        if isinstance(entry, Memory) and entry.buffer in counted:
            alive += -1 if entry.freed else 1
            most = max(most, alive)
    return most


def name_of(entry) -> str:
    return entry.name if isinstance(entry, Op) else ""


def test_the_host_waits_for_nothing_but_the_loss(gpu):
    waits = [entry for entry in gpu.tape if isinstance(entry, Wait) and entry.waiter == HOST]
    assert len(waits) == 3 and not any(wait.by_limiter for wait in waits)


def test_units_that_are_gathered_and_units_that_compute(gpu):
    forward, backward = passes(gpu)
    assert (most_alive(forward, "unshard"), most_alive(forward, COMPUTE)) == (2, 1)
    assert (most_alive(backward, "unshard"), most_alive(backward, COMPUTE)) == (1, 1)
    assert gpu.report()["peak unsharded units"] == 1  # of the backward, its last part


def test_nothing_gathered_is_left_at_the_end_of_a_forward(gpu):
    forward, _ = passes(gpu)
    gathers = {buffer for op in forward if name_of(op) == ALL_GATHER for buffer in op.writes}
    changes = [e for e in forward if isinstance(e, Memory) and e.buffer in gathers]
    assert sum(not e.freed for e in changes) == sum(e.freed for e in changes) == UNITS


def test_a_gather_waits_for_the_copy_before_the_last_one(gpu):
    forward, backward = passes(gpu)
    for entries, ahead in ((forward, 2), (backward, 1)):
        gathers = [op for op in entries if name_of(op) == ALL_GATHER]
        read = {op.reads[0]: op for op in entries if name_of(op) == "copy_" and op.reads}
        copies = [next(c for b, c in read.items() if b in {*g.writes}) for g in gathers]
        assert len(copies) == UNITS
        for earlier, later in zip(copies, gathers[ahead:], strict=False):
            assert later.start >= earlier.end


def test_the_allocator_is_told_of_no_other_stream(gpu):
    gathers = {buffer for op in gpu.tape if name_of(op) == ALL_GATHER for buffer in op.writes}
    uses = [e for e in gpu.tape if isinstance(e, Use) and e.buffer in gathers]
    assert gathers and not uses


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--strategy shard_grad_op",
        "--strategy hybrid_shard",
        "--strategy no_shard",
        "--offload yes",
        "--recompute full",
        "--unit part",
        "--unit model",
        "--accumulate 2 --no-sync yes",
        "--precision fp32 --clip yes",
    ],
)
def test_no_wait_is_missing(words):
    found = simulate(options(f"{SMALL} --batch 2048 --engine fsdp2 {words}"))
    assert found.races() == []


def test_without_its_waits_a_gather_overwrites_what_has_not_been_read():
    def forgetful(self, event):
        if not (self._name == "unshard" and waiting):
            wait_event(self, event)

    wait_event, let_go, waiting = VirtualStream.wait_event, fsdp2.StreamOrdered.let_go, []

    def without(self):
        waiting.append(True)
        let_go(self)
        waiting.clear()

    with (
        patch.object(VirtualStream, "wait_event", forgetful),
        patch.object(fsdp2.StreamOrdered, "let_go", without),
    ):
        found, _ = train(APPROACHES["FSDP2"], straight)
    assert found.races()


def test_what_it_copies_are_gathered_parameters_too():
    """Not activations, though it is the compute stream that takes memory for them."""
    run = "--model gpt-125m --batch 2 --seq 128 --strategy shard_grad_op "
    ours, its = (
        simulate(options(run + words)).report()["peak allocated is"]
        for words in ("", "--engine fsdp2")
    )
    for kind in ("gathered parameters", "activations"):
        assert its[kind] == pytest.approx(ours[kind], rel=0.05)


def test_it_needs_little_more_memory_than_a_limit_and_no_wait():
    run = "--model gpt-125m --batch 8 --seq 512 "
    two, none, ordered = (
        simulate(options(run + words)).report()
        for words in ("--limit true", "--limit none", "--engine fsdp2")
    )
    assert two["host stalls in the limiter"] > 0 == ordered["host stalls in the limiter"]
    assert ordered["peak reserved"] < (two["peak reserved"] + none["peak reserved"]) / 2
