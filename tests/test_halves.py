"""halves.py: an all-reduce, as two stages."""

import pytest
import torch

from minifsdp.halves import FirstHalf, SecondHalf
from tests.lone_unit import lone_unit


@pytest.mark.direct
def test_the_second_half_starts_when_it_is_asked_for_and_goes_on_with_the_tensor_of_the_first():
    with lone_unit(replicas=2) as lone:
        flat = torch.tensor([0.0, 2, 4, 6, 8])
        group = lone.unit.replicate_group
        started, finish = FirstHalf("replicate").launch(lone.unit, flat)
        finish()
        assert group.called == ["all-reduce"], "the backward goes on before the second one starts"
        result, finish = SecondHalf().launch(lone.unit, started)
        finish()
        assert group.called == ["all-reduce", "its second half"]
        assert result is flat and flat.tolist() == [5, 6, 7, 8, 9]  # the other replica has 10s


@pytest.mark.direct
def test_the_first_half_runs_where_it_is_told_to_and_the_second_one_after_the_reductions():
    assert FirstHalf("reduce").stream == "reduce"
    assert FirstHalf("replicate").stream == SecondHalf().stream == "replicate"
