"""members.py: the modules of a unit stay."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import fully_shard
from tests.ranks import device, on_ranks
from tests.small import (
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    stack,
    step,
)

REPLACED = {
    "of the root": lambda model: setattr(model, "0", nn.Linear(6, 6)),
    "of a unit": lambda model: setattr(model[1], "0", nn.Linear(6, 6)),
    "of a wrapped module": lambda model: setattr(model.module[1].module, "0", nn.Linear(6, 6)),
    "an item": lambda model: model[1].__setitem__(0, nn.Linear(6, 6)),
    "by none": lambda model: setattr(model[1].module, "0", None),
    "by one without parameters": lambda model: setattr(model[1], "0", nn.Identity()),
    "deleted": lambda model: delattr(model[1], "0"),
    "a unit": lambda model: setattr(model.module, "1", nn.Linear(6, 6)),
    "a unit by one without": lambda model: setattr(model, "1", nn.Identity()),
    "added": lambda model: setattr(model[1], "more", nn.Linear(6, 6)),
    "added to a list": lambda model: model.module.append(nn.Linear(6, 6)),
    "added by name": lambda model: model[1].add_module("more", nn.Linear(6, 6)),
    "a private one": lambda model: setattr(model[1], "_more", nn.Linear(6, 6)),
    "added in one without": lambda model: setattr(model[1].module[1], "more", nn.Linear(6, 6)),
    "around the old and a new one": lambda model: setattr(
        model[1], "0", nn.Sequential(model[1][0], nn.Linear(6, 6))
    ),
}


@pytest.mark.parametrize("how", REPLACED)
@on_ranks(2)
def test_a_part_with_parameters_cannot_be_replaced(how):
    model, plain = stack(1), layers(1)
    match = "in unit .* cannot be replaced, added or removed after wrapping"
    with pytest.raises(RuntimeError, match=match):
        REPLACED[how](model)
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match=match):
        REPLACED[how](model)
    assert torch.equal(step(model), plain(batch()).pow(2).sum())


@pytest.mark.parametrize(
    "how",
    ["of the root", "of a unit", "an item", "a unit by one without", "added", "added by name"],
)
@on_ranks(2)
def test_so_it_is_where_a_module_is_its_own_unit(how):
    model, plain = layers(1), layers(1)
    fully_shard(model[1])
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"in unit .* cannot be replaced, added or removed"):
        REPLACED[how](model)
    assert torch.equal(step(model), plain(batch()).pow(2).sum())


@on_ranks(2)
def test_the_message_names_unit_module_and_parameters():
    model = stack(1)
    match = r"'0' of Block in unit '1' .*; '0' would be missing .* use FSDP.summon_full_params"
    with pytest.raises(RuntimeError, match=match):
        model[1][0] = nn.Linear(6, 6)


@on_ranks(2)
def test_what_has_no_parameters_may_be_replaced():
    model, plain = stack(2), layers(2)
    for either in (model, plain):
        either[1][1] = nn.GELU()
        either[2][1] = nn.Sequential(nn.Tanh(), nn.GELU())
        either.append(nn.Tanh())
    assert torch.equal(step(model), plain(batch()).pow(2).sum())


@on_ranks(2)
def test_activation_checkpointing_may_be_put_around_parts_afterwards():
    model, plain = stack(2), layers(2)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    step(model)
    found = gathered_gradients(model)
    assert_same_gradients(found, expected)


@on_ranks(2)
def test_the_container_of_a_unit_stays_too_since_it_has_the_flat_parameter():
    model = stack(1)
    with pytest.raises(RuntimeError, match="in unit '1' cannot be replaced"):
        model[1]._fsdp_wrapped_module = nn.Sequential(*model[1].module)
    step(model)


@on_ranks(2)
def test_it_is_not_what_is_written_down_here_that_keeps_a_unit():
    model = stack(1)
    inner, unit = model.module[1].module, weakref.ref(model.engine.units[1])
    del model
    gc.collect()
    assert unit() is None and isinstance(inner[0], nn.Linear)


@on_ranks(1)
def test_a_module_of_a_unit_cannot_be_wrapped_again():
    model = stack(1)
    with pytest.raises(ValueError, match=r"'<root>' \(Linear\) is in unit '1' .* Wrap inner mod"):
        model[1][0] = FSDP(model[1][0])
    with pytest.raises(ValueError, match=r"'0' \(Linear\) is in unit '1'"):
        FSDP(nn.Sequential(model[1][0], nn.Tanh()))


@on_ranks(1)
def test_one_module_in_two_units_is_refused_with_what_to_do():
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(device()) for _ in range(2)]
    blocks[1][0] = blocks[0][0]
    fully_shard(blocks[0])
    with pytest.raises(ValueError, match="If two units share the module, make one unit of the sma"):
        fully_shard(blocks[1])


@on_ranks(2)
def test_one_activation_in_two_units_is_in_nobodys_way():
    tanh = nn.Tanh()
    parts = [nn.Sequential(nn.Linear(6, 6), tanh).to(device()) for _ in range(2)]
    step(FSDP(nn.Sequential(*(FSDP(part) for part in parts))))


def test_a_model_that_is_not_wrapped_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0] = nn.Linear(3, 3)
    model.more = nn.Linear(2, 2)


@on_ranks(2)
def test_a_part_says_which_parameters_it_cannot_list():
    model = stack(2)
    part = model[1][0]
    for ask in (
        part.parameters,
        part.named_parameters,
        part.zero_grad,
        lambda: part.parameters(recurse=False),
        lambda: part.named_parameters("prefix", False),
    ):
        with pytest.warns(UserWarning, match="weight.* of Linear are a part of .* of unit '1'"):
            assert not list(ask() or [])
    with pytest.raises(RuntimeError, match=r"weight.* of Linear .*unit '1'.* cannot be frozen"):
        part.requires_grad_(False)


@on_ranks(2)
def test_a_part_says_which_parameters_it_cannot_save_load_or_convert():
    model, plain = stack(2), layers(2)
    part = model[1][0]
    with pytest.warns(UserWarning, match=r"weight.* of Linear .*unit '1'.* not in this state dict"):
        assert not part.state_dict()
    values = {name: torch.zeros_like(param) for name, param in nn.Linear(6, 6).named_parameters()}
    for load in (
        lambda: part.load_state_dict(values),
        lambda: part.load_state_dict(values, strict=False),
        lambda: model.module[1].module.get_submodule("0").load_state_dict(values),
    ):
        with pytest.raises(RuntimeError, match=r"weight.* of Linear .*unit '1'.* Load them with"):
            load()
    for convert in (part.double, lambda: part.to(torch.bfloat16), lambda: part.to("meta")):
        with pytest.raises(RuntimeError, match=r"weight.* of Linear .*unit '1'.* cannot be conv"):
            convert()
    assert torch.equal(step(model), plain(batch()).pow(2).sum())


@on_ranks(2)
def test_where_a_part_can_be_saved_loaded_and_converted_it_is():
    model, plain = stack(2), layers(2)
    part = model[1][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part.to(device()).float()  # as they are
        with FSDP.summon_full_params(model):
            saved = {name: value.clone() for name, value in part.state_dict().items()}
            assert saved["weight"].shape == (6, 6)
            part.load_state_dict({name: value + 1 for name, value in saved.items()})
            copied = copy.deepcopy(part)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert torch.equal(model.state_dict()["1.0.weight"], saved["weight"] + 1)
        model.load_state_dict(plain.state_dict())
        model.double()
        # A copy that was made while they were there is an ordinary module.
        copied.load_state_dict(copied.double().state_dict())
    assert {value.dtype for value in model.state_dict().values()} == {torch.float64}
    assert copied.weight.dtype == torch.float64


@on_ranks(2)
def test_in_a_forward_a_list_of_sharded_parameters_gathers_nothing():
    """One rank alone may ask for it, to print something."""
    model = stack(2)
    part = model[1][0]

    def ask(module, args):
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match="weight.* of Linear are a part of .* of unit '1'"):
                assert not list(part.parameters())

    model.module[0].register_forward_pre_hook(ask)
    with torch.no_grad():
        model(batch())


@on_ranks(2)
def test_where_parameters_can_be_listed_nothing_is_said():
    model, seen = stack(2), []
    part = model[1][0]
    part.register_forward_hook(lambda module, *_: seen.extend(p.shape for p in module.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
        assert seen == [p.shape for p in nn.Linear(6, 6).parameters()]
        with FSDP.summon_full_params(model):
            assert [p.shape for p in part.parameters()] == seen
            copied = copy.deepcopy(part)
        assert list(model.parameters()) and list(model[1].parameters())
        assert list(model[1].module.parameters())
        assert not list(model[1].module[1].parameters())  # an activation has none
        model.module.requires_grad_(False)
        # A copy that was made while they were there is an ordinary module.
        assert [p.shape for p in copied.parameters()] == seen
        copied.requires_grad_(False)
        assert not any(p.requires_grad for p in copied.parameters())


@on_ranks(2)
def test_in_a_forward_there_is_room_for_no_new_parameter_either():
    class Late(nn.Linear):
        def forward(self, x):
            self.scale = nn.Parameter(torch.ones(6))
            return super().forward(x) * self.scale

    model = FSDP(nn.Sequential(Late(6, 6).to(device())))
    with pytest.raises(RuntimeError, match="parameter 'scale' of Late in unit <root> cannot be"):
        model(batch())


@on_ranks(2)
def test_a_sharded_parameter_is_not_replaced_and_stays_where_it_is():
    model, plain = stack(1), layers(1)
    part = model[1].module[0]
    for replace in (
        lambda: setattr(part, "weight", nn.Parameter(torch.ones(6, 6))),
        lambda: part.register_parameter("weight", nn.Parameter(torch.ones(6, 6))),
    ):
        with pytest.raises(RuntimeError, match=r"'0.weight' of Linear in unit '1' cannot"):
            replace()
        assert part.weight.shape == (6, 6)
        with pytest.raises(RuntimeError, match=r"'0.weight' of unit '1' is sharded now"):
            part.weight + 1
    assert torch.equal(step(model), plain(batch()).pow(2).sum())


@on_ranks(2)
def test_what_has_come_into_the_model_by_other_ways_is_found_before_the_first_step():
    model = stack(1)
    model.module._modules["more"] = nn.Sequential(nn.Tanh(), nn.Linear(6, 6))
    with pytest.raises(RuntimeError, match=r"'more.1' \(Linear\) has .* that are in no unit"):
        step(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(2)
def test_a_parameter_in_rows_takes_over_a_dtensor_that_is_divided_alike(dtype):
    """It stays the same parameter, for the optimizer's sake, and the given one stays what it is."""
    model = fully_shard(layers(1))
    own, x = model[1][0].weight, batch().to(dtype)
    given = nn.Parameter(torch.full_like(own.detach(), 2, dtype=dtype), requires_grad=False)
    model[1][0].weight = given
    model.to(dtype)
    assert model[1][0].weight is own and own.dtype is dtype and not own.requires_grad
    plain = layers(1).to(dtype)
    nn.init.constant_(plain[1][0].weight, 2)
    assert torch.equal(model(x), plain(x))
    nn.init.constant_(own, 3)
    assert given.dtype is dtype and given.to_local().eq(2).all()


@on_ranks(2)
def test_a_parameter_in_rows_takes_over_nothing_else():
    model, other = fully_shard(layers(1)), fully_shard(layers(1))
    own, bias = model[1][0].weight, model[1][0].bias
    for given in (own.full_tensor(), bias.detach(), other[1][0].weight):
        with pytest.raises(
            RuntimeError, match=r"'1\.0\.weight' .* cannot be .* load_state_dict\(\)"
        ):
            model[1][0].weight = given if isinstance(given, nn.Parameter) else nn.Parameter(given)
        assert model[1][0].weight is own
    loss = model(batch()).sum()
    with pytest.raises(RuntimeError, match=r"'1\.0\.weight' .* cannot be"):
        model[1][0].weight = nn.Parameter(own.detach())
    loss.backward()


@pytest.mark.parametrize("how", ["chunks", "rows", "fully_shard"])
@on_ranks(1)
def test_all_modules_of_a_unit_say_that_they_are_in_one_as_with_torchs(how):
    """By this transformers runs the same layers on all ranks, where each drops some at random."""
    model = layers(2)
    if how == "fully_shard":
        fully_shard(model[1])
        model = fully_shard(model)
    else:
        model = FSDP(model, use_orig_params=how == "rows", ignored_modules=[model[2]])
        assert not hasattr(model[2], "_is_fsdp_managed_module")
    for module in (model, model[0], model[1], model[1][1]):
        assert module._is_fsdp_managed_module and module._fsdp_use_orig_params
    model._is_fsdp_managed_module = True  # as transformers does itself
    step(model)
