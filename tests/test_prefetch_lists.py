"""prefetch_lists.py: a program says which units to gather ahead."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard
from tests.ranks import device, on_ranks
from tests.small import batch, layers, step, watch


def sharded() -> nn.Module:
    """A root with a layer, and the units '1' to '4'."""
    model = layers()
    for block in model[1:]:
        fully_shard(block)
    return fully_shard(model)


def two_ahead(model: nn.Module) -> nn.Module:
    """Give each unit a list of the two that come next. The root stands for its layer, 0."""
    for at in range(5):
        ahead = [model[to] for to in (at + 1, at + 2) if to < 5]
        (model[at] if at else model).set_modules_to_forward_prefetch(ahead)
        behind = [model[to] for to in (at - 1, at - 2) if to > 0] if at else [model[4], model[3]]
        (model[at] if at else model).set_modules_to_backward_prefetch(behind)
    return model


def passes(model: nn.Module) -> tuple[list[str], list[str]]:
    """What happened to units in a forward and in its backward, after one step before."""
    step(model)
    with watch(model) as log:
        loss = model(batch(step=1)).pow(2).sum()
        forward = list(log)
        loss.backward()
    return forward, log[len(forward) :]


@on_ranks(2)
def test_all_of_a_list_is_gathered_whatever_the_limit():
    forward, backward = passes(two_ahead(sharded()))
    assert " ".join(forward) == "+root +1 +2 +3 -1 +4 -2 -3 -4"
    assert " ".join(backward) == "+4 +3 -root +2 -4 +1 -3 -2 -1"


@on_ranks(2)
def test_without_a_list_the_recorded_order_counts():
    expected = passes(sharded())
    model = two_ahead(sharded())
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch(())
    assert passes(model) == expected
    model = sharded()
    model[4].set_modules_to_backward_prefetch([model[3]])  # as the order says, which goes on
    assert passes(model) == expected
    model = sharded()
    model[2].set_modules_to_forward_prefetch([model[4]])
    forward, backward = passes(model)
    # 3 was not asked for. A host that runs ahead prefetches nothing by itself in a forward.
    begin = "+1 +2 -1" if device().type == "cpu" else "+1 -1 +2"
    assert " ".join(forward) == f"+root {begin} +4 -2 +3 -3 -4"
    assert backward == expected[1]


@on_ranks(2)
def test_the_numbers_stay():
    expected, model = sharded(), two_ahead(sharded())
    for at in range(3):
        assert torch.equal(step(model, at), step(expected, at))
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


@on_ranks(2)
def test_what_is_listed_in_vain_is_freed():
    model = sharded()
    model[4].set_modules_to_forward_prefetch([model, model[4], model[1]])
    model[1].set_modules_to_backward_prefetch([model[4]])  # had its turn
    forward, backward = passes(model)
    assert forward[-2:] == ["-4", "-1"] and forward.count("+1") == 2
    assert backward.count("+4") == 1
    with torch.no_grad(), watch(model) as log:
        model(batch())
    assert log.count("+1") == log.count("-1") == 2


@on_ranks(2)
def test_lists_may_be_given_before_the_root_is_there():
    model = layers()
    for block in model[1:]:
        fully_shard(block)
    model[1].set_modules_to_forward_prefetch([model[2], model[3]])
    forward, _ = passes(fully_shard(model))
    assert " ".join(forward).startswith("+root +1 +2 +3 -1")


@on_ranks(2)
def test_mistakes_are_refused_by_name():
    model, other = sharded(), sharded()
    for wrong in (model[0], model[1][0], "1", None):
        with pytest.raises(ValueError, match=f"there is a {type(wrong).__name__} in the list"):
            model.set_modules_to_forward_prefetch([model[1], wrong])
        with pytest.raises(ValueError, match="given to fully_shard can be prefetched"):
            model[1].set_modules_to_backward_prefetch([wrong])
    model[1].set_modules_to_forward_prefetch([other[2]])
    with pytest.raises(
        RuntimeError, match="unit '2' is in the prefetch list of unit '1', and in an"
    ):
        model(batch())
    model[1].set_modules_to_forward_prefetch([model[2]])
    step(model)


@on_ranks(2)
def test_ranks_with_different_lists_are_told():
    model = sharded()
    if dist.get_rank():
        model[1].set_modules_to_backward_prefetch([model[2]])
    with pytest.raises(ValueError, match=r"prefetches \['2'\] in backward"):
        model(batch())


@on_ranks(2)
def test_what_has_nothing_to_gather_may_be_in_a_list():
    model = layers(2)
    model.append(nn.Sequential(nn.Tanh()))
    for block in model[1:]:
        fully_shard(block)
    fully_shard(model)
    model.set_modules_to_forward_prefetch([model[3], model[1], model[2]])
    forward, _ = passes(model)
    assert " ".join(forward) == "+root +1 +2 -1 -2"


@on_ranks(2)
def test_a_unit_without_parameters_has_no_backward_list():
    model = layers(3)
    empty = fully_shard(nn.Sequential(nn.Tanh()))
    model.append(empty)
    for block in model[1:4]:
        fully_shard(block)
    fully_shard(model)
    empty.set_modules_to_backward_prefetch([model[1]])
    _, backward = passes(model)
    assert backward.index("+3") < backward.index("+2") < backward.index("+1")
