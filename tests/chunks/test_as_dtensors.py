"""as_dtensors.py: one form of checkpoints, between all ways to shard a model and back."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from minifsdp import (
    CPUOffload,
    ModuleWrapPolicy,
    ShardingStrategy,
    as_dtensors,
    fully_shard,
    state_to_load,
    state_to_save,
)
from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import device, on_ranks, run
from tests.small import Scaled, stack, watch

pytest.importorskip("numpy", reason="torch.distributed.checkpoint of several ranks needs it")


class Block(nn.Sequential):
    """A unit of its own."""


class Tied(nn.Module):
    """With a tied head, a norm, a buffer, and sizes that nothing divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 5)
        blocks = [Block(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.head(self.blocks(self.embedding(x)))


def chunks(**settings):
    policy = ModuleWrapPolicy({Block})
    return lambda model: FSDP(model, auto_wrap_policy=policy, **settings)


def without_wrapper(shard):
    def apply(model):
        for block in model.blocks:
            shard(block)
        shard(model)
        return model

    return apply


def torch_fsdp1(model):
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = TorchPolicy({Block})
    return TorchFSDP(
        model, auto_wrap_policy=policy, device_mesh=mesh, device_id=device(), use_orig_params=True
    )


WAYS = {
    "chunks": chunks(),
    "chunks of one unit": FSDP,
    "chunks, SHARD_GRAD_OP": chunks(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "NO_SHARD": chunks(sharding_strategy=ShardingStrategy.NO_SHARD),
    "chunks on the host": chunks(cpu_offload=CPUOffload(True)),
    "rows": chunks(use_orig_params=True),
    "rows, NO_SHARD": chunks(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fully_shard": without_wrapper(fully_shard),
    "torch's fully_shard": without_wrapper(torch_fully_shard),
    "torch's FSDP": torch_fsdp1,
    "DDP": DistributedDataParallel,
}
OURS = [way for way in WAYS if "torch" not in way and way != "DDP"]


def partners(way, which):
    """The ways that go on with what ``way`` has saved: in `make test` four, such that each saves to
    four and loads from four; in `make test-all` the others, too."""
    ways = [*WAYS]
    at = ways.index(way)
    some = [ways[(at + offset) % len(ways)] for offset in (0, 1, 4, 6)]
    return some if which == "some" else [other for other in ways if other not in some]


SOME_AND_OTHERS = ["some", pytest.param("others", marks=pytest.mark.slow)]


def make(way, lr=0.01):
    model = WAYS[way](Tied().to(device()))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def train(model, optimizer, at):
    generator = torch.Generator().manual_seed(10 * at + dist.get_rank())
    x, y = torch.randint(11, (2, 7), generator=generator).to(device())
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def state_of(model, optimizer, writeback=False):
    with quietly(), as_dtensors(model, optimizer, writeback=writeback):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}


def load(model, optimizer, folder):
    with quietly(), as_dtensors(model, optimizer):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


@contextlib.contextmanager
def quietly():
    """Without what torch's FSDP1 and DCP warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def whole(state):
    """All values, under one name each."""
    values = dict(state["model"])
    for name, entry in state["optimizer"]["state"].items():
        values |= {f"{name} {key}": value for key, value in entry.items()}
    full = lambda v: v.full_tensor() if isinstance(v, DTensor) else v  # noqa: E731
    return {name: full(value).cpu().clone() for name, value in sorted(values.items())}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# ------------------------------------------------------------------------- from each way to each


def save_and_load_everywhere(way, which, folder):
    model, optimizer = make(way)
    for at in range(2):
        train(model, optimizer, at)
    state = state_of(model, optimizer)
    expected = whole(state)
    assert {"embedding.weight", "blocks.1.1.bias", "steps"} < expected.keys()
    assert "blocks.1.0.weight exp_avg_sq" in expected
    with quietly():
        dcp.save(state, checkpoint_id=folder)
    losses = [train(model, optimizer, at) for at in (2, 3)]
    for other in partners(way, which):
        there, its_optimizer = make(other, lr=0.5)
        train(there, its_optimizer, 7)  # with values and a state of its own
        load(there, its_optimizer, folder)
        found = whole(state_of(there, its_optimizer))
        assert_same(found, expected)
        assert [group["lr"] for group in its_optimizer.param_groups] == [0.01]
        for at, loss in zip((2, 3), losses, strict=True):
            assert torch.equal(train(there, its_optimizer, at), loss), other


@pytest.mark.few(5)
@pytest.mark.parametrize("which", SOME_AND_OTHERS)
@pytest.mark.parametrize("way", WAYS)
def test_what_one_way_has_saved_another_goes_on_with(way, which, tmp_path):
    """In every bit: the state, and the losses of the next two steps."""
    run(save_and_load_everywhere, 2, way, which, tmp_path)


def save(way, folder):
    model, optimizer = make(way)
    for at in range(2):
        train(model, optimizer, at)
    with quietly():
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return whole(state_of(model, optimizer))


def load_with_other_ranks(way, folder, expected):
    model, optimizer = make(way)
    load(model, optimizer, folder)
    assert_same(whole(state_of(model, optimizer)), expected)
    train(model, optimizer, 3)


@pytest.mark.parametrize("ranks", [(3, 1), (1, 4), (4, 3)])
@pytest.mark.parametrize("way", ["chunks", "chunks of one unit", "rows", "fully_shard"])
def test_with_other_numbers_of_ranks(way, ranks, tmp_path):
    expected = run(save, ranks[0], way, tmp_path)[0]
    for other in ("chunks", "rows"):
        run(load_with_other_ranks, ranks[1], other, tmp_path, expected)


@on_ranks(4)
def test_in_a_grid_of_ranks():
    states = {}
    for rows in (False, True):
        mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        settings = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        model = chunks(use_orig_params=rows, **settings)(Tied().to(device()))
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 0)
        state = state_of(model, optimizer)
        assert (
            state["model"]["embedding.weight"].to_local().shape
            == ((6, 5), (5, 5))[dist.get_rank() % 2]
        )
        states[rows] = whole(state)
    assert_same(states[False], states[True])


# --------------------------------------------------------------------------- what it is, and is not


@pytest.mark.parametrize("way", OURS)
@on_ranks(2)
def test_inside_it_looks_like_fully_sharded_parameters(way):
    model, optimizer = make(way)
    train(model, optimizer, 0)
    outside = list(model.parameters())
    groups, states = optimizer.param_groups[0], dict(optimizer.state)
    values = whole({"model": model.state_dict(), "optimizer": {"state": {}}})
    with as_dtensors(model, optimizer, writeback=False):
        params = dict(model.named_parameters())
        assert params.keys() == dict(Tied().named_parameters()).keys()
        for name, param in params.items():
            assert isinstance(param, DTensor) and isinstance(param, nn.Parameter), name
            assert torch.equal(param.full_tensor().cpu(), values[name])
        assert all(any(p is q for q in groups["params"]) for p in params.values())
        assert set(optimizer.state) == set(params.values())
        assert all(s["exp_avg"].shape == p.shape for p, s in optimizer.state.items())
    assert [id(p) for p in model.parameters()] == [id(p) for p in outside]
    assert optimizer.param_groups[0] is groups
    assert [id(p) for p in groups["params"]] == [id(p) for p in outside]
    assert {id(p): id(s) for p, s in optimizer.state.items()} == {
        id(p): id(s) for p, s in states.items()
    }


@on_ranks(2)
def test_without_writeback_nothing_changes_and_with_it_everything():
    model, optimizer = make("chunks")
    train(model, optimizer, 0)
    before = whole(state_of(model, optimizer))
    for writeback in (False, True):
        with torch.no_grad(), as_dtensors(model, optimizer, writeback=writeback):
            for param in model.parameters():
                param.add_(1)
                optimizer.state[param]["exp_avg"].mul_(2)
                optimizer.state[param]["step"] += 5
            optimizer.param_groups[0]["lr"] = 0.25
        found = whole(state_of(model, optimizer))
        for name in before:
            value = before[name]
            if writeback and "exp_avg_sq" not in name and name != "steps":
                value = value * 2 if "exp_avg" in name else value + (5 if "step" in name else 1)
            assert torch.equal(found[name], value), name
    train(model, optimizer, 1)  # and no check takes this for something else


@pytest.mark.parametrize("way", OURS)
@on_ranks(2)
def test_a_state_dict_may_be_assigned(way):
    model, optimizer = make(way)
    with as_dtensors(model, optimizer):
        state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    with as_dtensors(model, optimizer, writeback=False):
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name
    train(model, optimizer, 0)


@on_ranks(2)
def test_saving_does_not_gather_what_is_not_wanted():
    """Of each unit in chunks its parameters and two moments, one unit at a time; of rows nothing,
    and nothing is computed in another dtype or unsharded."""
    model = stack(3)
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model) as log, as_dtensors(model, optimizer, writeback=False):
        model.state_dict()
    assert log == []


@on_ranks(2)
def test_a_block_inside_of_a_block_is_the_same_one():
    model, optimizer = make("chunks")
    train(model, optimizer, 0)
    with as_dtensors(model, optimizer):
        params = list(model.parameters())
        with as_dtensors(model, optimizer):
            assert list(map(id, model.parameters())) == list(map(id, params))
        with torch.no_grad():
            params[0].zero_()
    assert not model.state_dict()["embedding.weight"].any()


@on_ranks(2)
def test_what_was_saved_outlives_the_block_and_the_next_step():
    model, optimizer = make("chunks")
    train(model, optimizer, 0)
    state = state_of(model, optimizer)
    before = {name: value.clone() for name, value in whole(state).items()}
    train(model, optimizer, 1)
    assert_same(whole(state), before)


@on_ranks(2)
def test_an_exception_inside_leaves_all_as_it_was():
    model, optimizer = make("chunks")
    train(model, optimizer, 0)
    before = whole(state_of(model, optimizer))
    with pytest.raises(ZeroDivisionError), as_dtensors(model, optimizer), torch.no_grad():
        for param in model.parameters():
            param.zero_()
            optimizer.state[param]["exp_avg"].zero_()
        _ = 1 / 0
    assert_same(whole(state_of(model, optimizer)), before)
    train(model, optimizer, 1)


@on_ranks(2)
def test_the_step_goes_on_between_a_forward_and_its_backward():
    """A program may save there, and even write back what has not changed."""
    losses = []
    for saves in (False, True):
        model, optimizer = make("chunks")
        train(model, optimizer, 0)
        x = torch.arange(4, device=device()) + dist.get_rank()
        loss = model(x).sum()
        if saves:
            state_of(model, optimizer, writeback=True)
        loss.backward()
        optimizer.step()
        losses.append(train(model, optimizer, 1))
    assert torch.equal(*losses)


@on_ranks(3)
def test_parameters_without_a_dimension_and_smaller_than_the_number_of_ranks():
    def made():
        torch.manual_seed(0)
        model = FSDP(Scaled(2, 1).to(device()))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    for _ in range(2):
        model(torch.ones(1, 2, device=device()) + dist.get_rank()).sum().backward()
        optimizer.step()
    state = state_of(model, optimizer)
    assert state["model"]["scale"].shape == ()
    other, its_optimizer = made()
    with quietly(), as_dtensors(other, its_optimizer):
        set_state_dict(
            other, its_optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip
    assert_same(whole(state_of(other, its_optimizer)), whole(state))
    assert torch.equal(other.state_dict()["scale"], model.state_dict()["scale"])


# --------------------------------------------------------------------------------- what is refused


@on_ranks(2)
def test_what_is_put_in_a_parameters_place_is_checked():
    model = make("chunks")[0]
    with (
        pytest.raises(ValueError, match=r"'0\.weight' of unit 'blocks\.0' .*DTensor of \[5, 5\]"),
        as_dtensors(model),
    ):
        model.blocks[0].module[0].weight = nn.Parameter(torch.ones(5, 5, device=device()))
    with (
        pytest.raises(ValueError, match=r"by a DTensor of \[5, 5\] .*Replicate.*stay a DTensor of"),
        as_dtensors(model),
    ):
        layer = model.blocks[0].module[0]
        layer.weight = nn.Parameter(layer.weight.redistribute(placements=[Replicate()]))


@on_ranks(2)
def test_the_model_does_not_run_inside():
    model, optimizer = make("chunks")
    with (
        pytest.raises(RuntimeError, match="was called inside as_dtensors"),
        as_dtensors(model, optimizer),
    ):
        train(model, optimizer, 0)
    train(model, optimizer, 0)


@pytest.mark.parametrize("outer", ["summon_full_params", "as_dtensors"])
@on_ranks(2)
def test_one_form_inside_of_the_other_is_refused(outer):
    model = make("chunks")[0]
    forms = {
        "summon_full_params": lambda: FSDP.summon_full_params(model),
        "as_dtensors": lambda: as_dtensors(model),
    }
    (inner,) = forms.keys() - {outer}
    with (
        forms[outer](),
        pytest.raises(RuntimeError, match="out already, in another form"),
        forms[inner](),
    ):
        pass


class NoElements(Block):
    """A unit whose parameters have no elements."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(3, 0))

    def forward(self, x):
        return x + self.nothing.sum()


class Unused(NoElements):
    """One that has another, which is not used."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(("make", "in_rows"), [(NoElements, False), (Unused, True)])
@pytest.mark.parametrize("by_torch", [True, False])
@on_ranks(2)
def test_what_has_no_state_is_saved_and_loaded(by_torch, make, in_rows, tmp_path):
    def trained(steps):
        model = FSDP(
            nn.Sequential(nn.Linear(5, 5), make()).to(device()),
            auto_wrap_policy=ModuleWrapPolicy({make}),
            use_orig_params=in_rows,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for at in range(steps):
            model(torch.full((2, 5), float(at + dist.get_rank()), device=device())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(2)
    other, its_optimizer = trained(1)
    if by_torch:
        with as_dtensors(model, optimizer):
            params, states = get_state_dict(model, optimizer)
            assert params["1.nothing"].shape == (3, 0)
        options = StateDictOptions(strict=False)
        with as_dtensors(other, its_optimizer):
            set_state_dict(
                other,
                its_optimizer,
                model_state_dict=params,
                optim_state_dict=states,
                options=options,
            )
    else:
        dcp.save(state_to_save(model, optimizer), checkpoint_id=tmp_path)
        with state_to_load(other, its_optimizer) as state:
            dcp.load(state, checkpoint_id=tmp_path)
    found = FSDP.optim_state_dict(other, its_optimizer)["state"]
    expected = FSDP.optim_state_dict(model, optimizer)["state"]
    assert found.keys() == expected.keys() >= {"0.weight", "0.bias"}
    assert torch.equal(found["0.weight"]["exp_avg"], expected["0.weight"]["exp_avg"])
    assert torch.equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"])
