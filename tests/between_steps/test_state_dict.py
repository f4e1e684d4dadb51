"""state_dict.py: what is saved is what a plain model would save, and the other way round."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.groups import HYBRID
from tests.models import CASES, Inner, Unit
from tests.parity import build, check_at_rest, grid, sharded
from tests.ranks import device, on_ranks, run
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    stack,
    step,
    watch,
)

STRATEGIES = list(ShardingStrategy)
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = STRATEGIES
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
SETTINGS = {
    "exact": {},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
}


def make(strategy=FULL_SHARD, **settings) -> FSDP:
    mesh = grid(strategy) if strategy in HYBRID else None
    return stack(sharding_strategy=strategy, device_mesh=mesh, **settings)


def assert_same(found: dict, expected: dict) -> None:
    """Keys in the same order, the same values, and tensors that are one are one."""
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype is value.dtype and torch.equal(found[key], value), key
    for a, b in combinations([key for key in expected if expected[key].numel()], 2):
        assert (found[a] is found[b]) == (expected[a].data_ptr() == expected[b].data_ptr())


def other(model: nn.Module) -> nn.Module:
    """With other values than it had."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    return model


# ------------------------------------------------------------------------------------- as saved


def check_case(name, strategy, setting):
    model = sharded(CASES[name], sharding_strategy=strategy, **SETTINGS[setting])
    plain = build(CASES[name])
    for _ in range(2):
        found = model.state_dict()
        assert_same(found, plain.state_dict())
        assert found._metadata == plain.state_dict()._metadata
        assert list(found._metadata) == list(plain.state_dict()._metadata)
        check_at_rest(model)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_the_plain_model(name, strategy):
    run(check_case, 2, name, strategy, "exact")


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_with_any_number_of_ranks(name, ranks):
    run(check_case, ranks, name, HYBRID_SHARD if ranks == 4 else FULL_SHARD, "exact")


@pytest.mark.parametrize("setting", ["offload", "bf16"])
@pytest.mark.parametrize("name", ["transformer", "mlp_nested", "odd", "conv"])
@every_strategy
def test_with_offload_and_low_precision(strategy, name, setting):
    run(check_case, 2, name, strategy, setting)


@every_strategy
@on_ranks(2)
def test_what_is_saved_survives_the_next_step(strategy):
    model = sharded(CASES["conv"], sharding_strategy=strategy)  # it has running statistics
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    saved = model.state_dict()
    before = {key: value.clone() for key, value in saved.items()}
    model(torch.rand(2, 1, 8, 8, device=device())).pow(2).sum().backward()
    optimizer.step()
    assert all(torch.equal(saved[key], before[key]) for key in before)
    after = model.state_dict()
    assert not any(torch.equal(after[key], before[key]) for key in before if "bias" in key)
    assert all(t.untyped_storage().size() == t.numel() * t.itemsize for t in saved.values())


@on_ranks(2)
def test_no_more_units_are_out_than_lie_within_each_other():
    model = sharded(CASES["mlp_nested"])
    expected = ["+root", "+1", "+1.0", "-1.0", "-1", "+2", "-2", "-root"]
    with watch(model) as log:
        state = model.state_dict()
    assert log == expected
    with watch(model) as log:
        model.load_state_dict(state)
    assert log == expected


class Extra(nn.Linear):
    """Something to save that is no tensor, and a buffer that is not to be saved."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra = "first"
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


@on_ranks(2)
def test_extra_state_and_buffers_that_are_not_saved():
    module = nn.Sequential(Extra(), Block(Extra())).to(device())
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}))
    keys = ["0.weight", "0.bias", "0._extra_state", "1.0.weight", "1.0.bias", "1.0._extra_state"]
    state = model.state_dict()
    assert list(state) == keys and state["1.0._extra_state"] == "first"
    state["1.0._extra_state"] = "second"
    model.load_state_dict(state)
    assert model.get_submodule("1").module[0].extra == "second"


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@on_ranks(2)
def test_sparse_buffers(layout):
    edges = torch.eye(6).roll(1, 0).to(device())
    blocks = [Block(), Block()]
    for module in blocks:
        module.register_buffer("edges", edges.to_sparse(layout=layout))
    model = FSDP(
        nn.Sequential(*blocks).to(device()),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    state = model.state_dict()
    for name in ("0.edges", "1.edges"):
        assert state[name].layout is layout and torch.equal(state[name].to_dense(), edges)
        state[name].mul_(2)  # of a copy
    assert torch.equal(blocks[0].edges.to_dense(), edges)
    model.load_state_dict(state)
    assert torch.equal(blocks[0].edges.to_dense(), 2 * edges)


# ------------------------------------------------------------------------- wherever wrappers are


class Outer(nn.Module):
    """Two roots, one of them with a unit inside, in a module that is not wrapped."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.one = wrap(layers(2))
        self.plain = nn.Linear(6, 6).to(device())
        self.two = nn.ModuleDict({"x": wrap(nn.Linear(6, 2).to(device()))})


@on_ranks(2)
def test_wrappers_inside_of_plain_modules():
    def wrap(module):
        return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}))

    model, plain = Outer(wrap), Outer(lambda module: module)
    plain.load_state_dict(model.state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    assert model.state_dict()._metadata == plain.state_dict()._metadata
    model.load_state_dict(other(plain).state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    wrong = {**plain.state_dict(), "one.1.0.weight": torch.zeros(2, 2), "two.x.more": torch.ones(1)}
    del wrong["one.2.0.bias"], wrong["plain.bias"]
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(wrong)
    assert 'Missing key(s) in state_dict: "one.2.0.bias", "plain.bias"' in str(error.value)
    assert 'Unexpected key(s) in state_dict: "two.x.more"' in str(error.value)
    assert "size mismatch for one.1.0.weight" in str(error.value)
    assert "_fsdp" not in str(error.value)


@on_ranks(2)
def test_a_unit_by_itself():
    model, plain = stack(), layers()
    assert_same(model.module[2].state_dict(), plain[2].state_dict())
    model.module[2].load_state_dict(other(plain[2]).state_dict())
    assert_same(model.state_dict(), plain.state_dict())


@on_ranks(2)
def test_a_copy_of_the_wrapped_module_is_a_plain_one():
    model = stack(1)
    with FSDP.summon_full_params(model):
        copied = copy.deepcopy(model.module[1].module)
    nn.init.ones_(copied[0].weight)
    with watch(model) as log:
        assert copied.state_dict()["0.weight"].eq(1).all()
        copied.load_state_dict(layers(1)[1].state_dict())
    assert not log
    assert_same(model.state_dict(), layers(1).state_dict())


@on_ranks(2)
def test_the_wrapped_module_does_not_keep_its_wrapper():
    model = stack(1)
    module, wrapper = model.module, weakref.ref(model)
    del model
    gc.collect()
    assert wrapper() is None and isinstance(module, nn.Sequential)


@on_ranks(2)
def test_into_a_dict_that_others_have_written_to():
    model, plain, before = stack(1), layers(1), nn.Linear(2, 2)
    found, expected = OrderedDict(), OrderedDict()
    for state, module in ((found, model), (expected, plain)):
        before.state_dict(destination=state, prefix="before.")
        module.state_dict(destination=state, prefix="model.")
    assert list(found) == list(expected)
    assert found["before.weight"].data_ptr() == before.weight.data_ptr()


@pytest.mark.parametrize("offload", [True, False])
@every_strategy
@on_ranks(2)
def test_inside_of_summon_full_params(strategy, offload):
    model, plain = make(strategy), layers()
    with FSDP.summon_full_params(model, offload_to_cpu=offload), torch.no_grad():
        state = model.state_dict()
        weight = model.module[1].module[0].weight
        weight.zero_()
        later = model.state_dict()
    assert_same({key: value.to(device()) for key, value in state.items()}, plain.state_dict())
    assert not later["1.0.weight"].any()


# ------------------------------------------------------------------------------------- as loaded


def check_loading(strategy, setting):
    model, plain = make(strategy, **SETTINGS[setting]), other(layers())
    state = plain.state_dict()
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert_same(model.state_dict(), state)
    assert list(state) == list(plain.state_dict())
    check_at_rest(model)
    if setting != "bf16":
        assert torch.equal(model(batch()), plain(batch()))
        step(model)
        again = layers()
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(batch()), plain(batch()))


@pytest.mark.parametrize("setting", SETTINGS)
@every_strategy
def test_a_plain_models_is_loaded_and_the_other_way_round(strategy, setting):
    run(check_loading, 2, strategy, setting)


def save(path, strategy):
    model = sharded(CASES["transformer"], sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    case = CASES["transformer"]
    torch.manual_seed(dist.get_rank())
    inputs = [tensor.to(device()) for tensor in case.inputs()]
    case.loss(model(*inputs), *inputs).backward()
    optimizer.step()
    state = model.state_dict()  # all ranks take part
    if dist.get_rank() == 0:
        torch.save(state, path)


def load(path, strategy):
    model = sharded(CASES["transformer"], sharding_strategy=strategy)
    plain = build(CASES["transformer"])
    state = torch.load(path, map_location=device())
    assert not torch.equal(state["embed.weight"], plain.embed.weight)
    model.load_state_dict(state)
    plain.load_state_dict(state)
    assert state["output.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "saved, loaded",
    [((FULL_SHARD, 3), (NO_SHARD, 2)), ((NO_SHARD, 2), (HYBRID_SHARD, 4)),
     ((HYBRID_SHARD, 4), (SHARD_GRAD_OP, 1)), ((SHARD_GRAD_OP, 1), (FULL_SHARD, 3))],
)  # fmt: skip
def test_between_strategies_and_numbers_of_ranks(saved, loaded, tmp_path):
    path = str(tmp_path / "state")
    run(save, saved[1], path, saved[0])
    run(load, loaded[1], path, loaded[0])


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_ranks(2)
def test_tensors_may_be_assigned(strategy):
    model, plain = make(strategy), other(layers())
    shards = list(model.parameters())
    model.load_state_dict(plain.state_dict(), assign=True)
    assert all(a is b for a, b in zip(shards, model.parameters(), strict=True))
    assert_same(model.state_dict(), plain.state_dict())


@on_ranks(2)
def test_a_part_may_be_loaded():
    model, plain = stack(), layers()
    state = {"1.0.weight": torch.zeros(6, 6), "2.0.bias": torch.ones(6), "9.weight": torch.ones(1)}
    keys = model.load_state_dict(state, strict=False)
    expected = plain.state_dict()
    assert keys.missing_keys == [key for key in expected if key not in state]
    assert keys.unexpected_keys == ["9.weight"]
    expected["1.0.weight"].zero_()
    expected["2.0.bias"].fill_(1)
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("wrapper", [False, True])
@on_ranks(2)
def test_in_rows_a_part_of_a_unit_loads_plain_tensors(wrapper, assign):
    """Ones that every rank has whole, as a part of a plain model has saved them."""
    if wrapper:
        model = stack(2, use_orig_params=True)
    else:
        model = layers(2)
        for block in model[1:]:
            fully_shard(block)
        fully_shard(model)
    plain, other = layers(2), layers(2)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    step(model)
    for into, found in ((model[1][0], other[1][0]), (model[0], other[0])):
        into.load_state_dict(found.state_dict(), assign=assign)
    plain[1][0].load_state_dict(other[1][0].state_dict())
    plain[0].load_state_dict(other[0].state_dict())
    model.zero_grad()
    loss, expected = step(model), plain(batch()).pow(2).sum()
    assert torch.equal(loss, expected)
    mean = mean_gradients(plain, expected)
    assert {n: p.grad.full_tensor().tolist() for n, p in model.named_parameters()} == {
        n: grad.tolist() for n, grad in mean.items()
    }


@pytest.mark.parametrize("strict", [True, False])
@on_ranks(2)
def test_errors_say_the_original_names(strict):
    module = nn.Sequential(nn.Linear(6, 6), Unit(Inner(nn.Linear(6, 6)))).to(device())
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Unit, Inner}))
    state = model.state_dict()
    state["1.0.0.weight"], state["1.0.1.weight"] = torch.zeros(6, 7), state.pop("0.bias")
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state, strict)
    said = str(error.value)
    assert "size mismatch for 1.0.0.weight: copying a param with shape torch.Size([6, 7])" in said
    assert ('Missing key(s) in state_dict: "0.bias"' in said) == strict
    assert ('Unexpected key(s) in state_dict: "1.0.1.weight"' in said) == strict
    assert "_fsdp" not in said
    step(model)


@on_ranks(2)
def test_what_does_not_fit_is_said_as_by_the_plain_model():
    model, plain = stack(2), layers(2)
    state = plain.state_dict()
    state["1.0.weigth"] = state.pop("1.0.weight")
    for wrong in (state, {**plain.state_dict(), "2.0.bias": torch.zeros(3)}):
        said = []
        for target in (plain, model):
            with pytest.raises(RuntimeError) as error:
                target.load_state_dict(wrong)
            said.append(str(error.value).split("\n", 1)[1])
        assert said[0] == said[1]


@every_strategy
@on_ranks(2)
def test_between_a_forward_and_its_backward_nothing_is_lost(strategy):
    model, plain = make(strategy), layers()
    loss, expected = model(batch()).pow(2).sum(), plain(batch()).pow(2).sum()
    assert_same(model.state_dict(), plain.state_dict())
    loss.backward()
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, expected))


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("when", ["forward", "backward"])
@on_ranks(2)
def test_it_is_refused_in_a_forward_and_in_a_backward(when):
    model, plain = stack(), layers()
    state = plain.state_dict()
    said = r"called in a forward or in a backward of this model \(as state_dict, load_state_dict"
    for within in (model.state_dict, lambda: model.load_state_dict(state)):
        inner = model.module[1].module[0]

        def hook(*_, within=within):
            within()

        register = inner.register_forward_hook
        if when == "backward":
            register = inner.register_full_backward_hook
        handle = register(hook)
        with pytest.raises(RuntimeError, match=said):
            step(model)
        handle.remove()
        assert_same(model.state_dict(), plain.state_dict())
        step(model)


@on_ranks(2)
def test_copying_and_pickling_say_what_to_do_instead():
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Save state_dict\(\)"):
            attempt(stack())
