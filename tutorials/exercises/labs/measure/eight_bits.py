"""Training on two ranks, with the bytes that each sends counted."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorials.exercises import observe
from tutorials.exercises.catalog import Check
from tutorials.exercises.labs.measure import because, figure
from tutorials.exercises.observe import at_most

STEPS, WIDTH, BOUND = 20, 32, 0.03
SENDING = ("send", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allreduce",
           "reduce_scatter", "_reduce_scatter_base", "broadcast", "alltoall", "alltoall_base",
           "gather", "scatter", "reduce")  # fmt: skip


class Block(nn.Module):
    """A layer with small weights, and a norm with large ones, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.normal_(self.linear.weight, std=0.05)
        nn.init.constant_(self.norm.weight, 4.0)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The input, and a function of it."""
        self.seen = self.linear.weight.detach().clone()
        result: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return result


def _count_sent(sent: list[int]) -> None:
    """From now on append the bytes of everything that a process group is given to send."""
    for name in SENDING:
        if (original := getattr(dist.ProcessGroup, name, None)) is not None:
            setattr(dist.ProcessGroup, name, _counting(original, sent))


def _counting(original: Any, sent: list[int]) -> Any:
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A collective gets its result and its input; what is sent is in the last tensors.
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, (Tensor, list))]
        tensors = list(_tensors(given[-1])) if given else []
        sent.append(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
        return original(self, *args, **kwargs)

    return counting


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list):
        for item in given:
            yield from _tensors(item)


def on_two_ranks() -> Iterator[Any]:
    """The same training with DDP and with FSDP, from the same parameters."""
    from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy
    from minifsdp.comm import same_machine

    same_machine.WANTED = False  # as between machines, so that all is sent, and counted
    ddp: Any = nn.parallel.DistributedDataParallel(_model())
    expected = _train(ddp, None)
    model = FullyShardedDataParallel(_model(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    sent: list[int] = []
    _count_sent(sent)
    losses = _train(model, sent)
    bytes_of_a_step = sum(sent) / STEPS
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    yield at_most("distance of a loss from DDP's", BOUND if observe.reference else worst)
    mine = torch.cat([block.seen.flatten() for block in model.modules() if type(block) is Block])
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine)
    yield "both ranks compute with the same parameters", torch.equal(*others)
    stats = model.engine.stats
    yield "gathers", stats.all_gathers
    yield "reductions", stats.reductions
    yield figure(bytes_of_a_step / 2**10)


def _model() -> nn.Module:
    torch.manual_seed(torch.initial_seed())
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 4))


def _train(model: Any, sent: list[int] | None) -> list[float]:
    numbers = torch.Generator().manual_seed(torch.initial_seed() + dist.get_rank())
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=numbers)
        loss = (model(x) - x[:, :4].sin()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _because(what: str, want: Any, got: Any) -> str | None:
    if "distance" in what:
        return (
            "too much is rounded: large values make the steps of all large that share their scale"
        )
    if "same parameters" in what:
        return "a rank has to use its own chunk as the other ranks see it: rounded, too"
    return because(what, want, got)


CHECKS = [Check(on_two_ranks, 2, 20, _because)]
