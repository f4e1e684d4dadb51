"""same_model.py: have all ranks wrapped the same?"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import CustomPolicy, EventQueue, ForwardPrefetch, MixedPrecision
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.checks import same_model
from minifsdp.sim import cluster
from tests.checks.test_rank_agreement import (
    FULL_SHARD,
    HYBRID_SHARD,
    NO_SHARD,
    SHARD_GRAD_OP,
    WORLDS,
    wrap,
)
from tests.parity import alone
from tests.ranks import on_ranks, run
from tests.small import (
    batch,
    layers,
    step,
)


def other_modules() -> FSDP:
    model = layers()
    chosen = {model[3], model[4][0]}
    return wrap(model, auto_wrap_policy=CustomPolicy(lambda module: module in chosen))


def frozen() -> FSDP:
    model = layers()
    model[2].requires_grad_(False)
    return wrap(model)


def turned() -> FSDP:
    model = layers()
    linear = model[3][0]
    linear.weight = torch.nn.Parameter(linear.weight.detach().view(3, 12))
    return wrap(model)


def renamed() -> FSDP:
    model = layers()
    linear = model[1][0]
    linear.register_parameter("offset", linear._parameters.pop("bias"))
    return wrap(model)


def low(**settings) -> FSDP:
    return wrap(layers(), mixed_precision=MixedPrecision(**settings))


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
    "another precision of reductions": (
        lambda: low(reduce_dtype=torch.bfloat16),
        "reduce_dtype=None",
        "reduce_dtype=torch.bfloat16",
    ),
    "another precision of buffers": (
        lambda: low(buffer_dtype=torch.bfloat16),
        "buffer_dtype=None",
        "buffer_dtype=torch.bfloat16",
    ),
    "other casts": (
        lambda: low(cast_root_forward_inputs=False),
        "cast_root_forward_inputs=True",
        "cast_root_forward_inputs=False",
    ),
    "another shape of as many elements": (
        turned,
        r"'0.weight' \[6, 6\] in unit '3'",
        r"'0.weight' \[3, 12\] in unit '3'",
    ),
    "another name of a parameter": (renamed, r"'0.bias' \[6\] in unit '1'", r"'0.offset' \[6\]"),
    "another limit": (
        lambda: wrap(layers(), limit_all_gathers=3),
        "limit_all_gathers=True",
        "limit_all_gathers=3",
    ),
    "a limit that holds": (
        lambda: wrap(layers(), limit_all_gathers=2),
        "limit_all_gathers=True",
        "limit_all_gathers=2",
    ),
    "room for one more that is being freed": (
        lambda: wrap(layers(), limit_all_gathers=EventQueue(2, freeing=3)),
        "limit_all_gathers=True",
        r"limit_all_gathers=\(2, 3\)",
    ),
    "another prefetch": (
        lambda: wrap(layers(), forward_prefetch=ForwardPrefetch.FORWARD_POST),
        r"forward_prefetch=(?:None|ForwardPrefetch\.FORWARD_PRE)",  # the device decides
        "forward_prefetch=ForwardPrefetch.FORWARD_POST",
    ),
    "another group of the same ranks": (None, r"in group '\w+'", r"in group '\w+'"),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("difference", DIFFERENT)
@on_ranks(3)
def test_ranks_with_different_units_are_told_which(difference, odd):
    build, usual, its_own = DIFFERENT[difference]
    if build is None:
        group = dist.new_group()  # on every rank, but used on one only

        def build() -> FSDP:
            return wrap(layers(), process_group=group)

    model = build() if dist.get_rank() == odd else wrap(layers())
    first, second = (its_own, usual) if odd == 0 else (usual, its_own)
    other = 1 if odd == 0 else odd
    said = f"rank 0 has .*{first}.* where rank {other} has .*{second}.* Build the same model"
    for _ in range(2):  # it does not go away
        with pytest.raises(ValueError, match=said):
            model(batch())
    if difference != "not sharded":  # such a rank has all that a state dict needs
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


# ----------------------------------------------------------------------------------------- values


def unseeded(strategy=FULL_SHARD, only: int | None = None, **settings) -> FSDP:
    """Each rank draws its own values, for all layers or for one of them."""
    model = layers()
    torch.manual_seed(dist.get_rank())
    for place, layer in enumerate(model):
        if only in (None, place):
            layer.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    return wrap(model, strategy, **settings)


def check_unseeded(strategy, only, name):
    model = unseeded(strategy, only)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"unit {name} differ between .* torch.manual_seed"):
            model(batch())
    step(wrap(layers(), strategy))


@pytest.mark.parametrize("only, name", [(None, "<root>"), (0, "<root>"), (3, "'3'")])
@pytest.mark.parametrize("strategy, ranks", WORLDS)
def test_values_that_each_rank_has_drawn_for_itself(strategy, ranks, only, name):
    run(check_unseeded, ranks, strategy, only, name)


@pytest.mark.parametrize("odd", range(4))
@on_ranks(4)
def test_one_rank_of_a_grid_has_other_values(odd):
    model = layers()
    if dist.get_rank() == odd:
        with torch.no_grad():
            model[2][0].bias[5] += 1
    model = wrap(model, HYBRID_SHARD)
    with pytest.raises(ValueError, match="unit '2' differ between"):
        model(batch())


def load_all(model):
    model.load_state_dict(layers().state_dict())


def draw_inside(model):
    torch.manual_seed(0)
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)


def fill_chunks(model):
    for param in model.parameters():
        param.data.fill_(0.1)


def summon_and_set(model):
    with FSDP.summon_full_params(model):
        for param in model.parameters():
            torch.nn.init.constant_(param, 0.1)


@pytest.mark.parametrize("then", [load_all, draw_inside, fill_chunks, summon_and_set])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_ranks(2)
def test_values_that_all_ranks_set_after_wrapping_are_what_counts(strategy, then):
    model = unseeded(strategy)
    then(model)
    step(model)


@on_ranks(2)
def test_one_rank_may_be_the_only_one_to_change_its_chunk():
    model = wrap(layers())
    if dist.get_rank() == 1:
        fill_chunks(model)
    step(model)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_ranks(2)
def test_rank_0_s_values_need_no_seed(strategy):
    step(unseeded(strategy, sync_module_states=True))


@on_ranks(2)
def test_replicas_that_load_other_values_are_told():
    model = wrap(layers(), NO_SHARD)
    with FSDP.summon_full_params(model):
        model.module[2].module[0].bias.data[0] = dist.get_rank()
    with pytest.raises(ValueError, match="unit '2' differ between the ranks 0 and 1"):
        model(batch())


@on_ranks(2)
def test_values_are_compared_once():
    model = wrap(layers(), NO_SHARD)
    step(model)
    model.engine.units[2].sharded_flat_param.data[-1] += dist.get_rank()
    with patch.object(same_model, "fingerprint", None):
        step(model)


@on_ranks(4)
def test_experts_have_values_of_their_own():
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    model = layers()
    torch.manual_seed(dist.get_rank() // 2)
    model[2][0].reset_parameters()
    torch.manual_seed(dist.get_rank())
    model[3][0].reset_parameters()
    groups = {model[2]: pair, model[3]: alone()}
    policy = CustomPolicy(lambda m: {"process_group": groups[m]} if m in groups else False)
    step(wrap(model, auto_wrap_policy=policy))


def test_what_a_rank_says_of_a_unit_is_as_long_on_many_ranks():
    """The first rank gets it from all of them."""
    lengths = []
    for ranks in (16, 1024):
        with cluster(nodes=ranks // 8):
            unit = FSDP(nn.Linear(1024, 1)).engine.root
            lengths.append(len(str(tuple(same_model._describe(unit, with_values=False)))))
    assert lengths[1] < lengths[0] + 20
