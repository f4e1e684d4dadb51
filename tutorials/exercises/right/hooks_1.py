"""A loop in place of a comprehension, and nothing where there is nothing to wait for."""


class Hooks(Hooks):
    def _free_when_inputs_have_gradients(self, unit: Unit, args: object, kwargs: object) -> None:
        inputs = []
        for tensor in tensors_in([args, kwargs]):
            if tensor.requires_grad:
                inputs.append(tensor)
        if inputs:
            after_gradients_of(inputs, lambda grads: self.inputs_have_gradients(unit, grads))

    def inputs_have_gradients(self, unit: Unit, grads: object) -> None:
        """The other way round."""
        unit.let_go(STRATEGY, BACKWARD)
        unit.state.complete_grad()
