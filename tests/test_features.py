"""features.py: which layers a root has, and in which order."""

import pytest
import torch

from minifsdp import fully_shard
from minifsdp.between_steps.idle import Readers, ShownParams
from minifsdp.checks.first_step import FirstStep
from minifsdp.checks.param_changes import Unreplaced
from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.no_sync import NoSync
from minifsdp.post_forward import PostForward
from minifsdp.precision import FULL_PRECISION, CastBack, Precision
from minifsdp.support.grad_hooks import GradientHooks
from minifsdp.support.listed_modules import Lists
from minifsdp.support.shard_changes import ShardChanges
from tests.parity import check_at_rest
from tests.ranks import device, on_ranks
from tests.small import (
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    stack,
    step,
)

SOME = {CastBack, Lists, PostForward, ShownParams}  # what not every root needs


def kinds(engine):
    return [type(layer) for layer in engine.moments.layers]


@on_ranks(2)
def test_a_root_has_no_layer_of_a_feature_that_it_does_not_use():
    assert not SOME & {*kinds(stack().engine)}
    assert SOME & {*kinds(stack(use_orig_params=True).engine)} == {ShownParams}
    model = layers().to(device())
    fully_shard([model[1], model[2]])
    fully_shard(model)
    assert SOME & {*kinds(model._hooks.engine)} == {Lists, ShownParams}
    assert SOME & {*kinds(stack(mixed_precision=FULL_PRECISION).engine)} == {CastBack}


@on_ranks(4)
def test_a_unit_with_a_post_forward_shard_has_its_layer():
    model = layers().to(device())
    fully_shard(model[1], reshard_after_forward=2)
    fully_shard(model)
    assert PostForward in kinds(model._hooks.engine)


@pytest.mark.parametrize(
    "first, second",
    [
        (NoSync, ShardChanges),  # frees a unit before its shard is given other memory
        (ShardChanges, Precision),  # what was cast decides on the dtype
        (Unreplaced, RankAgreement),  # raises before others are asked
        (FirstStep, RankAgreement),
        (Readers, GradientHooks),  # an optimizer may be among the hooks
    ],
)
@on_ranks(1)
def test_the_order_is_the_one_that_matters(first, second):
    found = kinds(stack().engine)
    assert found.index(first) < found.index(second)


@on_ranks(2)
def test_an_engine_with_what_it_computes_in_alone_trains_as_a_plain_model():
    """The rest are observers and checks. Readers keep shards of this machine from being written to
    while other ranks read them."""
    torch.manual_seed(0)
    plain = layers().to(device())
    torch.manual_seed(0)
    model = stack()
    engine = model.engine
    step(model)  # ranks number units alike from here on; in a test before they may have made others
    engine.use([ShardChanges(engine), Precision(engine), Readers(engine)])
    for at in range(3):
        model.zero_grad()
        model(batch(step=at)).pow(2).sum().backward()
        expected = mean_gradients(plain, plain(batch(step=at)).pow(2).sum())
        assert_same_gradients(gathered_gradients(model), expected)
        check_at_rest(model)
