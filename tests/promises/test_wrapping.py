"""Promises at wrapping: what a script may say there, and do to the wrapped model afterwards."""

import inspect
from functools import partial

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from tests.promises import Block, batch, ddp, fsdp, refused, same, seeded, train
from tests.ranks import device, on_ranks


class Layer(Block):
    """Reads what programs set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(6, 6), nn.Tanh()
        self.norm = nn.BatchNorm1d(6)
        self.flag = False

    def forward(self, x, scale=1.0):
        x = self.norm(self.linear(x) * scale)
        return -x if self.flag else self.act(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head, self.tied = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.tied.weight = self.head.weight

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = x + block(x, scale=scale)
        return self.tied(self.head(x))


def square(model, x):
    return model(x).pow(2).mean()


# ---------------------------------------------------------------- what is done to a wrapped model


def an_attribute_of_a_block_is_set(wrap):
    net = Net()
    model = wrap(net)
    net.blocks[0].flag = True
    net.blocks[2].place = 3  # a new one
    return train(model, square), net.blocks[0].flag, net.blocks[2].place


def an_attribute_is_changed_while_it_trains(wrap):
    net = Net()
    model = wrap(net)
    first = train(model, square)
    net.blocks[1].flag = True
    second = train(model, square)
    net.blocks[1].extra = 1
    del net.blocks[1].extra
    return first, second, hasattr(net.blocks[1], "extra")


def an_activation_is_replaced(wrap):
    net = Net()
    model = wrap(net)
    net.blocks[0].act = nn.GELU()
    net.blocks[1].act = nn.Sequential(nn.Tanh(), nn.ReLU())
    return train(model, square)


def one_norm_is_frozen(wrap):
    net = Net()
    model = wrap(net)
    net.blocks[0].norm.training = False
    net.blocks[1].training = False
    return train(model, square), net.blocks[0].norm.running_mean


def a_module_in_evaluation_is_wrapped(wrap):
    net = Net().eval()
    model = wrap(net)
    modes = [block.training for block in net.blocks]
    return modes, square(model, batch(3, 6)).detach()


def nothing_is_ignored(wrap):
    return train(wrap(Net()), square)


RIGHT = [
    an_attribute_of_a_block_is_set,
    an_attribute_is_changed_while_it_trains,
    an_activation_is_replaced,
    one_norm_is_frozen,
    a_module_in_evaluation_is_wrapped,
]


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
@on_ranks(2)
def test_right(program):
    same(program)


SETTINGS = {
    "an empty list": {"ignored_modules": []},
    "an empty set": {"ignored_states": set()},
    "torch's words": {
        "sharding_strategy": theirs.ShardingStrategy.SHARD_GRAD_OP,
        "backward_prefetch": theirs.BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": theirs.MixedPrecision(),
        "cpu_offload": theirs.CPUOffload(),
        "auto_wrap_policy": their_wrap.ModuleWrapPolicy({Block}),
    },
    "torch's transformer policy": {
        "auto_wrap_policy": partial(
            their_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}
        )
    },
    "torch's size policy": {
        "auto_wrap_policy": partial(their_wrap.size_based_auto_wrap_policy, min_num_params=54)
    },
}


@pytest.mark.parametrize("settings", SETTINGS)
@on_ranks(2)
def test_these_settings_are_right(settings):
    same(nothing_is_ignored, **SETTINGS[settings])


# ------------------------------------------------------------------------------ the meta device


def steady(module: nn.Module) -> None:
    """Values that do not depend on who is initialized first."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        values = torch.linspace(0.1, 1, tensor.numel()).view(tensor.shape)
        with torch.no_grad():
            tensor.copy_(values)


def where_on_meta(module: nn.Module) -> None:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if any(tensor.is_meta for tensor in own):
        module.to_empty(device=device(), recurse=False)
        steady(module)


def all_below(module: nn.Module) -> None:
    if isinstance(module, (Net, Layer)):
        module.to_empty(device=device())
        module.apply(steady)


def from_meta(init_fn):
    def wrap(module):
        with torch.device("meta"):
            hollow = type(module)()
        policy = minifsdp.ModuleWrapPolicy({Block})
        return FSDP(hollow, auto_wrap_policy=policy, param_init_fn=init_fn)

    return wrap


def from_steady_values(wrap):
    return train(wrap(Net().apply(steady)), square)


@pytest.mark.parametrize("init_fn", [where_on_meta, all_below], ids=lambda f: f.__name__)
@on_ranks(2)
def test_both_styles_of_a_param_init_fn_are_right(init_fn):
    expected = seeded(from_steady_values, ddp)
    found = seeded(from_steady_values, from_meta(init_fn))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -------------------------------------------------------------------------------------- refused


def around(make, whole=True):
    def program(wrap):
        model = wrap(Net())
        return make(model if whole else nn.Sequential(nn.Linear(6, 6).to(device()), model))

    return program


def a_layer_is_replaced(wrap):
    model = wrap(Net())
    model.blocks[0].linear = nn.Linear(6, 6)


def a_head_is_replaced(wrap):
    model = wrap(Net())
    model.head = nn.Linear(6, 2)


def an_adapter_is_added(wrap):
    model = wrap(Net())
    model.blocks[1].act.adapter = nn.Linear(6, 6)


def a_part_is_wrapped_afterwards(wrap):
    model = wrap(Net())
    model.blocks[1].linear = FSDP(model.blocks[1].linear)


def a_weight_is_replaced(wrap):
    model = wrap(nn.Linear(6, 6))
    model.weight = nn.Parameter(torch.ones(6, 6))


def a_local_checkpoint_is_asked_for(wrap):
    FSDP.set_state_dict_type(wrap(Net()), minifsdp.StateDictType.LOCAL_STATE_DICT)


class Image(Block):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = self.two(torch.relu(self.one(x.view(3, 3, 6, 6).to(memory_format=CHANNELS_LAST))))
        assert x.is_contiguous(memory_format=CHANNELS_LAST)
        return x


CHANNELS_LAST = torch.channels_last


def weights_are_in_another_order(wrap):
    return wrap(nn.Sequential(Image().to(memory_format=CHANNELS_LAST)))


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_only_inputs_have_to_be_channels_last(rows):
    def program(wrap):
        model = nn.Sequential(Image())
        if wrap is ddp:
            model.to(memory_format=CHANNELS_LAST)
        return train(wrap(model), lambda model, x: model(x).square().mean(), width=108)

    expected, found = seeded(program, ddp), seeded(program, fsdp(use_orig_params=rows))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


REFUSED = {
    "DDP around": (around(DDP), TypeError, ["DistributedDataParallel cannot wrap", "Net"], {}),
    "DDP around more": (
        around(DDP, whole=False),
        TypeError,
        ["DistributedDataParallel cannot wrap", "module '1'"],
        {},
    ),
    "DDP around copies": (
        around(DDP),
        TypeError,
        ["DistributedDataParallel cannot wrap"],
        {"sharding_strategy": minifsdp.ShardingStrategy.NO_SHARD},
    ),
    "DataParallel": (around(nn.DataParallel), TypeError, ["DataParallel cannot wrap"], {}),
    "DDP inside": (
        lambda wrap: wrap(nn.Sequential(DDP(nn.Linear(6, 6).to(device())))),
        ValueError,
        ["module '0'", "DistributedDataParallel", "Wrap the plain module"],
        {},
    ),
    "channels_last": (
        weights_are_in_another_order,
        ValueError,
        ["parameter 'one.weight' has shape [8, 3, 3, 3] and strides [27, 1, 9, 3]", "contiguous()"],
        {},
    ),
    "a layer": (a_layer_is_replaced, RuntimeError, ["'linear' of Layer", "'blocks.0'"], {}),
    "a head": (a_head_is_replaced, RuntimeError, ["'head' of Net", "<root>"], {}),
    "an adapter": (an_adapter_is_added, RuntimeError, ["'adapter' of Tanh", "'blocks.1'"], {}),
    "wrapped late": (a_part_is_wrapped_afterwards, ValueError, ["is in unit 'blocks.1'"], {}),
    "a weight": (a_weight_is_replaced, RuntimeError, ["'weight' of Linear", "summon_full"], {}),
    "checkpoints": (
        a_local_checkpoint_is_asked_for,
        NotImplementedError,
        ["LOCAL_STATE_DICT", "is not there yet"],
        {},
    ),
    "a limit of None": (
        nothing_is_ignored,
        TypeError,
        ["limit_all_gathers=None", "True", "False"],
        {"limit_all_gathers": None},
    ),
    "FSDP2's precision": (
        nothing_is_ignored,
        TypeError,
        ["minifsdp.MixedPrecision", "MixedPrecisionPolicy"],
        {"mixed_precision": theirs.MixedPrecisionPolicy()},
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_refused(what):
    program, error, words, settings = REFUSED[what]
    refused(program, error, words, **settings)


@on_ranks(2)
def test_the_columns_that_a_trainer_would_keep_are_the_modules():
    net = FSDP(Net(), auto_wrap_policy=minifsdp.ModuleWrapPolicy({Block}))
    assert list(inspect.signature(net.forward).parameters) == ["x", "scale"]
    assert list(inspect.signature(net.blocks[0].forward).parameters) == ["x", "scale"]
