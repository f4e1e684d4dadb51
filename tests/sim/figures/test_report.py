"""sim/figures/report.py: figures of a step, from a tape that is short enough to check by hand."""

import pytest

from minifsdp.sim.figures.report import report
from minifsdp.sim.tape import Buffer, Entry, Mark, Memory, Mistarget, Note, Op, Use, Wait


def op(stream: str, start: float, end: float, sent: float = 0, flops: float = 0) -> Op:
    return Op("name", "", stream, start, start, end, [], [], flops, sent)


def memory(allocated: int, active: int, reserved: int) -> Memory:
    return Memory(Buffer("", "compute", 1), False, 0.0, allocated, active, reserved)


STEP = [
    op("compute", 0, 2, flops=10),
    op("unshard", 1, 4, sent=100),  # one second of it is hidden
    op("unshard", 4, 5, sent=50),
    op("compute", 6, 8, flops=20),
    op("reduce", 7, 9, sent=7),
    op("upload", 0, 9),  # neither
    Wait("host", Mark("compute", 3), 1, 3, "limiter.py:60"),
    Wait("host", Mark("compute", 2), 3, 3, "limiter.py:60"),  # it was passed
    Wait("host", None, 4, 4.5, "train.py:1"),
    Wait("host", Mark("download", 5.5), 5, 5.5, "reduce.py:102"),
    Wait("compute", Mark("unshard", 5), 4, 5, "unshard.py:51"),
    memory(1, 2, 30),
    memory(10, 20, 25),
    Mistarget("not needed yet", "b", 1),
    Mistarget("already resharded", "a", 2),
]
FIGURES = {
    "step": 10,
    "compute": 4,
    "communication": 6,
    "exposed communication": 4,
    "overlap": 2,
    "idle": 2,
    "host stalls in the limiter": 2,
    "other host stalls": 1.0,
    "peak allocated": 10,
    "peak active": 20,
    "peak reserved": 30,
    "peak unsharded units": 0,
    "mistargeted prefetches": 2,
    "bytes sent": 157,
    "flops": 30,
}


def test_every_figure():
    assert report([*STEP, Note(10)]) == pytest.approx(FIGURES)


def unit(gathered: float, last_use: float, freed: float) -> tuple[list[Entry], list[Entry]]:
    """A unit's parameters, from their gather on, and their end."""
    full = Buffer("all-gather", "unshard", 1)
    times = dict(launched=gathered, start=gathered)
    gather = Op("_allgather_base_", "", "unshard", **times, end=gathered, reads=[], writes=[full])
    use = Op("mm", "", "compute", **times, end=last_use, reads=[full], writes=[])
    begin, end = (Memory(full, f, t, 0, 0, 0) for f, t in ((False, gathered), (True, freed)))
    return [begin, gather, use, Use(full, "compute", "")], [end]


@pytest.mark.parametrize(
    "first, second, most",
    [
        ((0, 1, 1), (1, 2, 2), 1),
        ((0, 1, 1), (0.9, 2, 2), 2),
        ((0, 1, 0.5), (0.6, 2, 2), 2),  # the host has freed it, the device is not done with it
        ((0, 1, 2), (1.5, 2, 2), 2),  # nobody uses it any more, but it has not been freed
    ],
)
def test_units_are_alive_until_the_host_and_the_device_are_done_with_them(first, second, most):
    (a, end_of_a), (b, end_of_b) = unit(*first), unit(*second)
    tape = [*a, *end_of_a, *b, *end_of_b]
    assert report(tape)["peak unsharded units"] == most


def test_memory_that_is_used_again_in_the_order_of_the_streams_ends_with_the_host():
    (a, end_of_a), (b, end_of_b) = unit(0, 1, 0.5), unit(0.6, 2, 2)
    tape = [e for e in (*a, *end_of_a, *b, *end_of_b) if not isinstance(e, Use)]
    assert report(tape)["peak unsharded units"] == 1


def test_it_is_of_the_last_step_that_has_ended():
    other = [op("compute", 0, 1), memory(99, 99, 99), Note(0)]
    assert report([*other, *STEP, Note(10)]) == pytest.approx(FIGURES)
    assert report([*other, *STEP, Note(10), *other[:2]]) == pytest.approx(FIGURES)


def test_without_steps_it_is_of_everything():
    assert report(STEP)["step"] == 9
    assert report([])["step"] == 0
