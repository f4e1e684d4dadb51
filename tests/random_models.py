"""Random models, settings and training programs: what nobody would think of writing by hand.

    case = random_case(7)         # the same on every rank, every time
    print(describe(case, 2))      # what it is, in a world of two ranks
    build(case)                   # its module, plain

A case is plain data. It says what the module looks like, which of its modules become units, with
what settings, and which operations a training program does with it. tests/fuzz.py does them with
minifsdp and without, and compares.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp import BackwardPrefetch, ForwardPrefetch, MixedPrecision, ShardingStrategy

# ----------------------------------------------------------------------- what models are made of


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width + 4), nn.Tanh(), nn.Linear(width + 4, width))


class Odd(nn.Module):
    """Three elements, so that some ranks have none; one of them 0-d, and an empty parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(())), nn.Parameter(torch.randn(2))
        self.nothing = nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift[0] - self.shift[1] + self.nothing.sum()


class Empty(nn.Module):
    """Has a parameter, which has no elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(width, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class Spare(nn.Module):
    """Uses some of its parameters, and not the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class Centered(nn.Module):
    """Has buffers of two kinds, which every forward in training changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).to(self.mean.dtype)
        return (x - self.mean.to(x.dtype)) * self.weight


class Viewed(nn.Module):
    """Its output is a view, which a block may change in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unsqueeze(0).squeeze(0)


class Keeps(nn.Module):
    """Keeps what it has computed in an attribute, and returns little of it."""

    kept: Tensor | None = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 0.5  # first, so that in a backward the layer's turn comes before it is reached
        self.kept = self.layer(x)
        return y


class Penalized(nn.Module):
    """Reads its own parameters: their dtype, and the sum of their squares, for the loss."""

    kept: Tensor | None = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = sum(p.pow(2).sum() for p in self.parameters())
        x = x.to(next(self.parameters()).dtype)
        return nn.functional.linear(x, self.weight, self.bias)


class Skips(nn.Module):
    """Hands on what it was given, for a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return torch.tanh(self.layer(x)), [x]


class Boom(Exception):  # noqa: N818
    """What a trap raises."""


class Trap(nn.Module):
    """Does nothing, until it is armed."""

    armed = ""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if Trap.armed == "forward":
            raise Boom
        return _Trap.apply(x)

    @staticmethod
    @contextmanager
    def arm(when: str) -> Iterator[None]:
        """Inside, traps raise in their "forward", or in their "backward"."""
        Trap.armed = when
        try:
            yield
        finally:
            Trap.armed = ""


class _Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Trap.armed == "backward":
            raise Boom
        return grad


LEAVES = {
    "linear": lambda width: nn.Linear(width, width),
    "mlp": Mlp,
    "layer norm": nn.LayerNorm,
    "batch norm": nn.BatchNorm1d,
    "tanh": lambda width: nn.Tanh(),
    "dropout": lambda width: nn.Dropout(0.2),
    "odd": Odd,
    "empty": Empty,
    "spare": Spare,
    "centered": Centered,
    "trap": Trap,
    "viewed": Viewed,
    "keeps": Keeps,
    "penalized": Penalized,
    "skips": Skips,
}


class Block(nn.Sequential):
    """Calls the parts in it as its plan says: once, several times, or never.

    It may add a penalty for the parameters of its parts, of those that are in the same unit.
    """

    def __init__(self, part: "Part", parts: list[nn.Module]) -> None:
        super().__init__(*parts)
        self.plan, self.shape, self.tied = part.plan, part.shape, part.tied
        self.penalty, self.penalized = part.penalty, list[int]()
        self.viewed = [isinstance(inner, Viewed) for inner in parts]
        self.keeping = [isinstance(inner, (Keeps, Penalized)) for inner in parts]
        self.skipping = [isinstance(inner, Skips) for inner in parts]
        for place in self.tied[1:]:
            self[place].weight = self[self.tied[0]].weight

    def forward(self, x: Tensor) -> Any:
        side: list[Tensor] = []
        for how, place in self.plan:
            part, again = self[place], how in ("checkpoint", "reentrant")
            try:
                y = checkpoint(part, x, use_reentrant=how == "reentrant") if again else part(x)
            except Boom:
                if how != "try":
                    raise
                continue
            y, more = split(y)
            side += more
            given = more[0] if self.skipping[place] else x
            if self.keeping[place]:
                side.append(part.kept)
            if how == "aside":
                side.append(y)
            elif how != "drop":
                if how == "add" and self.viewed[place]:
                    y += x
                    y /= 2
                    x = y
                else:
                    x = (given + y) / 2 if how == "add" else y
        penalty = sum(p.pow(2).sum() for place in self.penalized for p in self[place].parameters())
        if isinstance(penalty, Tensor):
            if self.penalty == "in the output":
                x = x + 0.01 * penalty
            else:
                side.append(penalty)
        return {"tensor": x, "tuple": (x, side), "dict": {"side": side, "main": x}}[self.shape]


def split(output: Any) -> tuple[Tensor, list[Tensor]]:
    """What a part has returned: its main tensor, and those beside it."""
    if isinstance(output, Tensor):
        return output, []
    return (output["main"], output["side"]) if isinstance(output, dict) else output


# ---------------------------------------------------------------------------------- a case, as data

HOW = ("then", "add", "checkpoint", "aside", "drop", "try")
"""How a block calls a part: x = f(x); x = (x + f(x)) / 2, with the x that f hands on, if it does;
x = f(x), recomputed in the backward ("reentrant": by a backward inside of that one); f(x) is
returned beside x; f(x) goes nowhere; x = f(x), unless a trap goes off in it."""

PENALTIES = ("", "", "", "in the output", "beside it")
"""Where a block adds the squares of parameters, if it does."""

GRADIENT_HOOKS = ("look", "scale", "clamp", "in place")
"""What a hook does to a gradient before it is reduced."""

AFTER_HOOKS = ("", "", "", "", "look", "scale", "step", "torch's step")
"""What hooks do when all gradients are there. The last two are optimizers, fused into the
backward: the user's own, and torch's."""

REFUSED_FIRST = ("", "", "", "hook", "post hook", "optimizer")
"""What holds a parameter before wrapping, so that a first attempt to wrap is refused."""

REFUSED = (
    "data of a parameter",
    "freezing a parameter",
    "another parameter",
    "a parameter too many",
    "another module",
    "tying",
    "another shape",
    "a step that comes too early",
)
"""What a program may try between its operations, and is refused. It changes nothing. The last one
is refused only after a backward in no_sync."""


class Part(NamedTuple):
    """One module."""

    kind: str  # of LEAVES, or "block", or "again": a part that is somewhere else already
    parts: tuple["Part", ...] = ()
    plan: tuple[tuple[str, int], ...] = ()  # how to call which of the parts
    shape: str = "tensor"  # of what the block returns
    tied: tuple[int, ...] = ()  # parts that have one weight in common
    penalty: str = ""  # of PENALTIES: where a block adds one for parameters of its unit
    which: int = 0  # of an "again": in the order in which parts are made


class Border(NamedTuple):
    """What kind of unit a module is."""

    strategy: ShardingStrategy
    grid: int = 0  # with a hybrid strategy: which of the ways to arrange the ranks
    frozen: bool = False
    island: bool = False  # in full precision, among others that are not
    chosen: bool = True  # by the user; if not, minifsdp makes it an island by itself


class Op(NamedTuple):
    """One thing that a training program does."""

    do: str
    number: int = 0  # of a backward: which of the graphs; of anything else: which variant


@dataclass(frozen=True)
class Case:
    """What to build, how to wrap it, what to do with it."""

    seed: int
    width: int
    root: Part
    borders: dict[str, Border]  # by the name of the module; the root's is ""
    wrapping: str  # by "classes", a "custom" policy or "hand"
    classes: tuple[type[nn.Module], ...]
    limit: bool | int | str
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: ForwardPrefetch | bool
    precision: MixedPrecision
    offload: bool
    sync_module_states: bool  # ranks begin with different values, and get those of the first
    meta: bool  # built without memory
    input_gradients: bool
    optimizer_of: str  # the "model", or the "module" in it
    gradient_hooks: dict[str, str]  # of GRADIENT_HOOKS, by the name of the unit
    after_hooks: str  # of AFTER_HOOKS, for all units
    refused_first: str  # of REFUSED_FIRST
    program: tuple[Op, ...]
    in_rows: bool = False  # and not in chunks
    by_function: bool = False  # sharded by fully_shard, and not wrapped
    lists: tuple[tuple[str, ...], ...] = ()  # names of modules that fully_shard makes one unit of
    compiled: tuple[str, ...] = ()  # names of modules that are compiled in place
    compiled_first: bool = False  # before they are sharded, and not after


def build(case: Case) -> nn.Module:
    """The module, plain, with random values."""
    module = _build(case.root, case.width, [])
    units = {module.get_submodule(name) for name in case.borders}
    for block in module.modules():
        if isinstance(block, Block) and block.penalty:
            parts = enumerate(block)
            block.penalized = [at for at, part in parts if units.isdisjoint(part.modules())]
    for name, param in module.named_parameters():
        param.requires_grad_(not case.borders[unit_around(name, case.borders)].frozen)
    return module


def unit_around(name: str, units: Iterable[str]) -> str:
    """The innermost of the units that a module, parameter or buffer is in."""
    return max((u for u in units if not u or f"{name}.".startswith(f"{u}.")), key=len)


def unit_names(case: Case) -> dict[str, str]:
    """Of each module that is given to minifsdp: what its unit is called."""
    names = {name: name for name in case.borders}
    for several in case.lists:
        names |= dict.fromkeys(several, ", ".join(several))
    return names


def ranks_in_a_row(border: Border, world: int) -> int:
    """How many ranks share the parameters of a hybrid unit."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return divisors[border.grid % len(divisors)]


def _build(part: Part, width: int, made: list[nn.Module]) -> nn.Module:
    if part.kind == "again":
        return made[part.which]
    if part.kind == "block":
        module: nn.Module = Block(part, [_build(inner, width, made) for inner in part.parts])
    else:
        module = LEAVES[part.kind](width)
    made.append(module)
    return module


# ------------------------------------------------------------------------------------------ chance


def random_case(seed: int) -> Case:
    """One of very many."""
    rng = random.Random(seed)
    width, root = rng.randint(2, 7), _random_block(rng, 4, [], is_root=True)
    with torch.device("meta"):
        module = _build(root, width, [])
    wrapping, precision = rng.choice(("classes", "custom", "hand")), _random_precision(rng)
    classes, units = _random_units(rng, module, wrapping == "classes")
    borders = _random_borders(rng, module, units, wrapping, precision)
    freezes = rng.random() < 0.2
    variants = DIFFERENT + 1 if _losses_may_differ(module, borders) and not freezes else DIFFERENT
    after_hooks = rng.choice(AFTER_HOOKS)
    fused = "step" in after_hooks
    case = Case(
        seed=seed,
        width=width,
        root=root,
        borders=borders,
        wrapping=wrapping,
        classes=classes,
        limit=rng.choice((True, False, 1, 2, 3, "synchronize after free")),
        backward_prefetch=rng.choice((*BackwardPrefetch, None)),
        forward_prefetch=rng.choice((*ForwardPrefetch, False)),
        precision=precision,
        offload=rng.random() < 0.2,
        sync_module_states=rng.random() < 0.3,
        meta=rng.random() < 0.3,
        input_gradients=rng.random() < 0.4,
        optimizer_of=rng.choice(("model", "module")),
        gradient_hooks=_random_hooks(rng, borders),
        after_hooks=after_hooks,
        refused_first=rng.choice(REFUSED_FIRST),
        program=tuple(op for _ in range(3) for op in _random_step(rng, variants, freezes, fused)),
    )
    divisible = all(param.dim() for param in module.parameters())  # what has no rows is refused
    case = replace(case, in_rows=divisible and not after_hooks and rng.random() < 0.7)
    islands = any(border.island for border in borders.values())
    if case.in_rows and not islands and rng.random() < 0.6:
        case = _by_function(case)
        # Whose several calls are those of its modules. See _losses_may_differ.
        alike = Op("forward", DIFFERENT) not in case.program
        case = _with_lists(rng, case, module) if alike and rng.random() < 0.6 else case
    case = case if fused else replace(case, program=_with_states(rng, case.program))
    if rng.random() < 0.08:  # seldom: it takes seconds
        case = _with_compiled(rng, case, module)
    # What is drawn from here on leaves all of the above as it was before there was any of it.
    if rng.random() < 0.3 and Op("forward", DIFFERENT) not in case.program:
        case = _with_reentrant(rng, case, module)
    case = case if fused else _with_more_backwards(rng, case)
    return _with_kept_losses_at_once(case)


def _by_function(case: Case) -> Case:
    """The same for ``fully_shard``, as far as it has what the wrapper has."""
    sharded = ShardingStrategy.FULL_SHARD
    alone = {n: b for n, b in case.borders.items() if b.strategy is ShardingStrategy.NO_SHARD}
    dtypes = case.precision.param_dtype, case.precision.reduce_dtype
    return replace(
        case,
        by_function=True,
        borders=case.borders | {name: b._replace(strategy=sharded) for name, b in alone.items()},
        precision=MixedPrecision(*dtypes),
        sync_module_states=False,
        meta=False,
        refused_first="",
    )


def _with_lists(rng: random.Random, case: Case, root: nn.Module) -> Case:
    """Some units become one, of those that are in the same unit, and in one place only."""
    places = Counter(module for _, module in root.named_modules(remove_duplicate=False))
    inside: dict[tuple[str, bool], list[str]] = {}
    for name, border in case.borders.items():
        if name and places[root.get_submodule(name)] == 1:
            around = unit_around(name, [unit for unit in case.borders if unit != name])
            inside.setdefault((around, border.frozen), []).append(name)
    borders, lists = dict(case.borders), []
    for names in inside.values():
        chosen = [name for name in names if rng.random() < 0.7]
        if len(chosen) > 1:
            lists.append(tuple(chosen))
            borders |= dict.fromkeys(chosen, borders[chosen[0]])
    return replace(case, borders=borders, lists=tuple(lists))


def _with_compiled(rng: random.Random, case: Case, root: nn.Module) -> Case:
    """Some modules are compiled, or the root is. Not what changes a buffer: torch then runs no
    checkpoint of it in a backward. Not a trap that will be armed: what is compiled does not see it.
    """
    armed = any("fails" in op.do for op in case.program)
    left_out = Centered, nn.BatchNorm1d, *[Trap] * armed
    names = [
        name
        for name, module in root.named_modules()
        if not any(isinstance(part, left_out) for part in module.modules())
    ]
    whole = "" in names and rng.random() < 0.8
    chosen = [""] if whole else [name for name in names if rng.random() < 0.4]
    return replace(case, compiled=tuple(chosen), compiled_first=rng.random() < 0.5)


def _with_reentrant(rng: random.Random, case: Case, root: nn.Module) -> Case:
    """The same, in which some checkpoints are of torch's older kind. That one finds tensors alone
    or in a tuple, and no others. Each runs a backward of its own, so gradients of units that are
    called several times would be added up in another order."""
    calls: Counter[nn.Module] = Counter()
    count_calls(root, calls)
    units = {root.get_submodule(name) for name in case.borders}

    def changed(part: Part, module: nn.Module, unit: nn.Module) -> Part:
        unit = module if module in units else unit
        inner = zip(part.parts, module._modules.values(), strict=False)  # of a leaf there are none
        parts = [changed(of, child, unit) for of, child in inner]
        plan = []
        for how, place in part.plan:
            found = parts[place].kind not in ("skips", "again") and parts[place].shape == "tensor"
            once = all(calls[m] == 1 for m in (unit, *units.intersection(module[place].modules())))
            older = how == "checkpoint" and found and once and rng.random() < 0.7
            plan.append(("reentrant" if older else how, place))
        return part._replace(parts=tuple(parts), plan=tuple(plan))

    return replace(case, root=changed(case.root, root, root))


def _with_more_backwards(rng: random.Random, case: Case) -> Case:
    """The same, in which some graphs have two backwards, and some losses have a penalty for the
    gradient of the input, which goes through the graph a first time."""
    # torch refuses to differentiate a reentrant checkpoint for an input alone.
    penalizes = case.input_gradients and not _calls(case.root, "reentrant") and rng.random() < 0.5
    program = list[Op]()
    for op, forward in zip(case.program, _forwards(case), strict=True):
        if op.do.startswith("backward"):
            alike = case.program[forward].number != DIFFERENT
            if penalizes and alike and rng.random() < 0.3:
                program.append(Op("penalize", op.number))
            if rng.random() < 0.15:
                program.append(Op("backward that keeps its graph", op.number))
        program.append(op)
    return replace(case, program=tuple(program))


def _with_kept_losses_at_once(case: Case) -> Case:
    """A loss that comes from attributes alone tells nobody that its backward begins. With a
    checkpoint on the way it may need parameters first, and finds what the operation before has
    left: in rows DTensors, or the precision of an evaluation (tutorials/reference/limits.md). So
    nothing comes between its forward and its backward. Else it is a loss of all outputs."""
    program = list(case.program)
    late = _calls(case.root, "checkpoint", "reentrant")
    if late and (case.in_rows or case.precision.full_precision_in_eval):
        for at, forward in enumerate(_forwards(case)):
            if at > forward + 1 > 0 and program[forward].number == KEPT:
                program[forward] = Op("forward", ALL)
    return replace(case, program=tuple(program))


def _forwards(case: Case) -> list[int]:
    """Of each operation on a graph: where in the program its forward is. -1 of all others."""
    found, graphs = list[int](), list[int]()
    for at, op in enumerate(case.program):
        on_graph = op.do.startswith("backward") or op.do in ("forget", "penalize")
        found.append(graphs[op.number] if on_graph else -1)
        if op.do == "forward":
            graphs.append(at)
        elif op.do == "step" or ("step" in case.after_hooks and op.do in _STEPPING):
            graphs.clear()
        elif on_graph and op.do not in ("penalize", "backward that keeps its graph"):
            del graphs[op.number]
    return found


def _calls(part: Part, *ways: str) -> bool:
    """Whether a block in it calls something in one of these ways."""
    return any(how in ways for how, _ in part.plan) or any(_calls(p, *ways) for p in part.parts)


def _random_part(rng: random.Random, depth: int, made: list[Part]) -> Part:
    # Not a Linear again: its weight may be another one's too, and two units cannot share it.
    reusable = [which for which, part in enumerate(made) if part.kind != "linear"]
    if reusable and rng.random() < 0.08:
        return Part("again", which=rng.choice(reusable))
    if depth and len(made) < 12 and rng.random() < 0.5:
        return _random_block(rng, depth, made)
    made.append(Part(rng.choices(list(LEAVES), (4, 3, 2, 2, 1, 1, 2, 1, 2, 2, 4, 3, 2, 2, 2))[0]))
    return made[-1]


def _random_block(rng: random.Random, depth: int, made: list[Part], is_root: bool = False) -> Part:
    parts = [_random_part(rng, depth - 1, made) for _ in range(rng.randint(1, 3) + is_root)]
    places = [place for place in range(len(parts)) if rng.random() < 0.9]
    places += [place for place in places if rng.random() < 0.15]
    plan = [(rng.choices(HOW, (10, 4, 3, 5, 1, 1))[0], place) for place in places]
    if is_root:  # so that there always is something to differentiate
        parts.append(Part(rng.choice(("linear", "mlp"))))
        made.append(parts[-1])
        plan.append(("then", len(parts) - 1))
    linears = [place for place, part in enumerate(parts) if part.kind == "linear"]
    tied = tuple(linears) if len(linears) > 1 and rng.random() < 0.7 else ()
    shape = rng.choice(("tensor", "tuple", "dict"))
    penalty = rng.choice(PENALTIES)
    made.append(Part("block", tuple(parts), tuple(plan), shape, tied, penalty=penalty))
    return made[-1]


def _random_hooks(rng: random.Random, borders: dict[str, Border]) -> dict[str, str]:
    """For some of the units that are trained."""
    share = rng.choice((0, 0, 0.5, 1))
    trained = [name for name, border in borders.items() if not border.frozen]
    return {name: rng.choice(GRADIENT_HOOKS) for name in trained if rng.random() < share}


def _random_precision(rng: random.Random) -> MixedPrecision:
    low = torch.bfloat16
    if rng.random() < 0.5:
        return MixedPrecision(reduce_dtype=rng.choice((None, None, None, low)))
    return MixedPrecision(
        param_dtype=low,
        reduce_dtype=rng.choice((None, low, torch.float32)),
        buffer_dtype=rng.choice((None, low)),
        keep_low_precision_grads=rng.random() < 0.2,
        cast_forward_inputs=rng.random() < 0.3,
        full_precision_in_eval=rng.random() < 0.3,
    )


def _random_units(
    rng: random.Random, root: nn.Module, by_class: bool
) -> tuple[tuple[type[nn.Module], ...], set[nn.Module]]:
    """Modules for the user to wrap; and their classes, if those are what he names."""
    modules = [m for m in root.modules() if m is not root]
    tied = {m[place] for m in root.modules() if isinstance(m, Block) for place in m.tied}
    kinds = dict.fromkeys(type(m) for m in modules if not (tied and type(m) is nn.Linear))
    classes = [kind for kind in kinds if rng.random() < 0.4]
    units = {m for m in modules if rng.random() < 0.4 and m not in tied}
    while True:
        if by_class:
            units = {m for m in modules if type(m) in classes}
        straddling = _in_two_units(root, units)
        if straddling is None:
            return tuple(classes) if by_class else (), units
        classes.append(type(straddling))
        units.add(straddling)


def _in_two_units(root: nn.Module, units: set[nn.Module]) -> nn.Module | None:
    """A module in two places, with parameters, around which the two have different units."""
    found: dict[nn.Module, nn.Module] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        steps = name.split(".")
        around = [root.get_submodule(".".join(steps[:n])) for n in range(len(steps) + 1)]
        unit = next((m for m in reversed(around) if m in units), root)
        if found.setdefault(module, unit) is not unit and list(module.parameters()):
            return module
    return None


def _random_borders(
    rng: random.Random,
    root: nn.Module,
    units: set[nn.Module],
    wrapping: str,
    precision: MixedPrecision,
) -> dict[str, Border]:
    strategies, freezes = list(ShardingStrategy), rng.random() < 0.25
    low, alike = precision.param_dtype is not None, wrapping == "classes" or rng.random() < 0.5
    first = Border(rng.choice(strategies), rng.randrange(3), freezes and rng.random() < 0.3)
    borders = {"": first}
    for name, module in root.named_modules():
        norm = low and isinstance(module, nn.BatchNorm1d)
        if module is root or not (norm or module in units):
            continue
        leaf, chosen = not any(module.children()), wrapping == "hand" or module in units
        same = alike or not chosen
        borders[name] = Border(
            strategy=first.strategy if same else rng.choice(strategies),
            grid=first.grid if same else rng.randrange(3),
            frozen=freezes and rng.random() < 0.4,
            island=norm or (low and leaf and wrapping != "classes" and rng.random() < 0.15),
            chosen=chosen,
        )
    return borders


def _losses_may_differ(root: nn.Module, borders: dict[str, Border]) -> bool:
    """Whether ranks may use different outputs. They agree on which units get a gradient: not on
    which frozen ones are needed, nor on from which of several calls a unit gets it, nor on when
    a checkpoint runs units again."""
    calls: Counter[nn.Module] = Counter()
    count_calls(root, calls)
    once = all(calls[root.get_submodule(name)] <= 1 for name in borders)
    again = [
        part
        for block in root.modules()
        if isinstance(block, Block)
        for how, place in block.plan
        if how == "checkpoint" and list((part := block[place]).parameters())
    ]
    units = {root.get_submodule(name) for name in borders}
    hidden = any(not units.intersection(part.modules()) <= {part} for part in again)
    hidden |= not units.issuperset(again)  # a part of a unit, which some ranks may free early
    return once and not hidden and not any(border.frozen for border in borders.values())


def count_calls(module: nn.Module, calls: "Counter[nn.Module]") -> None:
    calls[module] += 1
    planned = isinstance(module, Block)
    for part in [module[place] for _, place in module.plan] if planned else module.children():
        count_calls(part, calls)


def _random_step(rng: random.Random, variants: int, freezes: bool, fused: bool) -> Iterator[Op]:
    """What happens until the optimizer has stepped.

    Args:
        variants: which there are of a forward.
        freezes: parameters may be frozen, and thawed.
        fused: the optimizer steps in the backward, after which no older graph can be used.
    """
    if freezes and rng.random() < 0.6:
        yield Op("requires_grad_", rng.randrange(4))
    for _ in range(rng.randint(0, 2)):
        yield Op(rng.choice(("read", "write", "save", "load")), rng.randrange(3))
    graphs: list[int] = []  # forwards that have had no backward yet: their variants
    for _ in range(rng.randint(0, 5)):
        may = ["forward"] * 4 + ["evaluate", "forward that fails", "read", "save"]
        with_graph = ["backward", "backward in no_sync", "backward that fails"] * 2 + ["forget"]
        do = rng.choice(may + ["zero_grad"] * 2 + ["refused"] + with_graph * bool(graphs))
        if do in with_graph:
            number = rng.randrange(len(graphs))
            if graphs.pop(number) == DIFFERENT and do == "backward that fails":
                do = "backward"  # it would not fail on all ranks
            if fused and do in _STEPPING:
                graphs.clear()
        elif do == "forward":
            number = rng.randrange(variants)
            graphs.append(number)
        elif do == "refused":
            number = rng.randrange(len(REFUSED) - 1)
        elif do == "zero_grad":
            number = rng.randrange(6)
            if number % 3 == 1 and variants > DIFFERENT:
                number -= 1  # some ranks may have left something in no_sync: only they get zeros
        else:
            number = rng.randrange(3)
        yield Op(do, number)
        if do == "backward in no_sync" and not fused and rng.random() < 0.5:
            yield Op("refused", len(REFUSED) - 1)
    if not graphs:
        yield Op("forward", rng.randrange(variants))
    yield Op("backward")  # after which nothing of no_sync is left
    if rng.random() < 0.4:
        yield Op("clip", rng.randrange(3))
    yield Op("step")
    yield Op("zero_grad", rng.randrange(6))


_STEPPING = ("backward", "backward that fails")
"""What steps, if the optimizer is fused. The second one need not meet a trap."""


def _with_states(rng: random.Random, program: Iterable[Op]) -> tuple[Op, ...]:
    """The same, in which the optimizer's state is looked at or changed at times."""
    found = []
    for op in program:
        found.append(op)
        if rng.random() < 0.05:
            found.append(Op(rng.choice(("save states", "load states")), rng.randrange(2)))
    return tuple(found)


ALL, MAIN, KEPT, DIFFERENT = range(4)
"""What is in the loss, as the variant of a forward says: all outputs, the main one, only what is
kept in attributes, or the main output on some ranks and the other outputs on the others."""


# ------------------------------------------------------------------------------------ in words


def describe(case: Case, world: int) -> str:
    """What was drawn, on one screen."""
    lines = [f"seed {case.seed}, {world} ranks, width {case.width}, wrapped by {case.wrapping}"]
    with torch.device("meta"):
        root = build(case)
    names: dict[nn.Module, str] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        line = "  " * (name.count(".") + 2 - (not name)) + (name or "<root>") + ": "
        if module in names:
            line += f"{names[module]} again"
        else:
            names[module] = name
            line += type(module).__name__
            if isinstance(module, Block):
                tied = f", tied {module.tied}" * bool(module.tied)
                penalty = f", penalty {module.penalty}" * bool(module.penalized)
                plan = ", ".join(f"{how} {place}" for how, place in module.plan)
                line += f"({plan} -> {module.shape}{tied}{penalty})"
            if name in case.borders:
                line += f"  <- {_in_words(case.borders[name], world)}"
        lines.append(line)
    lines += [
        f"  {f.name} = {getattr(case, f.name)}" for f in fields(case)[5:] if f.name != "program"
    ]
    program = [f"{op.do} {op.number}" if op.number else op.do for op in case.program]
    return "\n".join([*lines, "  program: " + ", ".join(program)])


def _in_words(border: Border, world: int) -> str:
    words = [border.strategy.name]
    if "HYBRID" in border.strategy.name:
        words.append(f"{ranks_in_a_row(border, world)} ranks in a row")
    flags = ("frozen", "island") + (() if border.chosen else ("not chosen",))
    words += [flag for flag in flags if getattr(border, flag, True)]
    return ", ".join(words)
