"""Units are freed first, and their states end in a loop of their own."""


class Engine(Engine):
    def end_of_backward(self) -> None:
        """Every unit is sharded again, every gradient where the optimizer looks for it."""
        own = (DIVERGED, PREFETCH, STRATEGY, BACKWARD)
        for unit in self.units:
            unit.let_go(*own)
            in_use = FORWARD in unit.reasons
            if not in_use:
                use_sharded_views(unit)
        for unit in self.units:
            unit.state.end_backward()
            unit.source = unit.own_source
        for unit in list(self.agreement.late):
            self.gradients.reduce_held(unit)
        wait_for_readers()
        self.gradients.finish()
        diverged = self.agreement.diverged
        self.agreement.end_backward()
        if diverged:
            self.prefetcher.pre_backward_order.forget()
