"""shard.py: one 1-D tensor <-> world_size chunks."""

from itertools import product

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from minifsdp.shard import FlatParameter, chunk_numel, real_numel, shard

SIZES = list(product(range(14), range(1, 7)))


@pytest.mark.parametrize("numel, ranks", SIZES)
def test_chunks_put_together_are_the_flat_tensor_then_zeros(numel, ranks):
    flat = torch.arange(1.0, numel + 1)
    together = torch.cat([shard(flat, rank, ranks) for rank in range(ranks)])
    assert torch.equal(together[:numel], flat)
    assert not together[numel:].any()


@pytest.mark.parametrize("numel, ranks", SIZES)
def test_chunks_are_equal_and_as_small_as_can_be(numel, ranks):
    sizes = {len(shard(torch.zeros(numel), rank, ranks)) for rank in range(ranks)}
    assert sizes == {chunk_numel(numel, ranks)}
    assert 0 <= chunk_numel(numel, ranks) * ranks - numel < ranks


@pytest.mark.parametrize("numel, ranks", SIZES)
def test_real_elements_are_all_elements_once(numel, ranks):
    reals = [real_numel(numel, rank, ranks) for rank in range(ranks)]
    assert sum(reals) == numel
    assert reals == sorted(reals, reverse=True) and min(reals) >= 0


def test_a_late_rank_may_have_nothing():
    assert [real_numel(5, rank, 4) for rank in range(4)] == [2, 2, 1, 0]


def test_a_chunk_does_not_keep_the_flat_tensor_alive():
    flat = torch.arange(8.0)
    chunk = shard(flat, 0, 2)
    assert chunk.untyped_storage().size() == 4 * 4
    chunk.zero_()
    assert flat.sum() == 28


def test_dtype_stays():
    assert shard(torch.zeros(3, dtype=torch.bfloat16), 1, 2).dtype == torch.bfloat16


def flat_parameter(is_chunk: bool) -> FlatParameter:
    param = FlatParameter(torch.ones(3))
    param.is_chunk = is_chunk
    param.grad = torch.full((3,), 2.0)
    return param


def test_the_gradient_of_a_flat_parameter_is_that_of_any_other():
    param = flat_parameter(is_chunk=True)
    (param * 3).sum().backward()
    assert torch.equal(param.grad, torch.full((3,), 5.0))
    del param.grad
    assert param.grad is None
    with pytest.raises(RuntimeError, match="size"):
        param.grad = torch.ones(4)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_torchs_clip_grad_norm_does_not_get_the_gradient_of_a_chunk(foreach):
    param = flat_parameter(is_chunk=True)
    for given in (param, [torch.nn.Parameter(torch.ones(1)), param], iter([param])):
        with pytest.raises(RuntimeError, match=r"It would see this rank's chunks only"):
            clip_grad_norm_(given, 1.0, foreach=foreach)
    whole = flat_parameter(is_chunk=False)
    clip_grad_norm_(whole, 1.0, foreach=foreach)
    assert whole.grad.norm() < 1.001


def test_others_do():
    param = flat_parameter(is_chunk=True)
    clip_grad_value_(param, 1.5)
    assert torch.equal(param.grad, torch.full((3,), 1.5))

    def clip_grad_norm_(params):  # a user's own, who may know what to do
        return [p.grad for p in params]

    assert clip_grad_norm_([param]) == [param.grad]
    torch.optim.SGD([param], lr=1.0).step()
    assert torch.equal(param.detach(), torch.full((3,), -0.5))
