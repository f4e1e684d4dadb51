"""Units are freed before the reductions are waited for, and their states end first."""


class Engine(Engine):
    def end_of_backward(self, in_use: set[Unit]) -> None:
        """Every unit is sharded again, every gradient where the optimizer looks for it.

        Args:
            in_use: units whose forward is still running, if it has called torch.autograd.grad.
        """
        for unit in self.units:
            unit.state.end_backward()
            if not self.stays_after_backward(unit) and unit not in in_use:
                self.parameters.reshard(unit)
        for unit in self.agreement.late:
            self.gradients.reduce_held(unit)
        self.gradients.finish()
        if self.agreement.diverged:
            self.prefetcher.pre_backward_order.forget()  # every rank has seen another one
            self.agreement.diverged = False
        for unit in self.units:
            if self.stays_after_backward(unit):
                unit.kept_version = unit.sharded_flat_param._version
                use_sharded_views(unit)
