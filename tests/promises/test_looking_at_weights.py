"""Promises to modules that look at weights before they compute: what they find is what they find in
a plain model, so that they choose the same way, and their outputs are the same in every bit.

``nn.TransformerEncoder`` and its layers are the ones in torch. In an evaluation they compute with
the weights of the modules inside of them, and do not call these; with a mask for padding all
outputs at padding are then zero.
"""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy, fully_shard
from tests.ranks import device, on_ranks

LAYER, ATTENTION = nn.TransformerEncoderLayer, nn.MultiheadAttention
UNITS = {
    "layers": [LAYER],
    "what is in layers": [ATTENTION],
    "both": [LAYER, ATTENTION],
    "each linear layer": [nn.Linear],
    "norms": [LAYER, nn.LayerNorm],
}
LATE = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
MASKS = {
    "none": None,
    "bool": LATE,
    "float": torch.zeros(3, 5).masked_fill(LATE, float("-inf")),
    "in front": LATE.flip(1),
}


def encoder(layers=2, **settings):
    torch.manual_seed(0)
    layer = LAYER(16, 2, 32, dropout=0.0, **{"batch_first": True, **settings})
    with warnings.catch_warnings():  # about settings with which it has no fast path
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(layer, layers).to(device())


def sharded(model, units, layout):
    if layout == "fully_shard":
        for module in reversed(list(model.modules())):
            if isinstance(module, tuple(units)):
                fully_shard(module)
        return fully_shard(model)
    policy = ModuleWrapPolicy({*units})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=layout == "rows")


def source():
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)).to(device())


def outputs(model, context):
    """What a model gives for each mask, by the mask's name."""
    batch_first = next(m for m in model.modules() if isinstance(m, ATTENTION)).batch_first
    x = source() if batch_first else source().transpose(0, 1)
    with warnings.catch_warnings(), context():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return {
            name: model(x, src_key_padding_mask=None if mask is None else mask.to(device()))
            for name, mask in MASKS.items()
        }


def equal(found, expected):
    return [name for name in MASKS if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("layout", ["chunks", "rows", "fully_shard"])
@on_ranks(2)
def test_an_evaluation_is_that_of_the_plain_model(layout, units, context):
    for settings in ({}, {"batch_first": False}, {"norm_first": True}):
        expected = outputs(encoder(**settings).eval(), context)
        model = sharded(encoder(**settings), UNITS[units], layout).eval()
        assert equal(outputs(model, context), expected)
        # Also of what was gathered without a call.
        assert model._hooks.engine.stats.unsharded_units == 0


@pytest.mark.parametrize("context", [torch.no_grad, nullcontext])
@pytest.mark.parametrize("layout", ["chunks", "rows", "fully_shard"])
@on_ranks(2)
def test_so_is_one_between_a_forward_and_its_backward(layout, context):
    plain, model = encoder(), sharded(encoder(), [LAYER], layout)
    found = []
    for each in (plain, model):
        loss = each.train()(source()).pow(2).sum()
        found.append(outputs(each.eval(), context))
        loss.backward()
    assert equal(*found)
    step = [torch.optim.SGD(each.parameters(), lr=0.1).step for each in (plain, model)]
    for each in step:
        each()
    assert equal(outputs(model, context), outputs(plain, context))


@pytest.mark.parametrize("layout", ["chunks", "rows", "fully_shard"])
@on_ranks(2)
def test_so_is_that_of_a_frozen_model_with_gradients_on(layout):
    plain, model = encoder(), sharded(encoder().requires_grad_(False), [LAYER], layout)
    assert equal(
        outputs(model.eval(), nullcontext),
        outputs(plain.requires_grad_(False).eval(), nullcontext),
    )


@pytest.mark.parametrize("layout", ["chunks", "rows"])
@on_ranks(2)
def test_what_is_gathered_without_a_call_is_freed_with_the_unit_around_it(layout):
    model = sharded(encoder(layers=6), [LAYER, ATTENTION], layout).eval()
    outputs(model, torch.no_grad)
    # The root, a layer and its attention, and the next layer, which is prefetched.
    assert model.engine.stats.peak_unsharded_units <= 4
    assert model.engine.stats.unsharded_units == 0


@pytest.mark.parametrize("layout", ["chunks", "rows", "fully_shard"])
@on_ranks(2)
def test_in_training_a_module_has_to_call_what_is_in_a_unit_of_its_own(layout):
    """An attention computes with the weight of its ``out_proj``, and never calls it."""
    model = sharded(encoder(), [nn.Linear], layout)
    parameter = r"parameter 'weight' of unit 'layers.0.self_attn.out_proj' is sharded now"
    inside = r"forward of unit <root> got a parameter that is sharded .*layers.0.self_attn.out_proj"
    with pytest.raises(RuntimeError, match=parameter if layout == "chunks" else inside):
        model(source())
    expected = outputs(encoder().eval(), torch.no_grad)
    assert equal(outputs(model.eval(), torch.no_grad), expected)  # and nothing is left of it


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


USES = {
    # Autograd saves the weight, without gradients, before there is an operation.
    "it is saved": lambda x, norm: nn.functional.layer_norm(x, (6,), norm.weight, norm.bias),
    "an autograd.Function": lambda x, norm: Scale.apply(x, norm.weight),
}


class Uses(nn.Module):
    """Computes with what is in a unit of its own, and does not call that one."""

    def __init__(self, use):
        super().__init__()
        self.first, self.norm, self.use = nn.Linear(6, 6), nn.LayerNorm(6), use

    def forward(self, x):
        return self.use(self.first(x), self.norm)


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_nor_may_it_where_autograd_has_turned_gradients_off(use):
    """The weight would have no gradient."""
    torch.manual_seed(0)
    plain = Uses(USES[use]).to(device())
    model = sharded(copy.deepcopy(plain), [nn.LayerNorm], "chunks")
    x = torch.ones(2, 6, device=device())
    with pytest.raises(RuntimeError, match=r"parameter '(weight|bias)' of unit 'norm' is sharded"):
        model(x)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def with_gradients_again(x, norm):
    with torch.enable_grad():
        return x * norm.weight


@on_ranks(2)
def test_nor_where_an_evaluation_turns_them_on_again():
    model = sharded(Uses(with_gradients_again).to(device()), [nn.LayerNorm], "chunks")
    with torch.no_grad(), pytest.raises(RuntimeError, match="'weight' of unit 'norm' is sharded"):
        model(torch.ones(2, 6, device=device()))


class Nested(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)


@pytest.mark.parametrize("layout", ["rows", "fully_shard"])
@on_ranks(2)
def test_of_nested_units_the_one_that_computes_is_named(layout):
    model = sharded(Nested(encoder()), [nn.TransformerEncoder, LAYER, nn.Linear], layout)
    with pytest.raises(RuntimeError) as error:
        model(source())
    assert str(error.value).startswith(
        "an operation in the forward of unit 'inside.layers.0' got a parameter"
    )
    assert str(error.value).count("The parameters of the units inside of it") == 1
    assert "'inside.layers.0.self_attn.out_proj'" in str(error.value)
    assert "'inside.layers.1" not in str(error.value)


@pytest.mark.parametrize("layout", ["rows", "fully_shard"])
@on_ranks(2)
def test_a_state_that_was_made_of_a_parameter_is_named(layout):
    """As language models make the hidden state of an RNN. In rows it is a DTensor."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x, hidden):
            return self.head(self.rnn(x, hidden)[0])

    model = sharded(Model().to(device()), [nn.GRU], layout)
    weight = next(model.parameters())
    inputs = r"unit 'rnn' got a parameter .*, or what was made of one .*weight\.new_zeros\(\)"
    with pytest.raises(RuntimeError, match=inputs) as error:
        model(source(), weight.new_zeros(1, 3, 16))
    assert "units inside of it" not in str(error.value)
    model(source(), torch.zeros(1, 3, 16, dtype=weight.dtype, device=weight.device))


class CastsAsItsWeight(nn.Module):
    """As T5 does: a layer may be kept in another precision than those around it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        if isinstance(self.last.weight, torch.Tensor) and x.dtype != self.last.weight.dtype:
            x = x.to(self.last.weight.dtype)
        assert self.last.weight.is_floating_point() and not self.last.weight.is_sparse
        assert self.last.weight.is_cuda == x.is_cuda and self.last.weight.data_ptr() == 0
        return self.last(x)


@pytest.mark.parametrize("full_precision_in_eval", [False, True])
@on_ranks(2)
def test_the_dtype_of_a_sharded_weight_is_that_of_the_computation(full_precision_in_eval):
    low = MixedPrecision(torch.bfloat16, full_precision_in_eval=full_precision_in_eval)
    model = FSDP(
        CastsAsItsWeight().to(device()),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=low,
    )
    for _ in range(2):
        output = model.train()(source())
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        exact = torch.float32 if full_precision_in_eval else torch.bfloat16
        assert model.eval()(source()).dtype == exact
