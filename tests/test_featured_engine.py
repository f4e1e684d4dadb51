"""featured_engine.py: one root's engine counts, and follows its model to another device."""

from unittest.mock import patch

import pytest
import torch

from minifsdp import ForwardPrefetch, NoLimit
from minifsdp.core.layers import Layer
from minifsdp.core.streams import BACKENDS, CpuStream, Streams
from minifsdp.core.unit_state import ShardedState
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.support.prefetch_stats import CountedPrefetcher
from tests.lone_unit import lone_unit
from tests.ranks import on_ranks
from tests.small import stack, step, travels


@pytest.mark.direct
def test_a_model_that_moves_has_the_streams_of_its_new_device():
    def on_meta(device):
        return Streams(device, *(CpuStream() for _ in range(6)))

    prefetcher = CountedPrefetcher(None, None)
    prefetcher.forward_where_it_helps = True
    with lone_unit() as lone, patch.dict(BACKENDS, meta=on_meta):
        engine = FeaturedEngine([lone.unit], NoLimit(), prefetcher)
        assert prefetcher.forward is ForwardPrefetch.FORWARD_PRE
        before = engine.streams
        engine.compute_on(torch.device("meta"))
        assert engine.streams is not before and engine.streams.device.type == "meta"
        assert engine.parameters.streams is engine.gradients.streams is engine.streams
        assert prefetcher.forward is None, "its host runs ahead, so that nothing would be gained"


@pytest.mark.direct
def test_all_that_counts_has_the_same_counts():
    with lone_unit() as lone:
        engine = FeaturedEngine([lone.unit], NoLimit(), CountedPrefetcher(None, None))
        assert engine.stats is engine.parameters.limiter.stats is engine.gradients.stats


@on_ranks(2)
def test_a_rank_that_is_lost_is_told_of_once_and_leaves_no_unit_gathered():
    """The gather that fails is not the only one under way: another was started ahead."""
    model = stack(forward_prefetch=True)
    step(model)  # so that the order is known
    begun = []

    def lost(all_gather):
        def start(self, unit, *args):
            finish, number = all_gather(self, unit, *args), len(begun)
            begun.append(unit)

            def fail():
                finish()
                if number:  # the root's is not lost
                    raise RuntimeError(f"lost in gather {number}")

            return fail

        return start

    with travels("all_gather", lost), pytest.raises(RuntimeError) as error:
        step(model)
    assert len(begun) == 3 and str(error.value) == "lost in gather 1"
    assert error.value.__context__ is None
    assert {unit.state.sharded for unit in model.engine.units} == {ShardedState.SHARDED}
    step(model)  # if the others were not lost after all


@pytest.mark.direct
def test_a_layer_is_found_by_its_class():
    first = Counted()
    with lone_unit() as lone:
        engine = FeaturedEngine([lone.unit], NoLimit(), CountedPrefetcher(None, None))
        engine.use([Layer(), first])
        assert engine.layer(Counted) is first
        with pytest.raises(LookupError, match="this root has no Other"):
            engine.layer(Other)


class Counted(Layer):
    pass


class Other(Layer):
    pass
