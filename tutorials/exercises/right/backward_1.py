"""One loop over the whole chain."""


class Backward(Backward):
    def before_backward(self, calls: Chain, grads: object = None) -> None:
        """A gradient has reached an output of a unit, or autograd needs one of its parameters.

        Args:
            calls: the forward that has made this output or used this parameter, last, and those
                around it, outermost first.

        Raises:
            RuntimeError: a layer has found that the gradients would be wrong.
        """
        self.begin(calls[-1])
        for call in calls:
            is_over = call.unit.state.training is TrainingState.POST_BACKWARD
            if call is calls[-1] or not is_over:
                self._begin_backward(call)
