"""What minifsdp should compute: the same module, plain and whole on every rank.

Gradients are averaged over ranks by hand, in the arithmetic that minifsdp promises and in the same
order. So there is nothing to tolerate: in any world and any precision, a bit that differs is a
mistake. Three things decide in which order terms are added:

- the gradient of a unit is reduced as one flat tensor in chunks, and the ranks' parts of a chunk
  are added up in the order of gloo's ring;
- what several uses of a parameter contribute is added up within each call of its unit first;
- an all-reduce does the same with what is left after that, cut into as many parts as there are
  copies, of which some may be one element longer than others.

In rows a parameter has a gradient only if some rank has used it, and the optimizer steps each
parameter for itself. The flat gradient is zero where a parameter has none.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from minifsdp import MixedPrecision
from tests.random_models import Border, unit_around
from tests.ranks import device

Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""With whom a rank shares a unit's parameters, and who has copies of its chunk."""
Owners = list[tuple[nn.Module, str]]
GradientHook = Callable[[Tensor], Tensor | None]
AfterHook = Callable[[nn.Parameter], None]
SGD = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}


class PlainUnit:
    """Parameters that are reduced together, as a flat tensor."""

    def __init__(
        self,
        params: dict[nn.Parameter, Owners],
        border: Border,
        groups: Groups,
        precision: MixedPrecision,
        in_rows: bool,
    ) -> None:
        self.params, self.groups, self.in_rows = params, groups, in_rows
        if not in_rows:  # in chunks, too, those of an odd length come last
            laid = sorted(params, key=lambda param: param.numel() % 8 != 0)
            self.params = {param: params[param] for param in laid}
        self.dtype = precision.param_dtype or torch.float32
        self.reduce_dtype = precision.reduce_dtype or self.dtype
        if border.island:
            self.dtype = self.reduce_dtype = torch.float32
        self.grad_dtype = self.dtype if precision.keep_low_precision_grads else torch.float32
        flat = torch.cat([param.detach().reshape(-1) for param in self.params] or [torch.empty(0)])
        self.flat = nn.Parameter(flat, requires_grad=bool(params) and not border.frozen)
        self.flat.grad_dtype = self.grad_dtype
        self.waiting: Tensor | None = None  # of no_sync
        self.used = set[int]()  # numbers of the parameters that this rank has used for it
        self.without = set(range(len(params)))  # a gradient; those that no_sync shows do not count
        # What the optimizer sees: in rows each parameter, with memory of the flat one.
        self.optimized = [self.flat]
        if in_rows and params:
            self.optimized = [nn.Parameter(p, self.flat.requires_grad) for p in self.pieces(flat)]
            for param in self.optimized:
                param.grad_dtype = self.grad_dtype
        self.on_gradient: list[GradientHook] = []  # before the reduction
        self.after_gradient: list[AfterHook] = []
        self.cast(self.dtype)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Of the size and shape of each parameter; memory of ``flat``."""
        split_up = flat.split([param.numel() for param in self.params])
        return [piece.view(p.shape) for piece, p in zip(split_up, self.params, strict=True)]

    def gradients(self) -> list[Tensor | None]:
        """Of what the optimizer sees; memory of the flat gradient. Until what no_sync has left is
        reduced, every parameter has one."""
        if self.flat.grad is None or not self.in_rows:
            return [self.flat.grad] * len(self.optimized)
        without = self.without if self.waiting is None else ()
        pieces = enumerate(self.pieces(self.flat.grad))
        return [None if number in without else piece for number, piece in pieces]

    def zero_grad(self, set_to_none: bool) -> None:
        if set_to_none:
            self.flat.grad, self.without = None, set(range(len(self.params)))
        elif self.flat.grad is not None:
            self.flat.grad.zero_()
            if self.waiting is not None:
                self.without = set()  # the zeros that no_sync has shown stay
        self.waiting, self.used = None, set()

    def cast(self, dtype: torch.dtype) -> None:
        """Give the module what the optimizer has, in the dtype to compute with."""
        for param, piece in zip(self.params, self.pieces(self.flat.data), strict=True):
            param.data = piece.to(dtype, copy=True)
        self.renew()

    def renew(self, *_: Any) -> None:
        """A call of the unit begins: what its uses contribute is to be added up by itself."""
        for param, owners in self.params.items():
            with torch.enable_grad():  # as a parameter, also where a checkpoint meets it later
                alias = param.view_as(param)
            for module, name in owners:
                module._parameters[name] = alias  # also for who asks for parameters()

    def take_gradient(self) -> tuple[Tensor, set[int]] | None:
        """What a backward has left, flat; zeros where a parameter was not used. And the numbers of
        those that were used, of which one without elements is always one."""
        grads = [param.grad for param in self.params]
        if not self.flat.numel() or all(grad is None for grad in grads):
            return None
        for param in self.params:
            param.grad = None
        zeros = self.pieces(self.flat.new_zeros(self.flat.shape, dtype=self.dtype))
        grad = torch.cat(
            [(z if g is None else g).reshape(-1) for g, z in zip(grads, zeros, strict=True)]
        )
        used = {n for n, g in enumerate(grads) if g is not None or not zeros[n].numel()}
        parts = [self.pieces(grad)[n] for n in sorted(used)] if self.in_rows else [grad]
        for hook in self.on_gradient:
            for part in parts:
                given = hook(part)
                part.copy_(part if given is None else given)
        return grad, used

    def train(self, whether: bool) -> None:
        """Thaw or freeze it."""
        if self.params:
            for param in (*self.params, self.flat, *self.optimized):
                param.requires_grad_(whether)
            self.renew()

    def mean(self, grad: Tensor | None) -> Tensor:
        """Over all ranks; None counts as zeros."""
        shard, replicate = self.groups
        ranks = shard.size() if shard is not None else 1
        size, places = self.places(ranks)
        padded = self.flat.new_zeros(size * ranks, dtype=self.reduce_dtype)
        if grad is not None:
            padded[places] = grad.to(padded.dtype)
        chunks = [padded]
        if shard is not None:
            chunks = _means(padded, shard)
        if replicate is not None:
            own = chunks[shard.rank() if shard is not None else 0]
            own = torch.cat(_means(own, replicate))
            chunks = _gather(own, shard) if shard is not None else [own]
        return torch.cat(chunks)[places].to(self.grad_dtype)

    def places(self, ranks: int) -> tuple[int, Tensor]:
        """How many elements a rank has, and where each of the unit is if the ranks' parts are laid
        end to end."""
        numel = self.flat.numel()
        if not self.in_rows:
            return -(-numel // ranks), torch.arange(numel)
        numels = [param.numel() for param in self.params]
        widths = [param[0].numel() if len(param) else 0 for param in self.params]
        rows = [-(-len(param) // ranks) for param in self.params]
        blocks = [number * width for number, width in zip(rows, widths, strict=True)]
        # Those of an odd length come last.
        laid = sorted(range(len(blocks)), key=lambda number: blocks[number] * ranks % 8 != 0)
        size, found = 0, {}
        for number in laid:
            every = torch.arange(numels[number])
            rank = every // max(widths[number], 1) // max(rows[number], 1)
            found[number] = rank, size + every % max(blocks[number], 1)
            size += blocks[number]
        if len(blocks) > 1:  # marks of what was not used, which fill up the end
            size = -(-(size + len(blocks)) // 8) * 8
        places = [found[number] for number in range(len(blocks))]
        return size, torch.cat([rank * size + place for rank, place in places])

    def add_to_gradient(self, grad: Tensor | float) -> None:
        if self.flat.grad is None:
            self.flat.grad = torch.zeros_like(self.flat, dtype=self.grad_dtype)
        self.flat.grad += grad

    def reduce(self) -> None:
        """Add the mean of what waits on all ranks, of which some may have nothing."""
        self.add_to_gradient(self.mean(self.waiting))
        used = somewhere(*(number in self.used for number in range(len(self.params))))
        self.without -= {number for number, by_some in enumerate(used) if by_some}
        self.waiting, self.used = None, set()


def somewhere(*conditions: bool) -> list[bool]:
    """Whether each of them holds on some rank."""
    some = torch.tensor([int(condition) for condition in conditions], device=device())
    dist.all_reduce(some, dist.ReduceOp.MAX)
    return [bool(holds) for holds in some]


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    every = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(every, tensor, group=group)
    return every


def _means(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Over the ranks of the group, in as many chunks as there are of them."""
    every = [part.tensor_split(group.size()) for part in _gather(tensor, group)]
    return [_ring_mean([chunks[r] for chunks in every], r) for r in range(group.size())]


def _ring_mean(parts: list[Tensor], owner: int) -> Tensor:
    """The mean of what the ranks have for a chunk: the owner's neighbour first, its own last."""
    ranks = len(parts)
    first, *others = [parts[(owner - distance) % ranks] for distance in (*range(1, ranks), 0)]
    total = first * (1 / ranks)
    for part in others:
        total.add_(part * (1 / ranks))  # rounded before it is added, as by torch
    return total


class Reference:
    """A plain module with the arithmetic of a sharded one.

    Args:
        module: with its first values.
        units: by the name of their module.
        names: of these modules -> what their unit is called. Several may have one.
        kept_dtype: of gradients that wait to be reduced. None: the one in which they come.
    """

    def __init__(
        self,
        module: nn.Module,
        units: dict[str, tuple[Border, Groups]],
        names: dict[str, str],
        precision: MixedPrecision,
        in_rows: bool = False,
        kept_dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.precision, self.events = module, precision, set[str]()
        self.kept_dtype = kept_dtype
        self._once = dict(module.named_parameters())
        self._always = dict(module.named_parameters(remove_duplicate=False))
        unit_of = {p: names[unit_around(name, units)] for name, p in self._once.items()}
        owners: defaultdict[nn.Parameter, Owners] = defaultdict(list)
        for owner in module.modules():
            for name, param in owner._parameters.items():
                owners[param].append((owner, name))
        self.units = {
            unit: PlainUnit(
                {param: owners[param] for param in unit_of if unit_of[param] == unit},
                border, groups, precision, in_rows,
            )
            for unit, (border, groups) in {names[at]: of for at, of in units.items()}.items()
        }  # fmt: skip
        for name in units:
            module.get_submodule(name).register_forward_pre_hook(self.units[names[name]].renew)
            if units[name][0].island:
                _keep_in_full_precision(module.get_submodule(name))
        self._low_buffers = [
            (owner, name)
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if not units[unit_around(path, units)][0].island and buffer.is_floating_point()
        ]
        self._full = True  # in the last forward, if there was one
        optimized = [param for unit in self.units.values() for param in unit.optimized]
        self.optimizer = torch.optim.SGD(optimized, **SGD)

    def cast(self, full_precision: bool = False) -> None:
        """Give the module what the optimizer has, in the dtypes that it computes with."""
        for unit in self.units.values():
            unit.cast(torch.float32 if full_precision else unit.dtype)

    def cast_buffers(self, full_precision: bool) -> None:
        if self.precision.buffer_dtype is not None:
            dtype = torch.float32 if full_precision else self.precision.buffer_dtype
            for owner, name in self._low_buffers:
                owner._buffers[name] = owner._buffers[name].to(dtype)

    def __call__(self, x: Tensor) -> Any:
        self._full = self.precision.full_precision_in_eval and not self.module.training
        self.cast_buffers(self._full)
        if not self._full:
            return self.module(x.to(self.precision.param_dtype or x.dtype))
        self.cast(full_precision=True)
        try:
            return self.module(x)
        finally:
            self.cast()

    def backward(
        self, loss: Tensor, synchronize: bool, sent: bool = True, keep_graph: bool = False
    ) -> None:
        """All gradients of a backward, or none.

        Args:
            sent: whether what waits is reduced by a backward that reaches no unit on any rank.
        """
        self._run_backward(lambda: loss.backward(retain_graph=keep_graph), synchronize, sent)

    def look(self, backward: Callable[[], Tensor], sent: bool) -> Tensor:
        """What ``backward`` returns, a backward that is for no parameter."""
        found: list[Tensor] = []
        self._run_backward(lambda: found.append(backward()), True, sent)
        return found[0]

    def _run_backward(self, run: Callable[[], None], synchronize: bool, sent: bool) -> None:
        units = list(self.units.values())
        self._full = False  # an evaluation may have come between; a checkpoint runs as it did
        self.cast_buffers(self._full)
        try:
            run()
        except BaseException:
            for unit in units:
                unit.take_gradient()
            raise
        reached = False
        for unit in units:
            found = unit.take_gradient()
            if found is not None:
                grad, used = found
                reached = True
                unit.waiting = self._sum(unit.waiting, grad, synchronize)
                unit.used |= used
                if not synchronize:
                    unit.add_to_gradient(0.0)  # so that the optimizer finds one, as after DDP's
        if not synchronize or not (somewhere(reached)[0] or sent):
            return
        complete = [unit for unit, waits in zip(units, self.waits(), strict=True) if waits]
        for unit in complete:
            if unit.waiting is None:
                self.events.add("another rank has used more units")
            unit.reduce()
        for unit in complete:
            for hook in unit.after_gradient:
                hook(unit.flat)
        self.cast()  # one of them may have been an optimizer

    def _sum(self, waiting: Tensor | None, grad: Tensor, synchronize: bool) -> Tensor:
        """What a backward leaves to be reduced: at once, or in the dtype to keep it in."""
        if waiting is None:
            return grad if synchronize else grad.to(self.kept_dtype or grad.dtype)
        return waiting + grad if synchronize else (waiting + grad).to(waiting.dtype)

    def waits(self) -> list[bool]:
        """For each unit: whether some rank has a gradient that is not reduced."""
        return somewhere(*(unit.waiting is not None for unit in self.units.values()))

    def step(self) -> None:
        for unit in self.units.values():
            for param, grad in zip(unit.optimized, unit.gradients(), strict=True):
                param.grad = grad
        self.optimizer.step()
        self.cast()

    def zero_grad(self, set_to_none: bool) -> None:
        for unit in self.units.values():
            unit.zero_grad(set_to_none)

    def named_parameters(self, remove_duplicate: bool = True) -> dict[str, Tensor]:
        """In the optimizer's dtype; memory of the flat parameters."""
        return self._named(lambda unit: unit.pieces(unit.flat.data), remove_duplicate)

    def named_gradients(self) -> dict[str, Tensor]:
        def gradients(unit: PlainUnit) -> list[Tensor | None]:
            grads = unit.gradients()
            if not unit.in_rows:
                (grad,) = grads
                grads = [None] * len(unit.params) if grad is None else unit.pieces(grad)
            return [None if grad is None else grad.float() for grad in grads]

        return self._named(gradients, True)

    def momenta(self) -> dict[str, Tensor]:
        """The optimizer's state; its memory."""

        def momenta(unit: PlainUnit) -> list[Tensor | None]:
            states = [self.optimizer.state.get(param, {}) for param in unit.optimized]
            found = [state.get("momentum_buffer") for state in states]
            if unit.in_rows or found == [None]:
                return found
            return unit.pieces(found[0])

        return self._named(momenta, True)

    def forget_frozen_momenta(self) -> None:
        for unit in self.units.values():
            if not unit.flat.requires_grad:
                for param in unit.optimized:
                    self.optimizer.state.pop(param, None)

    def _named(
        self, which: Callable[[PlainUnit], Sequence[Tensor | None]], remove_duplicate: bool
    ) -> dict[str, Tensor]:
        pieces: dict[nn.Parameter, Tensor] = {}
        for unit in self.units.values():
            for param, piece in zip(unit.params, which(unit), strict=False):
                if piece is not None:
                    pieces[param] = piece
        found = self._once if remove_duplicate else self._always
        return {name: pieces[param] for name, param in found.items() if param in pieces}

    def state_dict(self) -> dict[str, Tensor]:
        """All in full precision."""
        parameters = self.named_parameters(remove_duplicate=False)
        self.cast_buffers(full_precision=True)
        state = self.module.state_dict() | parameters
        self.cast_buffers(self._full)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        mine = self.named_parameters(remove_duplicate=False)
        self.cast_buffers(full_precision=True)
        mine |= dict(self.module.named_buffers())
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        self.cast()
        self.cast_buffers(self._full)

    def multiply(self, parameters: float, gradients: float) -> None:
        for unit in self.units.values():
            unit.flat.data *= parameters
            if unit.flat.grad is not None:
                unit.flat.grad *= gradients
        self.cast()


def _keep_in_full_precision(module: nn.Module) -> None:
    given = [torch.float32]

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        given[0] = args[0].dtype
        return (args[0].float(),)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(
        lambda _, args, output: tree_map(lambda tensor: tensor.to(given[0]), output)
    )
