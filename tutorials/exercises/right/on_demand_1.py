"""Right: one question that says whether a unit may go, and a return that skips what is there."""


class OnDemand(OnDemand):
    def gather(self, calls: Chain) -> None:
        check_in_backward()
        self.backward.before_backward(calls)
        if (unit := calls[-1].unit).shows_views:
            return
        self.agreement.at(Moment.BACKWARD_OF, unit)
        self._unshard_again(unit)

    def _is_done_with(self, unit: FeaturedUnit) -> bool:
        return (
            self.graphs == 1
            and unit not in self._needed_again
            and unit.state.sharded is ShardedState.UNSHARDED
            and BACKWARD in unit.reasons
            and not unit.reasons - {BACKWARD, STRATEGY}
            and not unit.unsharded.is_saved
        )

    def _free_early(self, unit: FeaturedUnit) -> None:
        if self._is_done_with(unit):
            hide_views(unit)
            if not unit.unsharded.is_in_use(unit.views):
                self._freed_early |= {unit: reshard(unit, self.engine.parameters.streams)}
                self.engine.stats.count_free(unit)
            else:
                show_views(unit)

    def _unshard_again(self, unit: FeaturedUnit) -> None:
        self._needed_again |= {unit}
        if (event := self._freed_early.pop(unit, None)) is not None:
            self.engine.limiter.freed(unit, event)
        self.engine.parameters.unshard(unit, BACKWARD)
        wait_for_unshard(unit)
        show_views(unit)
