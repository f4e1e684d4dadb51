"""FSDP in one file: fully sharded data parallel training in plain PyTorch, to be read at one go.

    torch.manual_seed(0)  # the same parameters on every rank
    model = GPT(layers=4, width=128)
    units = fsdp(model, Block)  # each Block is a unit, and so is what is left of the model
    optimizer = torch.optim.AdamW(model.parameters())  # of what this rank keeps
    ...  # an ordinary training loop, with other data on every rank

Each rank keeps a *shard* of every unit, one part of its parameters in one flat tensor. A unit's
parameters are gathered from all ranks just before they are used and freed right after, in the
forward and again in the backward. Its gradient is averaged over the ranks as soon as it is
complete, and each rank keeps the part of it that belongs to its shard.

With two ranks the losses and the parameters are those of DistributedDataParallel, in every bit.
The page is 06_one_file.md. What is missing here for a real training, and where to read about it,
is at its end.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

# torch 2.13 has renamed these two, and warns of the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Owners = set[tuple[nn.Module, str]]  # modules that have a parameter, and its name there


def fsdp(model: nn.Module, *kinds: type[nn.Module]) -> list["Unit"]:
    """Shard a model in place. A parameter belongs to the innermost module around it that is of one
    of these kinds; what is in none of them is a unit too, the model's own."""
    units: dict[nn.Module, dict[nn.Parameter, Owners]] = {}

    def assign(module: nn.Module, unit: nn.Module) -> None:
        unit = module if isinstance(module, kinds) else unit
        for name, param in module.named_parameters(recurse=False):
            # A weight may have several owners: a head that is the embedding, for example.
            units.setdefault(unit, {}).setdefault(param, set()).add((module, name))
        for child in module.children():
            assign(child, unit)

    assign(model, model)
    return [Unit(module, params) for module, params in units.items()]


@torch.no_grad()
def full_params(model: nn.Module, units: list["Unit"]) -> dict[str, Tensor]:
    """Copies of the whole parameters by their names, to save or to compare. All ranks call it."""
    paths = {module: name for name, module in model.named_modules()}
    found = {}
    for unit in units:
        unit.gather()
        for view, owners in zip(unit.views(), unit.owners, strict=True):
            for owner, name in owners:
                found[f"{paths[owner]}.{name}".lstrip(".")] = view.clone()
        unit.free()
    return found


class Unit:
    """Parameters that are gathered, used and freed together."""

    def __init__(self, module: nn.Module, params: dict[nn.Parameter, Owners]) -> None:
        self.world, rank = dist.get_world_size(), dist.get_rank()
        self.shapes, self.owners = [param.shape for param in params], [*params.values()]

        # Flatten: one tensor, so that one message carries all. Zeros make it divisible by ranks.
        flat = torch.cat([param.detach().flatten() for param in params])
        flat = pad(flat, (0, -flat.numel() % self.world))

        # Shard. A copy, because a view would keep all of `flat` in memory.
        self.shard = nn.Parameter(flat.chunk(self.world)[rank].clone())

        # Whole parameters will be views of this tensor. It stays; its memory comes and goes.
        self.full = torch.empty_like(flat, requires_grad=True)
        self.free()

        # From now on module.parameters(), and so the optimizer, finds nothing but the shard.
        for owner, name in set().union(*self.owners):
            delattr(owner, name)
        module.register_parameter("shard", self.shard)

        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        self.full.register_post_accumulate_grad_hook(self.after_gradient)

    def gather(self) -> None:
        """Give the whole parameters memory, and fill it with the shards of all ranks."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        # `.data`: to autograd this is no change. They are the values that the forward has used.
        all_gather(self.full.data, self.shard.data)

    def free(self) -> None:
        """Take the memory away. Autograd, too, holds views of it, so `del` would free nothing."""
        self.full.untyped_storage().resize_(0)

    def views(self) -> Iterator[Tensor]:
        """The whole parameters, in their shapes. Their gradients flow together in `full.grad`."""
        sizes = [shape.numel() for shape in self.shapes]
        pieces = self.full.split([*sizes, self.full.numel() - sum(sizes)])
        # strict=False, because the last piece, the zeros, has no shape to get.
        return (piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=False))

    def before_forward(self, module: nn.Module, args: Any) -> None:
        self.gather()
        # New views in each forward: autograd visits operations in the reverse of the sequence in
        # which they were made, so a unit's gradient is complete just after its own backward.
        for view, owners in zip(self.views(), self.owners, strict=True):
            for owner, name in owners:
                setattr(owner, name, view)

    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        for owner, name in set().union(*self.owners):
            delattr(owner, name)  # else somebody might read freed memory
        self.free()
        if output.requires_grad:
            output.register_hook(self.before_backward)

    def before_backward(self, grad: Tensor) -> None:
        """The first gradient has reached the unit, at its output."""
        self.gather()

    def after_gradient(self, full: Tensor) -> None:
        """`full.grad` is complete. Average it over the ranks and keep the part of this one."""
        self.free()
        mean = torch.empty_like(self.shard)
        reduce_scatter(mean, full.grad / self.world)  # the same division as DDP's, before the sum
        full.grad = None
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
