"""The state is changed at the end, and the target is asked for before the gather."""


class Engine(Engine):
    def before_backward(self, unit: Unit, graph_task: int) -> None:
        """The first gradient has reached the unit: gather its parameters again.

        Args:
            graph_task: autograd's number of this backward.
        """
        target = self.prefetcher.pre_backward(unit)
        self.parameters.unshard(unit, BACKWARD)
        self.parameters.prefetch(target)
        wait_for_unshard(unit)
        show_views(unit)
        unit.state.start_backward(graph_task)
