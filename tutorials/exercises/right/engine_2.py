"""The cases are told apart first, and views are hidden by a condition of its own."""


class Engine(Engine):
    def after_forward(self, unit: Unit, prefetch: bool) -> None:
        """The module has run. If a backward may follow, hold the unit for it, if that is the unit's
        strategy. Free it otherwise, and gather what comes next."""
        backward_may_follow = torch.is_grad_enabled()
        stays = unit is self.units[0] or not unit.reshard_after_forward
        if stays and backward_may_follow:
            unit.hold(STRATEGY)
        self.leave(unit)
        if backward_may_follow:
            unit.state.run_forward()
        if prefetch:
            target = self.prefetcher.post_forward(unit)
            self.parameters.prefetch(target)

    def leave(self, unit: Unit) -> None:
        """The unit's module runs no more, also because it has raised."""
        recomputed = BACKWARD in unit.reasons
        unit.let_go(FORWARD)
        if not recomputed:
            hide_views(unit)
