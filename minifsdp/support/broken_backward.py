"""An exception that ends a backward is noticed at once.

The core notices it when the next step begins. Until then the modules would have views of memory
that is freed, and ``parameters()`` would list them. So layers have a moment ``broken``, which comes
when autograd has dropped the backward.
"""

from weakref import ref

from minifsdp.core.layers import Call, Layer
from minifsdp.core.views import hide_views
from minifsdp.featured_hooks import FeaturedHooks


class BrokenBackward(Layer):
    """Hides the views when an exception has ended a backward, and calls the moment ``broken``."""

    def __init__(self, hooks: FeaturedHooks) -> None:
        self._hooks = hooks
        self._watched: object = None  # kept, or its callback would never come

    def start_backward(self, call: Call | None) -> None:
        """Be called when autograd drops the callback for the end of this backward."""
        self._watched = ref(self._hooks.backward.queued(), self._dropped)

    def _dropped(self, queued: object) -> None:
        if self._hooks.backward.complete:
            return  # as a rule: the backward has come to its end
        for unit in self._hooks.engine.units:
            hide_views(unit)
        for method in self._hooks.engine.moments.broken:
            method()
