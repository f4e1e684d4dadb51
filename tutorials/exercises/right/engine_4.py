"""One reason after the other is let go, and the state is changed after the free."""


class Engine(Engine):
    def after_gradient(self, unit: Unit, grad: Any) -> None:
        """The gradient of the unit, ``[padded_numel]``, is complete: free its parameters, reduce
        the gradient. If it is a tensor nobody else may hold it."""
        for reason in (STRATEGY, BACKWARD):
            unit.let_go(reason)
        unit.state.complete_grad()
        self.parameters.prefetch(self.prefetcher.post_backward(unit))
        if not unit.numel:
            return
        self.gradients.take(unit, grad)
