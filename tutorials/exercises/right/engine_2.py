"""Written as one condition, with the state changed last and views hidden by hand."""


class Engine(Engine):
    def after_forward(self, unit: Unit, prefetch: bool) -> None:
        """The module has run. Free its parameters, unless its backward follows at once."""
        recomputed = unit.state.training is TrainingState.PRE_BACKWARD
        if not recomputed:
            use_sharded_views(unit)
            if torch.is_grad_enabled():
                unit.state.run_forward()
            if not self.stays_after_forward(unit):
                self.parameters.reshard_after_use(unit)
        if prefetch:
            self.parameters.prefetch(self.prefetcher.post_forward(unit))

    def stays_after_forward(self, unit: Unit) -> bool:
        """Whether a unit keeps its parameters when its forward ends."""
        keeps = unit is self.units[0] or not unit.reshard_after_forward
        comes = torch.is_grad_enabled() and unit.state.training == TrainingState.FORWARD
        return unit.state.training == TrainingState.PRE_BACKWARD or (comes and keeps)
