"""Sums are made out of place, and the list is a new one each time."""


class Gradients(Gradients):
    def take(self, unit: Unit, grad: Tensor) -> None:
        """With one way out for what has to wait."""
        if not unit.waits:
            self._reduce(unit, grad)
            return
        held = self.held.pop(unit, None)
        whole = grad.whole() if not isinstance(grad, Tensor) else grad
        self.held[unit] = whole if held is None else held + whole

    def _reduce(self, unit: Unit, grad: Tensor) -> None:
        """With other names, and counted first."""
        self.stats.reductions = self.stats.reductions + 1
        going = []
        for older in self._under_way:
            if older.advance():
                going.append(older)
        started = Reduction(unit, grad, self.streams)
        started.start()
        self._under_way = [started, *going]
        self._reductions = [*self._reductions, started]
