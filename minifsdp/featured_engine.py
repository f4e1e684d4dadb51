"""What the units of one root share, with what the features need of it.

core/engine.py has the engine itself. Here it counts (support/stats.py), holds gradients that wait
(support/held_gradients.py), and follows a model that moves to another device.
"""

from contextlib import suppress
from typing import Any, TypeVar

import torch

from minifsdp.core.engine import Engine
from minifsdp.core.layers import Layer
from minifsdp.core.limiter import Limiter
from minifsdp.core.parameters import Parameters
from minifsdp.core.streams import CudaEvent, Event, Streams
from minifsdp.support.held_gradients import HeldGradients
from minifsdp.support.prefetch_stats import CountedPrefetcher
from minifsdp.support.stats import CountedLimiter, Stats

L = TypeVar("L", bound=Layer)


class FeaturedEngine(Engine):
    """The engine of one root of minifsdp.

    Args:
        units: as in the core.
        limiter, prefetcher: of this root alone.
        kind: what gathers the units and frees them.

    Attributes:
        stats: what it has done.
        after_optimizer: a CUDA event of the program's, recorded after its optimizer's step; the
            next forward takes it.
    """

    gradients: HeldGradients
    prefetcher: CountedPrefetcher

    def __init__(
        self,
        units: list[Any],
        limiter: Limiter,
        prefetcher: CountedPrefetcher,
        kind: type[Parameters] = Parameters,
    ) -> None:
        self.limiter, self.stats = limiter, Stats()
        self.after_optimizer: torch.cuda.Event | None = None
        self.streams_on = Streams.on  # what makes them; several roots may have one
        streams = Streams.on(torch.device("cpu"))  # till the first start knows the device
        counted = CountedLimiter(limiter, prefetcher, self.stats)
        parameters = kind(streams, counted, prefetcher)
        super().__init__(units, parameters, HeldGradients(streams, self.stats))
        prefetcher.adapt_to(streams.host_runs_ahead)

    def layer(self, kind: type[L]) -> L:
        """The layer of a class.

        Raises:
            LookupError: there is none.
        """
        for layer in self.moments.layers:
            if isinstance(layer, kind):
                return layer
        raise LookupError(f"this root has no {kind.__name__}")

    def written(self) -> Event:
        """As in the core; or the program's own event, which may come earlier."""
        event, self.after_optimizer = self.after_optimizer, None
        if event is None or self.streams.device.type != "cuda":
            return super().written()
        return CudaEvent(event, self.streams.device)

    def fail(self) -> None:
        """As in the core. If another rank is lost, the gathers that are under way have failed as
        well. Their errors would hide the first error, and leave the units after them gathered."""
        for unit in self.units:
            if unit.unshard_event is not None:
                with suppress(RuntimeError):
                    unit.unshard_event.wait()
        super().fail()

    def compute_on(self, device: torch.device) -> None:
        """Use the streams of this device, on which the units are now."""
        streams = self.streams_on(device)
        self.streams = self.parameters.streams = self.gradients.streams = streams
        self.prefetcher.adapt_to(streams.host_runs_ahead)
