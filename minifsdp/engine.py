"""What the units of one root share: streams, limiter, prefetcher, counts; and the verbs with them.

Each verb (unshard.py, reshard.py, reduce.py) knows one unit and one stream. Here they meet the
limiter and the counts. Hooks start a verb through these methods only; what concerns one unit alone,
such as waiting for its gather or making its views, they call where it is.
"""

import warnings

import torch
from torch import Tensor, nn

from minifsdp.api import Stats
from minifsdp.checks.members import check_tree
from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.limiter import Limiter
from minifsdp.no_sync import check_unreduced_grad, store_unreduced
from minifsdp.prefetch import Prefetcher
from minifsdp.reduce import (
    Reduction,
    reduce_gradient,
    start_next_part,
    store_gradient,
    wait_for_first_part,
    wait_for_reduction,
)
from minifsdp.reshard import reshard
from minifsdp.streams import Streams
from minifsdp.support.grad_hooks import after_gradient
from minifsdp.support.param_views import adopt, use_sharded_views
from minifsdp.unit import Unit
from minifsdp.unit_state import ShardedState
from minifsdp.unshard import unshard


class Engine:
    """All units below one root.

    Args:
        units: the root's first, then in the order of ``named_modules()``.
    """

    def __init__(self, units: list[Unit], limiter: Limiter, prefetcher: Prefetcher) -> None:
        self.units, self.root = units, units[0]
        self.limiter, self.prefetcher, self.stats = limiter, prefetcher, Stats()
        self.streams = Streams.on(torch.device("cpu"))  # till the first forward
        self.agreement = RankAgreement(
            units,
            f"limit_all_gathers={getattr(limiter, 'limit', False)}, "
            f"backward_prefetch={prefetcher.backward}, forward_prefetch={prefetcher.forward}",
        )
        self.sharded = any(unit.shard_group is not None for unit in units)  # not all replicated
        self.training: bool | None = None  # the mode of the outermost module, last time it ran
        self._reductions: list[Reduction] = []  # of this backward, in the order of their start
        self._kept: dict[Unit, Tensor] = {}  # gradients of this backward that are not reduced yet

    def start(self, training: bool | None) -> None:
        """Be ready for a forward: nothing left from the last one, everything as the user wants it.

        Args:
            training: the mode of the outermost module. None: not for a forward, but to look at
                parameters.

        Raises:
            ValueError: a shard was replaced by one of another size; units on several devices; ranks
                with different units.
            RuntimeError: parameters were moved, or stepped, when they should not have been.
        """
        if not self.agreement.steps:
            check_tree(self.root.module)
        self.reset(keep=training is not None and training is self.training)
        self.training = self.training if training is None else training
        by_device = {unit.device: unit.label for unit in self.units if unit.numel}
        if len(by_device) > 1:
            found = "; ".join(f"{device}: {label}, ..." for device, label in by_device.items())
            raise ValueError(f"all units have to be on one device. Found {found}.")
        for device in by_device:
            if device != self.streams.device:
                self.streams = Streams.on(device)
            for unit in self.units:
                if not unit.numel and unit.device != device:
                    # It has nothing that module.to() would have moved; but inputs, and buffers.
                    unit.replace_shard(
                        nn.Parameter(unit.sharded_flat_param.to(device), requires_grad=False)
                    )
        for unit in self.units:
            adopt(unit)  # it may have been moved through its module, not through the wrapper
            unit.refresh(training)
            check_unreduced_grad(unit)
        if training is not None or self.sharded:
            self.agreement.start(forward=training is not None)
        # The gathers to come must send what the optimizer has just written.
        self.streams.unshard.wait_event(self.streams.compute.record_event())

    def compute_as(self, training: bool | None) -> None:
        """Have everything in the precision of this mode, for what a backward will run again."""
        if training is not self.training:
            self.training = training
            for unit in self.units:
                self.free(unit)
                unit.choose_precision(training)

    def reset(self, keep: bool = False) -> None:
        """Drop what a failed forward or backward has left, and what a forward without one keeps.

        Args:
            keep: what a backward in no_sync has left gathered, if nobody has changed it since.
        """
        reductions, self._reductions = self._reductions, []
        self._kept.clear()
        self.agreement.reset()
        for reduction in reductions:
            reduction.event.wait()
        for unit in self.units:
            if not keep or unit.moved or unit.kept_version != unit.sharded_flat_param._version:
                self.free(unit)
            unit.state.start_step()
            unit.unsharded.flat_param.grad = None

    # ----------------------------------------------------------------------------- the three verbs

    def gather(self, unit: Unit) -> None:
        """Start to unshard a unit that is needed now, unless a prefetch has done it. The host may
        have to wait for the limiter; for the data it is the computation that waits, later."""
        if unit.needs_unshard and unit.state.sharded is ShardedState.SHARDED:
            self.limiter.admit(unit, needed=True)
            self._unshard(unit)

    def prefetch(self, target: Unit | None) -> None:
        """Start to unshard a unit that will be needed next, if that is so and there is room."""
        if target is None or not target.needs_unshard or self.agreement.diverged:
            return
        if not self.prefetcher.is_sound(target):
            return
        if self.limiter.admit(target, needed=False):
            self.prefetcher.issued(target)
            self._unshard(target)
        else:
            self.stats.declined_prefetches += 1

    def free(self, unit: Unit) -> None:
        """Reshard a unit, unless it is sharded already. Whoever is unsure may call it."""
        unit.kept_version = -1
        if unit.uses_unsharded_views:
            use_sharded_views(unit)
        if unit.state.sharded is not ShardedState.SHARDED:
            self.limiter.freed(unit, reshard(unit, self.streams))
            self.stats.unsharded_units -= 1
            self.stats.unsharded_bytes -= unit.unsharded.nbytes

    def done_with(self, unit: Unit) -> None:
        """Free a unit that has had its turn; but where ranks go different ways, nobody could gather
        it again."""
        if not self.agreement.diverged:
            leaks = unit.leaks
            self.free(unit)
            if unit.leaks > leaks == 0:
                warnings.warn(
                    f"a parameter of unit {unit.label} is still referred to when the unit is freed "
                    f"(by an output of its module, an attribute, a closure?). It keeps the values "
                    f"of this step, and {unit.unsharded.nbytes} bytes that would have been freed. "
                    f"Keep a copy instead: parameter.detach().clone().",
                    stacklevel=2,
                )

    def reduce(self, unit: Unit, grad: Tensor) -> None:
        """Start to reduce the gradient of ``unit.unsharded.flat_param``, ``[n * ranks]``, with what no_sync has
        left; nobody else may hold it. It is handed over by :meth:`finish_gradients`."""
        if unit.unreduced_grad is not None and all(r.unit is not unit for r in self._reductions):
            grad.add_(
                unit.unreduced_grad.grad
            )  # a copy of it stays, until this backward has succeeded
        for reduction in self._reductions[-2:-1]:
            start_next_part(reduction, self.streams)
        if self._reductions:
            # One at a time: else a network slower than the computation would pile up the gradients
            # of the whole model, all waiting to be sent.
            wait_for_first_part(self._reductions[-1], self.streams)
        self._reductions.append(reduce_gradient(unit, grad, self.streams))
        self.stats.reductions += 1

    def keep(self, unit: Unit, grad: Tensor) -> None:
        """Hold a gradient that is not to be reduced now."""
        before = self._kept.get(unit)
        self._kept[unit] = grad if before is None else before.add_(grad)

    def reduce_kept(self, unit: Unit) -> None:
        """Reduce what was kept, or nothing: then this rank's part of the sum is zero."""
        grad = self._kept.pop(unit, None)
        if grad is None:
            grad = torch.zeros(unit.padded_numel, dtype=unit.unsharded.dtype, device=unit.device)
        self.reduce(unit, grad)

    def finish_gradients(self) -> None:
        """Wait for all gradients and hand them to the optimizer: all of a backward's, or none."""
        if self._reductions:
            wait_for_first_part(self._reductions[-1], self.streams)
        for reduction in self._reductions:
            start_next_part(reduction, self.streams)
        for reduction in self._reductions:
            wait_for_reduction(reduction)
        for reduction in self._reductions:
            store_gradient(reduction)
        for unit, grad in self._kept.items():
            store_unreduced(unit, grad)
        complete = [reduction.unit for reduction in self._reductions]
        self._reductions.clear()
        self._kept.clear()
        for unit in complete:  # last: a hook may raise, or be an optimizer
            after_gradient(unit)

    def _unshard(self, unit: Unit) -> None:
        stats = self.stats
        stats.all_gathers += 1
        stats.unsharded_units += 1
        stats.unsharded_bytes += unit.unsharded.nbytes
        stats.peak_unsharded_units = max(stats.peak_unsharded_units, stats.unsharded_units)
        stats.peak_unsharded_bytes = max(stats.peak_unsharded_bytes, stats.unsharded_bytes)
        unshard(unit, self.streams)
