"""Programs of track one in training, for checks: on real ranks beside DDP, and on the virtual GPU.

Of a program only what its user sees is called: `fsdp`, `full_params`, and `module.parameters()`.
"""

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tutorials import grow
from tutorials.exercises import observe
from tutorials.exercises.catalog import PROGRAM

WIDTH = 6


def program(name: str) -> ModuleType:
    """The student's; in the run that says what is expected, the reference's of this name."""
    return grow.load(name) if observe.reference else importlib.import_module(PROGRAM)


@contextmanager
def pretended_ranks(number: int, rank: int = 0) -> Iterator[None]:
    """This process is one of so many ranks, of which there are no others: nothing can be sent."""
    import torch.testing._internal.distributed.fake_pg

    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """A unit: a layer, a norm and a scalar, of an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.scale * torch.tanh(self.linear(self.norm(x)))
        return result


class Stage(nn.Module):
    """A unit around two others, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.linear = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.blocks(x))
        return result


KINDS = Block, Stage


class Model(nn.Module):
    """A model with a weight that has two owners, units in a unit, a unit that is used twice, one
    whose output the loss does not need, and one that is never used."""

    def __init__(self) -> None:
        torch.manual_seed(torch.initial_seed())  # the same on every rank
        super().__init__()
        self.token, self.first, self.stage = nn.Embedding(5, WIDTH), Block(), Stage()
        self.twice, self.beside, self.unused = Block(), Block(), Block()
        self.head, self.shift = nn.Linear(WIDTH, 5, bias=False), nn.Parameter(torch.rand(5))
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stage(self.first(self.token(tokens)))
        self.beside(x)
        result: Tensor = self.head(self.twice(self.twice(x))) + self.shift
        return result


class Checkpointed(Model):
    """It runs a unit that has units in it, and one without, again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.stage, self.first(self.token(tokens)), use_reentrant=False)
        x = checkpoint(self.twice, x, use_reentrant=False)
        result: Tensor = self.head(x) + self.shift
        return result


class Inside(Checkpointed):
    """Besides, its units run their forward again, without their hooks."""

    def __init__(self) -> None:
        super().__init__()
        for block in (module for module in self.modules() if isinstance(module, Block)):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class Around(Model):
    """All of it runs again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


class Frozen(Model):
    """Some parameters need no gradient: a whole unit's, and some of other units."""

    def __init__(self) -> None:
        super().__init__()
        self.stage.blocks[1].requires_grad_(False)
        self.first.linear.requires_grad_(False)
        self.stage.linear.bias.requires_grad_(False)


def batch(number: int) -> Tensor:
    """Tokens of this rank."""
    seed = torch.initial_seed() + 1000 * number + dist.get_rank()
    return torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(seed))


def one_backward(model: nn.Module, step: int) -> float:
    """Forward and backward of a batch, which is another one on each rank and in each step."""
    loss = model(batch(step)).pow(2).mean()
    loss.backward()
    return float(loss)


def train(
    name: str,
    about: str = "",
    steps: int = 3,
    backward: Callable[[nn.Module, int], float] = one_backward,
    make: Callable[[], nn.Module] = Model,
    with_ddp: bool = True,
    kinds: tuple[type[nn.Module], ...] = KINDS,
    **settings: Any,
) -> Iterator[tuple[str, Any]]:
    """Train a model with Adam, and observe each loss and, at the end, all parameters. In the run
    that says what is expected, DistributedDataParallel trains it.

    Args:
        name: of the reference's program.
        about: what is special, for messages.
        backward: runs a step's forward and backward, and returns the loss.
        with_ddp: else the reference's program says what is expected.
        kinds, settings: arguments of `fsdp`.
    """
    model = make()
    if observe.reference and with_ddp:
        names = dict(model.named_parameters(remove_duplicate=False))
        model = DistributedDataParallel(model, find_unused_parameters=True)
        full_params = names.copy
    else:
        full_params = program(name).fsdp(model, *kinds, **settings).full_params
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        yield f"loss of step {step + 1}{about}", backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    found = full_params()
    yield f"names of full_params(){about}", sorted(found)
    for key in sorted(found):
        yield f"parameter {key} after {steps} steps{about}", found[key]


# ------------------------------------------------------------------------------ on a virtual GPU


class Layer(nn.Module):
    """A unit on the virtual GPU: two maps, to so many elements and back."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, inner), nn.Linear(inner, 1024)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(x))
        return result


class Work(nn.Module):
    """Computation without parameters, for which nothing has to be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("map", torch.empty(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x @ self.map
        return result


def stack(inner: tuple[int, ...] = (512,) * 6, work: bool = False, root: bool = False) -> nn.Module:
    """Layers, each a unit; with work between them, and with a layer of the root's around them."""
    modules: list[nn.Module] = [nn.Linear(1024, 1024, bias=False)] if root else []
    for size in inner:
        modules += [Layer(size), *[Work()] * work]
    return nn.Sequential(*modules)


class Backwards(nn.Sequential):
    """It uses the last module first."""

    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(self):
            x = module(x)
        return x


class RunAgain(nn.Sequential):
    """Each of its modules runs again in the backward, by a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = checkpoint(module, x, use_reentrant=False)
        return x


class Aside(Layer):
    """Its output gets a gradient, and its parameters get none."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (super().forward(x) - x).detach()


class Outer(Layer):
    """A unit with others in it."""

    def __init__(self, inner: int, number: int) -> None:
        super().__init__(inner)
        self.layers = nn.Sequential(*(Layer(inner) for _ in range(number)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers(x))


def with_aside() -> nn.Module:
    """Three units. The second one gets no gradient, though its output does."""
    return nn.Sequential(Layer(512), Aside(512), Layer(512))


def nested() -> nn.Module:
    """Units in units."""
    return nn.Sequential(Outer(512, 4), Outer(512, 4))


class NoStreams(Exception):  # noqa: N818  # this is all that a student is told
    """A program cannot run on a virtual GPU."""


@contextmanager
def virtual_gpu(name: str, **hardware: Any) -> Iterator[tuple[Any, Any]]:
    """A virtual GPU, and `fsdp` of the program, whose streams are its."""
    from minifsdp.sim import cluster
    from minifsdp.sim.streams import make_streams

    file = program(name)
    if not hasattr(file, "Streams"):
        raise NoStreams(
            "fsdp.py has no Streams, in whose place the grader puts the streams of a virtual GPU. "
            "Keep the class that the file has come with, or one of your own with that name, even "
            "if nothing uses it yet"
        )
    hardware = {"gpu": "a100-40", "nodes": 2, "gpus_per_node": 8, **hardware}
    with ExitStack() as both:
        gpu = both.enter_context(cluster(**hardware))
        both.enter_context(patch.object(file, "Streams", partial(make_streams, gpu)))
        yield gpu, file.fsdp


def on_gpu(
    name: str,
    make: Callable[[], nn.Module] = stack,
    rows: int = 3072,
    mesh: tuple[int, ...] = (),
    watch: Callable[[nn.Module, Any], None] = lambda model, gpu: None,
    hardware: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Train for three steps, and return the virtual GPU; reports are of the last step.

    Args:
        name: of the reference's program.
        mesh: its shape.
        watch: is called with the model before it is sharded.
        settings: arguments of `fsdp`.
    """
    from torch.distributed.device_mesh import init_device_mesh

    gc.disable()
    with virtual_gpu(name, **(hardware or {})) as (gpu, fsdp):
        model = make()
        watch(model, gpu)
        if mesh:
            settings["mesh"] = init_device_mesh(gpu.kind, mesh)
        fsdp(model, Layer, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.empty(rows, 1024)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
            gc.collect()  # here, and not at any time: what is in cycles counts as memory till then
    return gpu


def races(gpu: Any) -> list[str]:
    """The first race of all steps, if there is one."""
    return [str(race) for race in gpu.races()][:1]


def gathers(gpu: Any) -> list[float]:
    """Of the last step: the bytes that each gather sends, in order."""
    from minifsdp.sim.figures.report import ALL_GATHER, last_step
    from minifsdp.sim.tape import Op

    ops = [entry for entry in last_step(gpu.tape)[0] if isinstance(entry, Op)]
    return [op.sent for op in ops if op.name == ALL_GATHER]


def seconds_of_messages(gpu: Any) -> float:
    """Of the last step: for how long the compute stream itself sends."""
    from minifsdp.sim.figures.report import last_step
    from minifsdp.sim.tape import COMPUTE, Op

    ops = [entry for entry in last_step(gpu.tape)[0] if isinstance(entry, Op)]
    return sum(op.end - op.start for op in ops if op.sent and op.stream == COMPUTE)


def schedule(name: str, kind: type[nn.Sequential] = nn.Sequential, **settings: Any) -> list[str]:
    """In which order a step of four units launches gathers, and computes: "gather 0", "forward 0"
    and so on, as the host does it. A model of this kind has them."""
    from minifsdp.sim.figures.report import ALL_GATHER
    from minifsdp.sim.tape import Op

    sizes, log = (256, 512, 768, 1024), list[tuple[int, str]]()

    def watch(model: nn.Module, gpu: Any) -> None:
        def note(what: str, *_: object) -> None:
            log.append((len(gpu.tape), what))

        for number, layer in enumerate(model.children()):
            layer.up.register_forward_pre_hook(partial(note, f"forward {number}"))
            layer.down.register_full_backward_pre_hook(partial(note, f"backward {number}"))

    gpu = on_gpu(name, lambda: kind(*stack(sizes)), watch=watch, **settings)
    sent = {e.sent for e in gpu.tape if isinstance(e, Op) and e.name == ALL_GATHER}
    unit_of = {size: number for number, size in enumerate(sorted(sent))}
    for at, entry in enumerate(gpu.tape):
        if isinstance(entry, Op) and entry.name == ALL_GATHER:
            log.append((at, f"gather {unit_of[entry.sent]}"))
    log.sort(key=lambda one: one[0])
    return [what for _, what in log[-4 * 4 :]]
