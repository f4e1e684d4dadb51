"""sim/report.py: figures of a step, from a tape that is short enough to check by hand."""

import pytest

from minifsdp.sim.report import report
from minifsdp.sim.tape import Buffer, Mark, Memory, Note, Op, Wait


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
    Wait("compute", Mark("unshard", 5), 4, 5, "unshard.py:51"),
    memory(1, 2, 30),
    memory(10, 20, 25),
]
FIGURES = {
    "step": 10,
    "compute": 4,
    "communication": 6,
    "exposed communication": 4,
    "overlap": 2,
    "idle": 2,
    "host stalls in the limiter": 2,
    "other host stalls": 0.5,
    "peak allocated": 10,
    "peak active": 20,
    "peak reserved": 30,
    "bytes sent": 157,
    "flops": 30,
}


def test_every_figure():
    assert report([*STEP, Note(10)]) == pytest.approx(FIGURES)


def test_it_is_of_the_last_step_that_has_ended():
    other = [op("compute", 0, 1), memory(99, 99, 99), Note(0)]
    assert report([*other, *STEP, Note(10)]) == pytest.approx(FIGURES)
    assert report([*other, *STEP, Note(10), *other[:2]]) == pytest.approx(FIGURES)


def test_without_steps_it_is_of_everything():
    assert report(STEP)["step"] == 9
    assert report([])["step"] == 0
