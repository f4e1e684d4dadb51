"""random_models.py: what nobody would think of writing by hand, with minifsdp and without."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

import minifsdp.core.reduce
import minifsdp.no_sync
from minifsdp import BackwardPrefetch, ForwardPrefetch, ShardingStrategy
from minifsdp.comm import collectives
from tests.fuzz import WORLDS, Differs, check, failure
from tests.random_models import (
    AFTER_HOOKS,
    GRADIENT_HOOKS,
    HOW,
    LEAVES,
    REFUSED,
    REFUSED_FIRST,
    Case,
    Part,
    build,
    describe,
    random_case,
)
from tests.ranks import on_ranks, run
from tests.small import replaced, travels

CASES, EACH = 204, 3


@pytest.mark.few(len(WORLDS))
@pytest.mark.parametrize("first", range(0, CASES, EACH))
def test_random_cases_are_right(first):
    world = WORLDS[first // EACH % len(WORLDS)]
    for seed in range(first, first + EACH):
        complaint = failure(seed, world)
        if complaint:
            pytest.fail(complaint, pytrace=False)


def shown(seeds):
    return [describe(random_case(seed), 4) for seed in seeds]


def test_a_seed_is_the_same_case_on_every_rank_and_every_time():
    expected = shown(range(20))
    assert len(set(expected)) == 20
    for found in (shown(range(20)), *run(shown, 2, range(20))):
        assert found == expected


def test_a_case_is_shown_on_one_screen_with_every_module():
    for seed in range(20):
        case = random_case(seed)
        lines = describe(case, 2).splitlines()
        assert len(lines) < 60
        for name, _ in build(case).named_modules(remove_duplicate=False):
            (line,) = [line for line in lines if line.strip().startswith(f"{name or '<root>'}: ")]
            assert (" <- " in line) == (name in case.borders), line


# ------------------------------------------------------------------------------- what is in them


def parts_of(part: Part, depth: int = 0) -> Iterator[tuple[Part, int]]:
    yield part, depth
    for inner in part.parts:
        yield from parts_of(inner, depth + 1)


def features(case: Case) -> Iterator[object]:
    """What a case has in it, in the words of EXPECTED."""
    for part, depth in parts_of(case.root):
        places = [place for _, place in part.plan]
        yield from (part.kind, part.shape, f"depth {depth}", *(how for how, _ in part.plan))
        yield from ["shared weights"] * bool(part.tied)
        yield from ["called twice"] * (len(places) > len(set(places)))
        yield from ["never called"] * (len(part.parts) > len(set(places)))
    with torch.device("meta"):
        module = build(case)
    for name, border in case.borders.items():
        unit, where = module.get_submodule(name), "unit" if name else "root"
        yield where, border.strategy
        yield from [f"frozen {where}"] * border.frozen + ["island"] * border.island
        yield f"a unit that is a {type(unit).__name__}"
    for name, block in module.named_modules():
        if getattr(block, "penalized", []):
            yield f"penalty {block.penalty}", "of a part" if name else "of the root"
    yield from (("hook", kind) for kind in case.gradient_hooks.values())
    yield from (("after", case.after_hooks), ("refused first", case.refused_first))
    yield "optimizer of", case.optimizer_of
    yield len({border.strategy for border in case.borders.values()}), "strategies"
    yield from (case.wrapping, ("limit", str(case.limit)), case.backward_prefetch)
    yield from (case.forward_prefetch, ("offload", case.offload), ("meta", case.meta))
    yield from (("sync", case.sync_module_states), ("input gradients", case.input_gradients))
    yield case.precision.param_dtype, case.precision.reduce_dtype
    if case.by_function:
        yield from (("by function", border.strategy) for border in case.borders.values())
        yield from (("by function", op.do) for op in case.program)
    yield from (f"modules in a list, {len(several)}" for several in case.lists)
    for name in case.compiled:
        yield ("before" if case.compiled_first else "after"), "compiled", bool(name)
    yield "buffers", case.precision.buffer_dtype
    yield "exact evaluation", case.precision.full_precision_in_eval
    yield from case.program
    for a, b in zip(case.program, case.program[1:], strict=False):
        yield f"{a.do}, {b.do}"


LOW, EXACT = torch.bfloat16, torch.float32
EXPECTED = [
    *LEAVES, "block", "again", *HOW, "reentrant", "tensor", "tuple", "dict",
    "shared weights", "called twice", "never called", "depth 4",
    *[(where, strategy) for where in ("root", "unit") for strategy in ShardingStrategy],
    *[f"a unit that is a {kind}" for kind in ("Block", "Odd", "Empty", "Tanh", "Trap", "Linear",
                                          "Penalized", "Skips")],
    *[(f"penalty {where}", whose) for where in ("in the output", "beside it")
      for whose in ("of a part", "of the root")],
    *[("hook", kind) for kind in GRADIENT_HOOKS], *[("after", kind) for kind in AFTER_HOOKS],
    *[("refused first", kind) for kind in REFUSED_FIRST],
    ("optimizer of", "model"), ("optimizer of", "module"),
    *[("refused", n) for n in range(len(REFUSED))], *[("requires_grad_", n) for n in range(4)],
    *[("zero_grad", n) for n in (3, 4, 5)],
    "frozen unit", "frozen root", "island", *[(n, "strategies") for n in (1, 2, 3, 4)],
    "classes", "custom", "hand", *BackwardPrefetch, None, *ForwardPrefetch, False,
    *[("limit", limit) for limit in ("True", "False", "1", "3", "synchronize after free")],
    *[(what, yes) for what in ("offload", "meta", "sync", "input gradients") for yes in (0, 1)],
    (None, None), (None, LOW), (LOW, None), (LOW, LOW), (LOW, EXACT),
    *[(when, "compiled", yes) for when in ("before", "after") for yes in (0, 1)],
    ("buffers", LOW), ("exact evaluation", True),
    *[("by function", s) for s in ShardingStrategy if s is not ShardingStrategy.NO_SHARD],
    *[("by function", do) for do in ("backward in no_sync", "backward that fails", "evaluate",
                                     "clip", "read", "write", "save", "load", "requires_grad_",
                                     "save states", "load states", "penalize",
                                     "backward that keeps its graph")],
    *[f"modules in a list, {n}" for n in (2, 3)],
    *[(do, n) for do in ("forward", "evaluate", "clip", "zero_grad", "read", "write")
      for n in (0, 1, 2)],
    *[(do, n) for do in ("save", "load", "save states", "load states") for n in (0, 1)],
    *[(do, 0) for do in ("step", "backward", "backward in no_sync", "forget")],
    ("backward", 1), ("forward that fails", 0), ("backward that fails", 0),
    "forward, forward", "backward, backward", "backward, forward", "forward, evaluate",
    "evaluate, backward", "backward in no_sync, forward", "backward in no_sync, backward",
    "backward in no_sync, refused", "backward in no_sync, zero_grad",
    "forward that fails, backward",
    "backward that fails, forward",
    "penalize, backward", "penalize, backward that keeps its graph",
    "backward that keeps its graph, backward", "backward that keeps its graph, backward that fails",
    "backward that keeps its graph, backward in no_sync",
]  # fmt: skip


def test_everything_occurs_in_the_cases_that_are_tried():
    found = Counter(feature for seed in range(CASES) for feature in features(random_case(seed)))
    assert not [feature for feature in EXPECTED if not found[feature]]


@pytest.mark.slow
def test_traps_go_off_and_ranks_differ_in_the_units_that_they_use():
    seen = {event for seed in range(60) for events in run(check, 2, seed) for event in events}
    rare = {
        "a forward has failed", "a backward has failed", "another rank has used more units",
        "a step came too early", "a module was compiled", "a gradient was penalized",
    }  # fmt: skip
    assert seen == rare


# ------------------------------------------------------------------------------- what they notice


def a_sum_instead_of_a_mean() -> Iterator[object]:
    all_reduce = collectives.all_reduce
    yield replaced(all_reduce, lambda flat, group, scale, *tag: all_reduce(flat, group, 1.0, *tag))
    yield travels(
        "reduce_scatter",
        lambda method: lambda comm, unit, flat, scale: method(comm, unit, flat, 1.0),
    )
    yield travels(
        "all_reduce",
        lambda method: lambda comm, unit, flat, scale, group: method(comm, unit, flat, 1.0, group),
    )


def gradients_that_are_not_added() -> Iterator[object]:
    def store(reduction):
        reduction.unit.sharded_flat_param.grad = None
        store_gradient(reduction)

    store_gradient = minifsdp.core.reduce.store_gradient
    yield replaced(store_gradient, store)


def nothing_left_by_no_sync() -> Iterator[object]:
    yield replaced(minifsdp.no_sync.store_unreduced, lambda unit, grad: None)


@pytest.mark.parametrize("mistake", [
    a_sum_instead_of_a_mean,
    pytest.param(gradients_that_are_not_added, marks=pytest.mark.slow),
    pytest.param(nothing_left_by_no_sync, marks=pytest.mark.slow),
])  # fmt: skip
@on_ranks(2)
def test_a_mistake_is_noticed(mistake):
    def is_noticed(seed: int) -> bool:
        try:
            check(seed)
        except Differs:
            return True
        return False

    with ExitStack() as stack:
        for wrong in mistake():
            stack.enter_context(wrong)
        assert any(is_noticed(seed) for seed in range(20))
    assert not is_noticed(0)
