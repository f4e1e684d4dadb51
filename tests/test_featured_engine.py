"""featured_engine.py: one root's engine counts, and follows its model to another device."""

from unittest.mock import patch

import pytest
import torch

from minifsdp import ForwardPrefetch, NoLimit
from minifsdp.core.streams import BACKENDS, CpuStream, Streams
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.support.prefetch_stats import CountedPrefetcher
from tests.lone_unit import lone_unit


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
        assert engine.stats is engine.parameters.stats is engine.gradients.stats
