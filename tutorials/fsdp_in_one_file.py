"""FSDP in one file: fully sharded data parallel training in plain PyTorch, to be read at one go.

    torch.manual_seed(0)  # the same parameters on every rank
    model = GPT(layers=4, width=128)
    engine = fsdp(model, Block)  # each Block is a unit, and so is what is left of the model
    optimizer = torch.optim.AdamW(model.parameters())  # of what this rank keeps
    ...  # an ordinary training loop, with different data on every rank

Each rank keeps a *shard* of every unit, one part of its parameters in one flat tensor. A unit's
parameters are gathered from all ranks just before they are used and freed right after, in the
forward and again in the backward. Its gradient is averaged over the ranks as soon as it is
complete, and each rank keeps the part of it that belongs to its shard.

With two ranks the losses and the parameters are those of DistributedDataParallel, in every bit.
The page is 06_one_file.md. What is missing here for a real training, and where to read about it,
is at its end.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

# torch 2.13 has renamed these two, and warns of the old names.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Owners = set[tuple[nn.Module, str]]  # modules that have a parameter, and its name there


def fsdp(model: nn.Module, *kinds: type[nn.Module]) -> "Engine":
    """Shard a model in place. A parameter belongs to the innermost module around it that is of one
    of these kinds; what is in none of them is a unit too, the model's own."""
    units: dict[nn.Module, dict[nn.Parameter, Owners]] = {}
    around = {model: model}  # the module whose unit a module is in
    for module in model.modules():  # outer ones first
        unit = module if isinstance(module, kinds) else around[module]
        around |= {child: unit for child in module.children() if child not in around}
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            # A weight may have several owners: a head that is the embedding, for example.
            units.setdefault(unit, {}).setdefault(param, set()).add((module, name))
    return Engine(model, [Unit(module, params) for module, params in units.items()])


class Unit:
    """Parameters that are gathered, used and freed together."""

    def __init__(self, module: nn.Module, params: dict[nn.Parameter, Owners]) -> None:
        self.module, self.owners = module, [*params.values()]
        self.shapes = [param.shape for param in params]
        assert all(param.requires_grad for param in params), "one flat tensor is trained as a whole"
        self.world, rank = dist.get_world_size(), dist.get_rank()

        # Flatten: one tensor, so that one message carries all. Zeros make it divisible by ranks.
        flat = torch.cat([param.detach().flatten() for param in params])
        flat = pad(flat, (0, -flat.numel() % self.world))

        # Shard. A copy, because a view would keep all of `flat` in memory.
        self.sharded_flat_param = nn.Parameter(flat.chunk(self.world)[rank].clone())

        # Whole parameters will be views of this tensor. It stays; its memory comes and goes.
        self.flat_param = torch.empty_like(flat, requires_grad=True)
        self.reshard()

        # From now on module.parameters(), and so the optimizer, finds nothing but the shard.
        self.hide_views()
        module.register_parameter("sharded_flat_param", self.sharded_flat_param)

    def unshard(self) -> None:
        """Give the whole parameters memory, and fill it with the shards of all ranks."""
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        # `.data`: to autograd this is no change. They are the values that the forward has used.
        torch_all_gather(self.flat_param.data, self.sharded_flat_param.data)

    def reshard(self) -> None:
        """Take the memory away. Autograd, too, holds views of it, so `del` would free nothing."""
        self.flat_param.untyped_storage().resize_(0)

    def unflatten(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of a flat tensor, in the shapes of the parameters."""
        sizes = [shape.numel() for shape in self.shapes]
        pieces = flat.split([*sizes, flat.numel() - sum(sizes)])
        # strict=False, because the last piece, the zeros, has no shape to get.
        return (piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=False))

    def show_views(self) -> None:
        """Let the modules compute with views of `flat_param`, whose gradients flow together in
        `flat_param.grad`."""
        # New views in each forward: autograd visits operations in the reverse of the order in
        # which they were made, so a unit's gradient is complete just after its own backward.
        for view, owners in zip(self.unflatten(self.flat_param), self.owners, strict=True):
            for owner, name in owners:
                setattr(owner, name, view)

    def hide_views(self) -> None:
        """Take from the modules what they compute with: somebody might read freed memory."""
        for owner, name in set().union(*self.owners):
            delattr(owner, name)


class Engine:
    """What happens to each unit at four moments of a training step."""

    def __init__(self, model: nn.Module, units: list[Unit]) -> None:
        self.model, self.units = model, units
        for unit in units:
            unit.module.register_forward_pre_hook(partial(self.before_forward, unit))
            unit.module.register_forward_hook(partial(self.after_forward, unit))
            unit.flat_param.register_post_accumulate_grad_hook(partial(self.after_gradient, unit))

    def before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        unit.unshard()
        unit.show_views()

    def after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Tensor) -> None:
        unit.hide_views()
        unit.reshard()
        if output.requires_grad:
            output.register_hook(partial(self.before_backward, unit))

    def before_backward(self, unit: Unit, grad: Tensor) -> None:
        """The first gradient has reached the unit, at its output."""
        unit.unshard()

    def after_gradient(self, unit: Unit, flat_param: Tensor) -> None:
        """`flat_param.grad` is complete. Average it over the ranks; keep the part of this one."""
        unit.reshard()
        grad, flat_param.grad = flat_param.grad, None
        shard = unit.sharded_flat_param
        mean = torch.empty_like(shard)
        torch_reduce_scatter(mean, grad / unit.world)  # the same division as DDP's, before the sum
        shard.grad = mean if shard.grad is None else shard.grad + mean

    @torch.no_grad()
    def full_params(self) -> dict[str, Tensor]:
        """The whole parameters by their names, to save or to compare. All ranks call it."""
        paths = {module: name for name, module in self.model.named_modules()}
        found = {}
        for unit in self.units:
            shard = unit.sharded_flat_param.data
            flat = shard.new_empty(unit.flat_param.shape)
            torch_all_gather(flat, shard)
            for view, owners in zip(unit.unflatten(flat), unit.owners, strict=True):
                found |= {f"{paths[owner]}.{name}".lstrip("."): view for owner, name in owners}
        return found
