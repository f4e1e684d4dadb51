"""explain.py: a table of the units of a model, and what `print` shows of them."""

import io
import re
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

import minifsdp
from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.between_steps.explain import table
from minifsdp.core.unit_state import Purpose
from tests.parity import grid
from tests.ranks import device, on_ranks
from tests.small import Block, stack


def cells(model, unit):
    """The cells of one row."""
    (row,) = (line for line in table(model).splitlines() if line.startswith(f"{unit} "))
    return re.split(r"  +", row)


@on_ranks(4)  # over which the parameters need padding
def test_sizes_are_those_of_the_tensors():
    precision = MixedPrecision(torch.bfloat16)
    model = stack(mixed_precision=precision, cpu_offload=CPUOffload(True))
    unit = model.engine.units[1]
    name, parameters, held, gathered, computed_in, cut_in, _ = cells(model, "1")
    assert name == unit.name and int(parameters) == unit.numel
    assert held == f"{unit.padded_shard.nbytes} B" and computed_in == "bfloat16"
    assert cut_in == "chunks" and cells(stack(use_orig_params=True), "1")[5] == "rows"
    model.engine.start(Purpose.TRAIN)
    assert gathered == f"{unit.unsharded.nbytes} B" == f"{unit.layout.padded_numel * 2} B"
    held = sum(unit.padded_shard.nbytes for unit in model.engine.units)
    assert cells(model, "in all")[2] == f"{held} B"


@pytest.mark.parametrize(
    "strategy, shared_by",
    [
        ("FULL_SHARD", "4 ranks"),
        ("SHARD_GRAD_OP", "4 ranks, stays after forward"),
        ("HYBRID_SHARD", "2 ranks, 2 replicas"),
        ("_HYBRID_SHARD_ZERO2", "2 ranks, 2 replicas, stays after forward"),
        ("NO_SHARD", "1 rank, 4 replicas"),
    ],
)
@on_ranks(4)
def test_who_shares_a_unit(strategy, shared_by):
    mesh = grid(ShardingStrategy[strategy]) if "HYBRID" in strategy else None
    model = stack(sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)
    assert cells(model, "1")[-1] == shared_by
    assert (cells(model, "1")[3] == "as it is") == (strategy == "NO_SHARD")
    settings = {"sharding_strategy": ShardingStrategy[strategy], "device_mesh": mesh}
    uploaded = stack(cpu_offload=CPUOffload(True), **settings)
    assert cells(uploaded, "1")[3] != "as it is"  # it is copied to the device


@on_ranks(2)
def test_one_unit_that_is_most_of_the_model_is_warned_of():
    assert "Unit" not in table(stack())
    whole = FSDP(nn.Sequential(*(Block(nn.Linear(6, 6)) for _ in range(4))).to(device()))
    assert "Unit <root> has 100% of the parameters" in table(whole)
    large = FSDP(nn.Sequential(FSDP(nn.Linear(6, 60)), nn.Linear(60, 1)).to(device()))
    assert "Unit '0' has 87% of the parameters" in table(large)


@on_ranks(2)
def test_it_says_why_a_unit_is_gathered_now():
    model = stack(2, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    out = model(torch.ones(2, 6, device=device()))
    assert "Unit '1' is held now, for its strategy.\nUnit '2' is held" in table(model)
    with FSDP.summon_full_params(model.module[1]):
        assert "Unit '1' is held now, for summon_full_params." in table(model)
        assert "Unit '2'" not in table(model)
    del out
    assert "held now" not in table(model)


@on_ranks(2)
def test_print_shows_where_the_units_are():
    model = stack()
    shown = [line.strip() for line in repr(model).splitlines() if "unit of" in line]
    numels = [unit.numel for unit in model.engine.units if unit.numel]
    assert shown == [f"unit of {numel} parameters, sharded over 2 ranks" for numel in numels]


@on_ranks(1)
def test_it_prints_the_table():
    model, printed = stack(), io.StringIO()
    with redirect_stdout(printed):
        minifsdp.explain(model)
    assert printed.getvalue() == table(model) + "\n"


def test_it_says_what_has_no_units(capsys):
    with pytest.raises(ValueError, match="Linear has no sharded parameters: there is no Fully"):
        minifsdp.explain(nn.Linear(2, 2))
    assert capsys.readouterr().out == ""
