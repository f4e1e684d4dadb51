"""flat_parameter.py: who may have the gradient of a shard, and who is told of optimizers."""

import re
import warnings
from unittest.mock import patch

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.optimizer import _default_to_fused_or_foreach

from minifsdp import FlatParameter, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.chunks.flat_parameter import flat_parameter as make
from tests.pretended_gpu import PretendedGpu
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step


def flat_parameter(is_sharded: bool) -> FlatParameter:
    param = FlatParameter(torch.ones(3))
    param.is_sharded = is_sharded
    param.grad = torch.full((3,), 2.0)
    return param


def test_the_gradient_of_a_flat_parameter_is_that_of_any_other():
    param = flat_parameter(is_sharded=True)
    (param * 3).sum().backward()
    assert torch.equal(param.grad, torch.full((3,), 5.0))
    del param.grad
    assert param.grad is None
    with pytest.raises(RuntimeError, match="size"):
        param.grad = torch.ones(4)


@on_ranks(2)
def test_the_step_of_an_optimizer_may_be_compiled():
    """Compiled, SGD rounds in another way in torch 2.11."""
    model, plain = stack(1), layers(1)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager")
        each(torch.ones(1, 6, device=device())).pow(2).sum().backward()
        step()
    with FSDP.summon_full_params(model):
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("foreach", [True, False, None])
def test_torchs_clip_grad_norm_does_not_get_the_gradient_of_a_shard(foreach):
    param = flat_parameter(is_sharded=True)
    for given in (param, [torch.nn.Parameter(torch.ones(1)), param], iter([param])):
        with pytest.raises(RuntimeError, match=r"It would see this rank's shards only"):
            clip_grad_norm_(given, 1.0, foreach=foreach)
    whole = flat_parameter(is_sharded=False)
    clip_grad_norm_(whole, 1.0, foreach=foreach)
    assert whole.grad.norm() < 1.001


def test_others_do():
    param = flat_parameter(is_sharded=True)
    clip_grad_value_(param, 1.5)
    assert torch.equal(param.grad, torch.full((3,), 1.5))

    def clip_grad_norm_(params):  # a user's own, who may know what to do
        return [p.grad for p in params]

    assert clip_grad_norm_([param]) == [param.grad]
    torch.optim.SGD([param], lr=1.0).step()
    assert torch.equal(param.detach(), torch.full((3,), -0.5))


def total(params):
    return get_total_norm([p.grad for p in params])


def test_get_total_norm_does_not_get_it_and_whoever_mentions_that_does():
    param, plain = flat_parameter(is_sharded=True), torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    for given in ([param], [plain, param]):
        with pytest.raises(RuntimeError, match=r"get_total_norm was called on .* sharded model"):
            total(given)
    with pytest.raises(RuntimeError, match="get_total_norm"):
        get_total_norm(p.grad for p in [plain, param])

    def mixed(norm):
        if norm:
            return get_total_norm([plain.grad])
        param.grad.mul_(2)
        return torch.add(param.grad, 1, alpha=3)

    assert torch.equal(mixed(False), torch.full((3,), 7.0))
    assert torch.equal(param.grad, torch.full((3,), 4.0))
    assert mixed(True) == 3**0.5
    assert total([flat_parameter(is_sharded=False)]) == 12**0.5


def test_a_function_named_as_a_scalers_method_may_read_it():
    def _unscale_grads_(params):
        return [param.grad / 2 for param in params]

    (found,) = _unscale_grads_([flat_parameter(is_sharded=True)])
    assert torch.equal(found, torch.ones(3))


def by_hand(params):
    return sum(p.grad.norm() ** 2 for p in params)


def test_a_norm_by_hand_is_warned_of_where_it_is_taken():
    with pytest.warns(UserWarning, match=r"^by_hand\(\) reads the gradient of a flat") as said:
        by_hand([flat_parameter(is_sharded=True)])
    assert said[0].filename == __file__
    by_hand([flat_parameter(is_sharded=False)])  # and a warning is an error in these tests


class Own(GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)


def test_a_scaler_that_asks_in_its_unscale_is_refused_where_that_is_not_called():
    param = flat_parameter(is_sharded=True)
    scaler, optimizer = Own("cpu"), torch.optim.AdamW([param], fused=True)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"^Own was used on the parameters of a sharded model"):
        scaler.step(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


@pytest.mark.parametrize("scaler", [GradScaler, Own])
def test_torchs_scaler_does_not_get_it_and_one_that_knows_better_does(scaler):
    scaler, param = scaler("cpu"), flat_parameter(is_sharded=True)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([param], lr=1.0)
    if isinstance(scaler, Own):
        scaler.unscale_(optimizer)
    else:
        with pytest.raises(RuntimeError, match=r"minifsdp\.ShardedGradScaler"):
            scaler.unscale_(optimizer)
    whole = flat_parameter(is_sharded=False)
    GradScaler.unscale_(scaler, torch.optim.SGD([whole], lr=1.0))
    assert torch.equal(whole.grad, torch.full((3,), 2.0 / scaler.get_scale()))


def add_param_group(self):  # somebody else's
    return self.is_leaf


def test_it_hears_of_optimizers_and_is_a_leaf():
    heard = []
    param = flat_parameter(is_sharded=True)
    with patch.object(FlatParameter, "on_optimizer", lambda *about: heard.append(about)):
        assert param.is_leaf
        assert add_param_group(param)
        assert not heard
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), param], lr=1.0)
    ((built, frame),) = heard
    assert built is optimizer and frame.f_locals["param_group"] is optimizer.param_groups[0]


def test_it_knows_its_unit_and_does_not_keep_it():
    class Thing:
        pass

    thing = Thing()
    param = make(torch.ones(2), True, thing, True, torch.bfloat16)
    assert param.unit() is thing and param.is_sharded and param.grad_dtype is torch.bfloat16
    del thing
    assert param.unit() is None


@on_ranks(2)
def test_who_chooses_chunks_by_their_dimensions_is_warned_once():
    model = stack()

    def to_initialize():
        return [p for p in model.parameters() if p.dim() > 1]

    def by_ndim():
        return [p for p in model.parameters() if p.ndim < 2]

    for choose, number in ((to_initialize, 0), (by_ndim, 5)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            assert len(choose()) == number
        words = f"{choose.__name__}\\(\\) asks .* among them '0.weight' with 2.*use_orig"
        assert len(found) == 1 and re.search(words, str(found[0].message))
        assert {w.filename for w in found} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = stack(use_orig_params=True)
        assert len([p for p in rows.parameters() if p.dim() > 1]) == 5
        vectors = FSDP(torch.nn.LayerNorm(6).to(device()))
        assert [p.dim() for p in vectors.parameters()] == [1], "as those that it is made of"
        optimizer = torch.optim.AdamW(model.parameters())  # torch's own code is not warned
        step(model)
        optimizer.step()
        model.state_dict()
        with pytest.raises(ValueError, match="fewer than 2 dimensions"):  # and not a warning
            torch.nn.init.xavier_uniform_(next(model.parameters()))


def chunks(module):
    return FSDP(module)


def rows(module):
    return FSDP(module, use_orig_params=True)


@pytest.mark.parametrize("wrap", [chunks, rows, fully_shard])
@on_ranks(2)
def test_on_gpus_torch_takes_the_kernels_that_it_takes_for_a_plain_model(wrap):
    with PretendedGpu():
        params = list(wrap(layers().to("cuda")).parameters())
        assert {param.device.type for param in params} == {"cuda"}
        assert _default_to_fused_or_foreach(params, False, use_fused=True) == (True, False)
        assert _default_to_fused_or_foreach(params, False, use_fused=False) == (False, True)


def trained(wrap, optimizer, **settings):
    model = wrap(layers())
    optimizer = optimizer(model.parameters(), lr=0.05, **settings)
    for at in range(3):
        step(model, at)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("wrap", [chunks, rows, fully_shard])
@on_ranks(3)
def test_these_kernels_compute_the_same(wrap, optimizer):
    expected = trained(wrap, optimizer, foreach=False)
    for found, param in zip(trained(wrap, optimizer, foreach=True), expected, strict=True):
        assert torch.equal(found, param)
    if optimizer is torch.optim.AdamW:  # others have no fused kernel, or none for DTensors
        for found, param in zip(trained(wrap, optimizer, fused=True), expected, strict=True):
            torch.testing.assert_close(found, param)


@on_ranks(2)
def test_on_gpus_an_optimizer_may_have_units_in_rows_and_in_chunks():
    with PretendedGpu():
        module = layers(2).to("cuda")
        ignored = module[2][0].bias
        fully_shard(module[1])
        model = FSDP(module, ignored_states=[ignored])
        optimizer = torch.optim.AdamW(model.parameters())
        before = [param.detach().clone() for param in model.parameters()]
        model(batch().to("cuda")).pow(2).sum().backward()
        optimizer.step()  # of DTensors and other tensors
        for param, was in zip(model.parameters(), before, strict=True):
            assert not torch.equal(param, was)
