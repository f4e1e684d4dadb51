"""compare.py: have all ranks wrapped the same?"""

import pytest
import torch
import torch.distributed as dist

from minifsdp import (
    CustomPolicy,
    MixedPrecision,
)
from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import on_ranks
from tests.small import (
    batch,
    layers,
    step,
)
from tests.test_lockstep import HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, wrap


def other_modules() -> FSDP:
    model = layers()
    chosen = {model[3], model[4][0]}
    return wrap(model, auto_wrap_policy=CustomPolicy(lambda module: module in chosen))


def frozen() -> FSDP:
    model = layers()
    model[2].requires_grad_(False)
    return wrap(model)


DIFFERENT = {  # how the odd rank builds its model, and what it is then said to have
    "one unit more": (lambda: wrap(layers(5)), "no more units", r"unit '5' \(42 elements"),
    "one unit less": (lambda: wrap(layers(3)), r"unit '4' \(42 elements", "no more units"),
    "other sizes": (lambda: wrap(layers(4, 7)), r"<root> \(42 elements", r"<root> \(56 elements"),
    "other modules": (other_modules, "unit '1'", "unit '3'"),
    "a frozen one": (frozen, "unit '2' .* trained", "unit '2' .* frozen"),
    "another strategy": (lambda: wrap(layers(), SHARD_GRAD_OP), "freed after", "kept after"),
    "not sharded": (lambda: wrap(layers(), NO_SHARD), "sharded over 3", "sharded over 1"),
    "another precision": (
        lambda: wrap(layers(), mixed_precision=MixedPrecision(torch.bfloat16)),
        "computed with as torch.float32",
        "computed with as torch.bfloat16",
    ),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("difference", DIFFERENT)
@on_ranks(3)
def test_ranks_with_different_units_are_told_which(difference, odd):
    build, usual, its_own = DIFFERENT[difference]
    model = build() if dist.get_rank() == odd else wrap(layers())
    first, second = (its_own, usual) if odd == 0 else (usual, its_own)
    other = 1 if odd == 0 else odd
    said = f"rank 0 has .*{first}.* where rank {other} has .*{second}.* Build the same model"
    for _ in range(2):  # it does not go away
        with pytest.raises(ValueError, match=said):
            model(batch())
    with pytest.raises(ValueError, match=said):
        model.state_dict()
    step(wrap(layers()))  # and leaves nothing behind


@pytest.mark.parametrize("odd", [[1], [0], [2, 3], [3], [1, 3]])
@on_ranks(4)
def test_in_a_grid_everybody_hears_of_different_units(odd):
    model = wrap(layers(2 + (dist.get_rank() in odd)), HYBRID_SHARD)
    with pytest.raises(ValueError, match=r"no more units.*unit '3'|unit '3'.*no more units"):
        model(batch())
    step(wrap(layers(), HYBRID_SHARD))
