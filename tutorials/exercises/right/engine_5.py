"""Units are freed first, and their states end in a loop of their own."""


class Engine(Engine):
    def end_of_backward(self) -> list[Reduction]:
        """Every unit is sharded again, every gradient where the optimizer looks for it."""
        own = (PREFETCH, STRATEGY, BACKWARD)
        for unit in self.units:
            unit.let_go(*own)
            in_use = FORWARD in unit.reasons
            if not in_use:
                hide_views(unit)
        for unit in self.units:
            unit.state.end_backward()
        reduced = self.gradients.finish()
        return reduced
