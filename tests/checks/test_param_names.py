"""The names of flat parameters: programs that choose parameters by name are warned."""

import copy
import pickle
import warnings

import pytest
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
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
