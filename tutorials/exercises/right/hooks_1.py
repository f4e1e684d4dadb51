"""A method frees, given to the hook with partial."""


class Hooks(Hooks):
    def _free_when_inputs_have_gradients(self, unit: Unit, args: object, kwargs: object) -> None:
        # A frozen unit has no gradient of its own to wait for. Its backward is over when its inputs
        # have theirs; where they get none, the unit is freed at the end of the whole backward.
        inputs = []
        for tensor in tensors_in([args, kwargs]):
            if tensor.requires_grad:
                inputs.append(tensor)
        if inputs:
            after_gradients_of(inputs, partial(self._free, unit))

    def _free(self, unit: Unit, grads: object) -> None:
        unit.let_go(STRATEGY, BACKWARD)
        unit.state.complete_grad()
