"""param_access.py: what a module sees of its parameters, gathered and sharded."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minifsdp import CPUOffload, ModuleWrapPolicy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.support.param_access import Placeholder
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step

X = torch.ones(3, 6)
INDEX = torch.zeros(2, dtype=torch.long)
USES = {
    "a layer": lambda w: F.linear(X, w),
    "one that takes it by name": lambda w: F.layer_norm(X, (6,), weight=w),
    "an embedding": lambda w: F.embedding(INDEX, w),
    "a list": lambda w: torch.cat([X, w]),
    "a list in a list": lambda w: torch.einsum("ij,jk->ik", [X, w]),
    "written to a tensor": lambda w: X.clone().copy_(w),
    "an index": lambda w: X[w],
    "a method": lambda w: w.sum(),
    "an attribute": lambda w: w.grad,
    "x @ w": lambda w: X @ w,
    "w @ x": lambda w: w @ X,
    "x + w": lambda w: X + w,
    "w + x": lambda w: w + X,
    "x == w": lambda w: X == w,  # noqa: SIM300
    "w == x": lambda w: w == X,
    "w == 0": lambda w: w == 0,
    "w != 0": lambda w: w != 0,
    "w > 0": lambda w: w > 0,
    "w * 2": lambda w: w * 2,
    "2 * w": lambda w: 2 * w,
    "w / 2": lambda w: w / 2,
    "w ** 2": lambda w: w**2,
    "1 - w": lambda w: 1 - w,
    "-w": lambda w: -w,
    "abs(w)": abs,
    "w[0]": lambda w: w[0],
    "list(w)": list,
    "saved": lambda w: pickle.dumps(w),
    "another type": lambda w: w.type(torch.double),
    "itself, detached": lambda w: w.detach(),
    "1 in w": lambda w: 1 in w,
    "bool(w)": bool,
    "complex(w)": complex,
    "float(w)": float,
    "int(w)": int,
}


@pytest.mark.parametrize("use", USES)
@on_ranks(1)
def test_whoever_uses_a_sharded_parameter_is_told_which_one_it_is(use):
    model = stack(2)  # kept: of a model that is gone the message is another one
    weight = model.module[2].module[0].weight
    with pytest.raises((RuntimeError, AttributeError)) as error:
        USES[use](weight)
    assert "parameter '0.weight' of unit '2' is sharded now" in str(error.value)
    assert "FSDP.summon_full_params(model)" in str(error.value)


@on_ranks(2)
def test_a_module_called_around_its_wrapper_is_refused_also_after_a_step():
    model = stack()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"'0.bias' of unit '2' is sharded|'0.weight' of unit"
        ):
            model.module[2].module(batch())
        step(model)


@on_ranks(2)
def test_a_placeholder_says_what_is_known_without_values():
    model = stack().double()
    weight = model.module[2].module[0].weight
    assert type(weight) is Placeholder
    assert weight.shape == (6, 6) and weight.dtype == torch.float64
    assert weight.device.type == device().type
    assert weight.size() == (6, 6) and weight.size(1) == 6 and weight.size(dim=-2) == 6
    assert weight.ndim == weight.dim() == 2 and weight.numel() == weight.nelement() == 36
    assert weight.untyped_storage().nbytes() == 0 and weight.element_size() == 8
    assert len(weight) == 6 and weight.layout is torch.strided
    assert isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter)
    assert f"{weight}" == repr(weight) and "'0.weight' of unit '2' is sharded" in repr(weight)
    assert weight.requires_grad is True
    model.requires_grad_(False)
    assert weight.requires_grad is False
    assert not hasattr(weight, "grad") and getattr(weight, "grad", None) is None
    assert weight in {weight}  # may be a key; __eq__ is not asked


@on_ranks(2)
def test_of_a_unit_in_rows_each_parameter_says_whether_it_is_frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    model[1][0].requires_grad_(False)
    policy = ModuleWrapPolicy({nn.Sequential})
    model = FSDP(model.to(device()), auto_wrap_policy=policy, use_orig_params=True)
    block = model.module[1].module
    loss = model(batch()).sum()
    frozen, trained = block[0].weight, block[1].weight
    assert type(frozen) is type(trained) is Placeholder
    assert (frozen.requires_grad, trained.requires_grad) == (False, True)
    loss.backward()


@pytest.mark.parametrize("attribute", ["data", "grad", "requires_grad", "mark"])
@on_ranks(1)
def test_nothing_is_set_on_a_placeholder_where_nobody_would_read_it(attribute):
    model = stack(2)  # kept: of a model that is gone the message is another one
    weight = model.module[2].module[0].weight
    match = f"'{attribute}' cannot be set: parameter '0.weight' of unit '2' is sharded now"
    before = getattr(weight, attribute, "none")
    with pytest.raises(RuntimeError, match=match):
        setattr(weight, attribute, None)
    assert getattr(weight, attribute, "none") == before


@pytest.mark.gpus(1)
@on_ranks(1)
def test_with_offload_the_device_is_the_one_that_computes():
    model = FSDP(nn.Linear(2, 2).to(device()), cpu_offload=CPUOffload(offload_params=True))
    assert (
        model.module.weight.device.type == "cuda"
        and model._unit.sharded_flat_param.device.type == "cpu"
    )


@on_ranks(2)
def test_without_its_wrapper_a_module_says_where_its_values_have_gone():
    linear = FSDP(nn.Linear(6, 6).to(device())).module
    gc.collect()
    with pytest.raises(
        RuntimeError, match=r"'weight' was sharded by .* that is gone, and its values"
    ):
        linear(batch())
    with pytest.raises(RuntimeError, match="that is gone"):
        _ = linear.weight.dtype


@on_ranks(1)
def test_a_copy_of_a_wrapped_module_says_so_too():
    model = FSDP(nn.Linear(6, 6).to(device()))
    for copied in (copy.copy(model.module.weight), copy.deepcopy(model.module).weight):
        assert copied.shape == (6, 6)
        with pytest.raises(RuntimeError, match="'weight' of unit <root> is sharded now"):
            copied + 1
    assert model.module.weight in {model.module.weight}


def weights_of(lstm: nn.LSTM) -> list[object]:
    return [getattr(lstm, name) for name in lstm._flat_weights_names]


@on_ranks(2)
def test_an_lstm_computes_with_its_list_of_weights():
    torch.manual_seed(0)
    plain = nn.LSTM(6, 6, num_layers=2, bidirectional=True).to(device())
    expected, _ = plain(batch())
    model = FSDP(plain)
    lists = [list(plain._flat_weights)]
    plain.register_forward_hook(lambda *_: lists.append(list(plain._flat_weights)))
    output, _ = model(batch())
    assert torch.equal(output, expected)
    lists.append(list(plain._flat_weights))
    kinds = [{type(weight) for weight in weights} for weights in lists]
    assert kinds[0] == {Placeholder} and kinds[1] == {Tensor}
    assert all(a is b for a, b in zip(plain._flat_weights, weights_of(plain), strict=True))
    output.sum().backward()
    assert {type(weight) for weight in plain._flat_weights} == {Placeholder}
    with pytest.raises(RuntimeError, match="'weight_ih_l0' of unit <root> is sharded now"):
        plain(batch())


class AsOnAGpu(nn.LSTM):
    """cuDNN has the weights in one piece of memory. A forward asks for that if they are new."""

    def flatten_parameters(self):
        for weight in self._flat_weights:
            if isinstance(weight, Tensor):
                weight.data = weight.data.clone()


@pytest.mark.parametrize("rows", [False, True], ids=["chunks", "rows"])
@on_ranks(2)
def test_the_weights_of_an_rnn_stay_where_they_are_gathered(rows):
    torch.manual_seed(0)
    plain = AsOnAGpu(6, 6, num_layers=2).to(device())
    model, unit_memory = FSDP(copy.deepcopy(plain), use_orig_params=rows), []
    model.module.register_forward_hook(
        lambda lstm, *_: unit_memory.append(
            {weight.untyped_storage().data_ptr() for weight in lstm._flat_weights}
        )
    )
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, model)]
    for at in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(at)).to(device())
        losses = [module(x)[0].pow(2).sum() for module in (plain, model)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(len(addresses) == 1 for addresses in unit_memory)
    model.module.flatten_parameters()  # as programs do


@on_ranks(2)
def test_a_module_sees_a_view_of_the_flat_parameter_while_it_runs():
    model, seen = stack(2), []
    block = model.module[1].module
    block.register_forward_hook(lambda *_: seen.append(block[0].weight))
    step(model)
    assert seen[0]._base is model.engine.units[1].unsharded.flat_param and seen[0].shape == (6, 6)
    assert type(block[0].weight) is Placeholder


@on_ranks(2)
def test_a_placeholder_that_a_program_keeps_has_the_values_while_its_unit_is_gathered():
    model, seen = stack(2), []
    block = model.module[1].module
    kept = block[0].weight

    def look(*_):
        seen.append((kept.mT.data_ptr() == block[0].weight.data_ptr(), kept.mT.shape, kept.sum()))

    block.register_forward_hook(look)
    with torch.no_grad():
        model(batch())
    assert seen == [(True, (6, 6), layers(2)[1][0].weight.sum())]
    assert not hasattr(kept, "mT")
