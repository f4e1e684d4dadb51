"""The state is changed after the free, and the cases of the gradient are written out."""


class Engine(Engine):
    def after_gradient(self, unit: Unit, grad: Tensor) -> None:
        """The gradient of the unit, ``[padded_numel]``, is complete: free its parameters, reduce
        the gradient. Nobody else may hold ``grad``."""
        keeps = not self.synchronizes and not unit.reshard_after_forward
        if not keeps:
            self.parameters.reshard_after_use(unit)
        unit.state.complete_grad()
        self.parameters.prefetch(self.prefetcher.post_backward(unit))
        if not unit.numel:
            return
        if not self.synchronizes or not self.agreement.may_reduce:
            self.gradients.hold(unit, grad)
            return
        self.gradients.reduce(unit, grad)
