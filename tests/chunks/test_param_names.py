"""The names of parameters, for programs that choose parameters by name: those of rows are right,
those of flat parameters warn."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, fully_shard
from tests.promises import Block, fsdp
from tests.ranks import device, on_ranks


class Layer(Block):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def model(**settings):
    return fsdp(**settings)(nn.Sequential(Layer(), Layer(), nn.Linear(4, 1)))


QUESTIONS = {
    "in": lambda name: "bias" in name,
    "not in": lambda name: "bias" not in name,
    "any": lambda name: any(part in name for part in ("nothing", "norm.bias", "2.bias")),
    "endswith": lambda name: name.endswith("bias"),
    "endswith several": lambda name: name.endswith(("nothing", "bias")),
    "startswith": lambda name: name.startswith(("0.norm.b", "1.norm.b", "2.b")),
    "==": lambda name: name == "2.bias",
    "!=": lambda name: name != "2.bias",
    "in a list": lambda name: name in ["0.linear.bias", "2.bias"],
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@on_ranks(2)
def test_choosing_parameters_by_name_is_warned_of_once_for_each_listing(question, strategy):
    sharded = model(sharding_strategy=strategy)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for name, _ in sharded.named_parameters():
                QUESTIONS[question](name)
        told = [str(warning.message) for warning in said]
        assert told and len(told) == len(set(told)) <= 2, told  # two: a list has two questions
        assert "bias" in told[0] and "_flat_param" in told[0] and "wrap" in told[0]
        assert said[0].filename == __file__


@on_ranks(2)
def test_names_that_choose_whole_units_are_ordinary():
    """No warning, which would be an error here."""
    sharded = model()
    names = [name for name, _ in sharded.named_parameters()]
    assert names == ["_flat_param", "0._flat_param", "1._flat_param"]
    assert [name for name in names if name.startswith("0.")] == ["0._flat_param"]
    assert [name for name in names if "unknown" in name or "1" in name] == ["1._flat_param"]
    by_name = dict(sharded.named_parameters())
    assert by_name["1._flat_param"] is by_name[names[2]]
    assert names[1] != 3 and names[1] != "0" and names[1] == str(names[1])
    assert names.index("1._flat_param") == 2 and sorted(names)[0] == "0._flat_param"
    for other in (copy.deepcopy(names[1]), pickle.loads(pickle.dumps(names[1])), names[1] + "!"):
        assert type(other) is str


@on_ranks(2)
def test_names_of_original_parameters_are_answered():
    sharded = model()
    with FSDP.summon_full_params(sharded):
        biases = [name for name, _ in sharded.named_parameters() if "bias" in name]
    assert len(biases) == 5


@on_ranks(2)
def test_the_name_below_another_module():
    """Asked with a prefix, the flat parameter stands for names with this prefix."""
    layer = FSDP(Layer().to(device()))
    (name, _), *others = layer.named_parameters(prefix="body")
    assert name == "body._flat_param" and not others
    with pytest.warns(UserWarning, match=r"body\.norm\.bias"):
        assert name != "body.norm.bias"
    assert dist.get_world_size() == 2


# ------------------------------------------------------- programs that make names of parameters


def going_through_children(module):
    """transformers' ``get_parameter_names``, from which Trainer chooses what is decayed."""
    names = []
    for name, child in module.named_children():
        if not isinstance(child, nn.LayerNorm):
            names += [f"{name}.{inner}" for inner in going_through_children(child)]
    return names + [name for name in module._parameters if "bias" not in name]


def decayed_by_trainer(model):
    names = going_through_children(model)
    decayed = [name for name, _ in model.named_parameters() if name in names]
    others = [name for name, _ in model.named_parameters() if name not in names]
    assert len(decayed) + len(others) == len(list(model.parameters()))
    return decayed


def decayed_by_min_gpt(model):
    """Sets of names, from those of modules and those of their own parameters."""
    decayed, others = set(), set()
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            is_decayed = name != "bias" and not isinstance(module, nn.LayerNorm)
            (decayed if is_decayed else others).add(f"{path}.{name}" if path else name)
    by_name = dict(model.named_parameters())
    assert by_name.keys() == decayed | others and not decayed & others
    return [name for name in by_name if name in decayed]


class WithScale(nn.Module):
    """A parameter of the root's own, and layers of which some are the root's, too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layers(x * self.scale))


def by_fully_shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def only_layers(model):
    for position, layer in enumerate(model.layers):
        model.layers[position] = FSDP(layer, use_orig_params=True)
    return model


def checkpointed(model):
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    return model


ROWS = {
    "rows": fsdp(use_orig_params=True),
    "fully_shard": by_fully_shard,
    "layers of a plain model": only_layers,
    "checkpointed after wrapping": lambda m: checkpointed(fsdp(use_orig_params=True)(m)),
    "checkpointed before": lambda m: fsdp(use_orig_params=True)(checkpointed(m)),
}


@pytest.mark.parametrize("program", [decayed_by_trainer, decayed_by_min_gpt])
@pytest.mark.parametrize("wrap", ROWS)
@on_ranks(2)
def test_with_rows_the_same_parameters_are_chosen_as_in_the_plain_model(wrap, program):
    def plain_names(names):
        marks = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
        for mark in marks:
            names = [str(name).replace(mark, "") for name in names]
        return sorted(names)

    expected = program(WithScale())
    assert len(expected) == 4
    model = ROWS[wrap](WithScale().to(device()))
    assert plain_names(program(model)) == plain_names(expected)
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            assert plain_names(program(model)) == plain_names(expected)


@on_ranks(2)
def test_with_chunks_all_of_a_unit_is_chosen_and_that_is_warned_of():
    model = fsdp()(WithScale().to(device()))
    with pytest.warns(UserWarning, match=r"a part of the flat parameter '_flat_param' now"):
        decayed = decayed_by_trainer(model)
    assert decayed == ["_flat_param", "layers.0._flat_param", "layers.1._flat_param"]


@on_ranks(2)
def test_a_name_is_the_plain_string_in_a_set_and_in_a_file():
    model = fsdp(use_orig_params=True)(WithScale().to(device()))
    names = [name for name, _ in model.named_parameters()]
    assert "layers.0.linear.weight" in {*names} and names[0] == "scale" and names[0] != "head"
    assert names[1] == "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.linear.weight"
    assert names[1] == "layers.0.linear.weight" and names[1] != "layers.1.linear.weight"
    assert names[1] != 1 and type(pickle.loads(pickle.dumps(names[1]))) is str
    assert [name for name, _ in model.named_modules()].count("layers.0") == 2


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_torch_load_takes_the_state_of_an_optimizer_with_names(rows):
    model = fsdp(use_orig_params=rows)(WithScale().to(device()))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    model(torch.ones(2, 4, device=device())).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    (group,) = torch.load(file)["param_groups"]  # only weights, and what is as harmless
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
