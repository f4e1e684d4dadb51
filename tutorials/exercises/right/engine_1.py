"""Views are made before the wait, and the target is asked for first."""


class Engine(Engine):
    def before_forward(self, unit: Unit, prefetch: bool) -> None:
        """The module is about to run: give it its parameters, as views known to autograd.

        Args:
            prefetch: this forward is part of a step, whose order tells what comes next.
        """
        target = self.prefetcher.pre_forward(unit) if prefetch else None
        self.parameters.unshard(unit, FORWARD)
        self.parameters.prefetch(target)
        make_views(unit)
        wait_for_unshard(unit)
        show_views(unit)
