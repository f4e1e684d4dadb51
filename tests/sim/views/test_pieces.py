"""sim/views/pieces.py: what units do in a step, as a whole, and what they wait for."""

import pytest

from minifsdp.sim.cli.run import measure
from minifsdp.sim.figures.report import ALL_GATHER, last_step
from minifsdp.sim.tape import HOST, Buffer, Mark, Memory, Op, Phase, Wait
from minifsdp.sim.views.pieces import CAST, FREE, Piece, pieces
from minifsdp.sim.views.spans import LIMITER, STALL
from tests.sim.cli.test_run import SMALL, options

A, B = (Buffer(f"all-gather '{name}'", "unshard", 100) for name in "ab")


def op(stream, launched, start, end, label="", reads=(), writes=(), name="add", sent=0.0):
    return Op(name, label, stream, launched, start, end, [*reads], [*writes], sent=sent)


def gather(unit, buffer, launched, start, end):
    label = f"all-gather '{unit}'"
    return op("unshard", launched, start, end, label, (), (buffer,), ALL_GATHER, 100.0)


def test_pieces_are_by_unit_and_phase_and_wait_for_pieces():
    gathered, computed = Mark("unshard", 2.0), Mark("compute", 5.0)
    entries = [
        Phase("forward", 0.0, 0.0),
        op("unshard", 0.1, 0.5, 1.0, "all-gather 'a'"),
        gather("a", A, 0.2, 1.0, 2.0),
        gathered,
        Wait("compute", gathered, 0.2, 2.0, "unshard.py:1"),
        op("compute", 0.3, 2.0, 3.0, reads=(A,)),
        op("compute", 0.4, 3.0, 5.0),
        computed,
        Memory(A, True, 0.5, 0, 0, 0),
        Wait(HOST, computed, 0.6, 5.0, "limiter.py:1"),
        Phase("backward", 5.0, 5.0),
        op("compute", 5.1, 5.1, 6.0, reads=(A,)),
        Wait(HOST, None, 5.2, 6.0, "train.py:1"),
        Wait(HOST, computed, 6.5, 6.5, "limiter.py:1"),  # it is over already
    ]
    assert pieces(entries) == [
        Piece("unshard", "all-gather", "a", 0.1, 0.5, 2.0),
        Piece("compute", "forward", "a", 0.3, 2.0, 5.0, ((0, 2.0),)),
        Piece(HOST, FREE, "a", 0.5, 0.5, 0.5),
        Piece(HOST, LIMITER, "", 0.6, 0.6, 5.0, ((1, 5.0),)),
        Piece("compute", "backward", "a", 5.1, 5.1, 6.0),
        Piece(HOST, STALL, "", 5.2, 5.2, 6.0),
    ]


def test_a_gap_parts_a_piece_and_so_does_a_wait_that_lasts():
    gathered, early = Mark("unshard", 2.00001), Mark("unshard", 0.5)
    entries = [
        op("unshard", 0, 0, 2.00001, "all-gather 'b'"),
        gathered,
        op("compute", 0, 0.0, 2.0, reads=(A,)),
        Wait("compute", gathered, 0, 2.00001, "unshard.py:1"),
        op("compute", 0, 2.00001, 3.0, reads=(A,)),  # not for the gap, which is too small
        early,
        Wait("compute", early, 0, 0.5, "unshard.py:1"),
        op("compute", 0, 3.0, 4.0, reads=(A,)),
        op("compute", 0, 5.0, 6.0, reads=(A,)),
    ]
    of_a = [piece for piece in pieces(entries) if piece.lane == "compute"]
    times = [(piece.start, piece.end, piece.waits) for piece in of_a]
    assert times == [(0.0, 2.0, ()), (2.00001, 4.0, ((0, 2.00001),)), (5.0, 6.0, ())]


def test_a_collective_waits_for_the_one_before_on_another_stream():
    reduced = op("reduce", 0, 0, 3.0, "reduce 'b'", sent=1.0)
    early = op("reduce", 0, 0, 1.0, "reduce 'b'", sent=1.0)
    gathers = [gather("a", A, 0, 3.0, 4.0), gather("b", B, 0, 4.0, 5.0)]
    found = pieces([reduced, *gathers])
    assert [piece.waits for piece in found] == [(), ((0, 3.0),), ()]  # the last one: its stream
    assert [piece.waits for piece in pieces([early, *gathers])] == [(), (), ()]


def test_a_reduced_gradient_is_cast_and_the_optimizer_is_no_unit():
    chunk = Buffer("reduce 'a'", "reduce", 100)
    entries = [
        Phase("backward", 0, 0),
        op("compute", 0, 0, 1),
        op("compute", 1, 1, 2, reads=(chunk,)),
        Phase("optimizer", 2, 2),
        op("compute", 2, 2, 3),
    ]
    kinds = [(piece.kind, piece.unit) for piece in pieces(entries)]
    assert kinds == [("loss", "loss"), (CAST, "a"), ("optimizer", "optimizer")]


def test_of_a_run_no_time_is_lost_and_nobody_waits_for_what_comes_later():
    figures, gpu = measure(options(f"{SMALL} --batch 4096 --precision fp32"))
    entries, start, end = last_step(gpu.tape)
    found = pieces(entries)
    for lane in ("compute", "unshard", "reduce"):
        ops = [e for e in entries if isinstance(e, Op) and e.stream == lane]
        busy = sum(piece.end - piece.start for piece in found if piece.lane == lane)
        work = sum(op.end - op.start for op in ops)
        assert work <= busy + 1e-12 and busy < 1.05 * work
    for number, piece in enumerate(found):
        assert start <= piece.launched <= piece.start <= piece.end <= end
        assert all(on < number and until <= piece.start for on, until in piece.waits) or (
            piece.lane == HOST and all(on < number for on, _ in piece.waits)
        )
    limited = sum(p.end - p.start for p in found if p.kind == LIMITER)
    assert limited == pytest.approx(figures["host stalls in the limiter"])
    gathers = [p.unit for p in found if p.kind == "all-gather"]
    frees = [p.unit for p in found if p.kind == FREE]
    assert {*gathers} == {*frees} and len(frees) == len(gathers)
