"""checkpoint_state.py: saved where it lies, and loaded all or not at all."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, as_dtensors, state_to_load, state_to_save
from minifsdp.between_steps import checkpoint_state
from minifsdp.chunks.boxes import BoxedTensor
from tests.chunks.test_as_dtensors import (
    OURS,
    SOME_AND_OTHERS,
    WAYS,
    assert_same,
    load,
    make,
    partners,
    quietly,
    state_of,
    train,
    whole,
)
from tests.chunks.test_unit_dtensors import SHAPES, Parameters
from tests.ranks import cached_in_a_world, device, on_ranks, run

pytest.importorskip("numpy", reason="torch.distributed.checkpoint of several ranks needs it")


def save_here(model, optimizer, folder):
    with quietly():
        dcp.save(state_to_save(model, optimizer), checkpoint_id=folder)


def load_here(model, optimizer, folder):
    with quietly(), state_to_load(model, optimizer) as state:
        dcp.load(state, checkpoint_id=folder)


def save_here_and_load_everywhere(way, which, folder):
    model, optimizer = make(way)
    for at in range(2):
        train(model, optimizer, at)
    expected = whole(state_of(model, optimizer))
    save_here(model, optimizer, folder)
    loss = train(model, optimizer, 2)
    for other in partners(way, which):
        there, its_optimizer = make(other, lr=0.5)
        if other != "chunks":  # an optimizer that has not stepped yet has no state
            train(there, its_optimizer, 7)
        (load_here if other in OURS else load)(there, its_optimizer, folder)
        assert_same(whole(state_of(there, its_optimizer)), expected)
        assert [group["lr"] for group in its_optimizer.param_groups] == [0.01]
        assert torch.equal(train(there, its_optimizer, 2), loss), other


@pytest.mark.few(5)
@pytest.mark.parametrize("which", SOME_AND_OTHERS)
@pytest.mark.parametrize("way", OURS)
def test_what_is_saved_in_place_any_model_goes_on_with(way, which, tmp_path):
    run(save_here_and_load_everywhere, 2, way, which, tmp_path)


def save_everywhere_and_load_here(ways, folder):
    for way in ways:
        model, optimizer = make(way)
        train(model, optimizer, 0)
        state, expected = state_of(model, optimizer), whole(state_of(model, optimizer))
        with quietly():
            dcp.save(state, checkpoint_id=folder / way)
        loss = train(model, optimizer, 1)
        for other in ("chunks", "rows", "fully_shard"):
            there, its_optimizer = make(other, lr=0.5)
            load_here(there, its_optimizer, folder / way)
            assert_same(whole(state_of(there, its_optimizer)), expected)
            assert torch.equal(train(there, its_optimizer, 1), loss), (way, other)


def test_what_any_model_has_saved_is_loaded_in_place(tmp_path):
    run(save_everywhere_and_load_here, 2, ["chunks", *WAYS.keys() - {*OURS}], tmp_path)


def save_at(way, folder):
    model, optimizer = make(way)
    train(model, optimizer, 0)
    save_here(model, optimizer, folder)
    torch.save(whole(state_of(model, optimizer)), folder / f"expected {dist.get_rank()}")


def load_at(way, folder):
    for other in {way, "chunks of one unit"}:
        model, optimizer = make(other)
        load_here(model, optimizer, folder)
        assert_same(whole(state_of(model, optimizer)), torch.load(folder / "expected 0"))


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [(3, 1), (1, 4), (4, 3)])
@pytest.mark.parametrize("way", ["chunks", "chunks of one unit", "rows"])
def test_with_other_numbers_of_ranks(way, ranks, tmp_path):
    for task, world in zip((save_at, load_at), ranks, strict=True):
        run(task, world, way, tmp_path)


def there_and_back(model, folder):
    with quietly():
        dcp.save(state_to_save(model), checkpoint_id=folder)
        with torch.no_grad(), FSDP.summon_full_params(model):
            expected = [param.clone() for param in model.params]
            for param in model.params:
                param.zero_()
        with state_to_load(model) as state:
            dcp.load(state, checkpoint_id=folder)
    with FSDP.summon_full_params(model):
        assert all(map(torch.equal, model.params, expected))


@on_ranks(4)
def test_in_a_grid_of_ranks(tmp_path):
    """Each of two pairs of ranks has the whole model; DCP refuses what is saved twice."""
    model = FSDP(
        Parameters([(5, 3), (7,)]).to(device()),
        device_mesh=init_device_mesh(device().type, (2, 2)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    there_and_back(model, tmp_path)


@pytest.mark.parametrize("shapes", SHAPES)
@on_ranks(3)
def test_parameters_of_all_shapes(shapes, tmp_path):
    there_and_back(FSDP(Parameters(SHAPES[shapes]).to(device())), tmp_path)


def async_save(state, folder):
    """torch wants a process group that carries what is on a CPU."""
    return dcp.async_save(state, checkpoint_id=folder, process_group=gloo())


@cached_in_a_world
def gloo():
    return dist.new_group(backend="gloo")


@pytest.mark.parametrize("way", OURS)
@on_ranks(2)
def test_async_save_takes_what_there_is_when_it_is_called(way, tmp_path):
    model, optimizer = make(way)
    train(model, optimizer, 0)
    expected = whole(state_of(model, optimizer))
    with quietly():
        writing = async_save(state_to_save(model, optimizer), tmp_path)
        train(model, optimizer, 1)
        writing.result()
    load_here(model, optimizer, tmp_path)
    assert_same(whole(state_of(model, optimizer)), expected)


@pytest.mark.parametrize("way", OURS)
@on_ranks(2)
def test_async_save_of_what_torchs_functions_return(way, tmp_path):
    """A DTensor of rows begins somewhere in the shard of its unit, and torch's copy minds."""
    model, optimizer = make(way)
    train(model, optimizer, 0)
    expected = whole(state_of(model, optimizer))
    with quietly():
        async_save(state_of(model, optimizer), tmp_path).result()
    load(model, optimizer, tmp_path)
    assert_same(whole(state_of(model, optimizer)), expected)


@pytest.mark.parametrize("way", OURS)
@on_ranks(2)
def test_a_load_that_fails_has_changed_nothing(way, tmp_path):
    model, optimizer = make(way)
    train(model, optimizer, 0)
    save_here(model, optimizer, tmp_path)
    train(model, optimizer, 1)
    before = whole(state_of(model, optimizer))
    dist.barrier()
    if dist.get_rank() == 0:
        file = max(tmp_path.glob("*.distcp"), key=lambda file: file.stat().st_size)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) * 3 // 4])  # after some entries could be read
    dist.barrier()
    with quietly(), pytest.raises(CheckpointException), state_to_load(model, optimizer) as state:
        dcp.load(state, checkpoint_id=tmp_path)
    assert_same(whole(state_of(model, optimizer)), before)
    train(model, optimizer, 2)
    fresh = torch.optim.AdamW(model.parameters())
    with quietly(), pytest.raises(CheckpointException), state_to_load(model, fresh) as state:
        dcp.load(state, checkpoint_id=tmp_path)
    assert not fresh.state  # its first step is still the first one


@pytest.mark.parametrize("way", ["chunks", "rows"])
@on_ranks(2)
def test_chunks_are_saved_from_where_they_are(way):
    model, optimizer = make(way)
    train(model, optimizer, 0)
    ours = _memory([*model.parameters(), *_values(optimizer.state)])
    state = state_to_save(model, optimizer)
    found = [t for name, t in state["model"].items() if name != "steps"]
    found += _values(state["optimizer"]["state"])
    assert all(isinstance(tensor, BoxedTensor) is (way == "chunks") for tensor in found)
    assert all(_lies_in(tensor, ours) for tensor in _memory(found))


@pytest.mark.parametrize("way", ["chunks", "rows"])
@on_ranks(2)
def test_only_what_would_be_lost_is_loaded_into_copies(way):
    model, optimizer = make(way)
    params = _memory(model.parameters())
    made = []

    def init(optimizer) -> None:
        make_states(optimizer)
        made.extend(_memory(_values(optimizer.state)))

    def entered() -> tuple[list, list]:
        with quietly(), state_to_load(model, optimizer) as state:
            weights = [t for name, t in state["model"].items() if name != "steps"]
            return _memory(weights), _memory(_values(state["optimizer"]["state"]))

    make_states = checkpoint_state.make_states
    with patch.object(checkpoint_state, "make_states", init):
        weights, states = entered()
    assert not any(_lies_in(tensor, params) for tensor in weights)
    assert states and all(_lies_in(tensor, made) for tensor in states)  # no step is lost with them
    own = _memory(_values(optimizer.state))
    weights, states = entered()
    assert not any(_lies_in(tensor, params) for tensor in weights)
    assert states and not any(_lies_in(tensor, own) for tensor in states)


def _values(states):
    """Of an optimizer, without numbers such as Adam's step."""
    return [value for entry in states.values() for value in entry.values() if value.dim()]


def _memory(tensors):
    """The tensors with this rank's values."""
    found = []
    for tensor in tensors:
        boxes = tensor.parts.values() if isinstance(tensor, BoxedTensor) else [tensor]
        found += [getattr(box, "_local_tensor", box) for box in boxes]
    return [tensor for tensor in found if tensor.numel()]


def _lies_in(tensor, others):
    storages = (other.untyped_storage() for other in others)
    return any(0 <= tensor.data_ptr() - s.data_ptr() < s.nbytes() for s in storages)


@on_ranks(2)
def test_sgd_has_no_state_and_is_loaded_all_the_same(tmp_path):
    saved = make("chunks")[0]
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.25)
    save_here(saved, optimizer, tmp_path)
    model = make("chunks")[0]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    load_here(model, other, tmp_path)
    assert other.param_groups[0]["lr"] == 0.25 and not other.state
    assert all(map(torch.equal, model.parameters(), saved.parameters()))


@pytest.mark.parametrize("way", OURS)
@on_ranks(2)
def test_an_optimizer_that_has_not_stepped_is_saved_as_such(way, tmp_path):
    model, optimizer = make(way)
    save_here(model, optimizer, tmp_path)
    assert not optimizer.state
    expected = [train(model, optimizer, at) for at in range(3)]
    for other in (way, "chunks", "rows"):
        there, its_optimizer = make(other, lr=0.5)
        train(there, its_optimizer, 7)
        load_here(there, its_optimizer, tmp_path)
        assert [train(there, its_optimizer, at) for at in range(3)] == expected


@on_ranks(2)
def test_an_optimizer_with_other_groups_is_refused_and_nothing_is_loaded(tmp_path):
    """More groups in the file than here. Fewer of them are refused by torch: a key is missing."""
    saved, _ = make("rows")
    first, *others = saved.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "weight_decay": 0.5}, {"params": others}])
    train(saved, optimizer, 0)
    save_here(saved, optimizer, tmp_path)
    model, other = make("rows", lr=0.25)
    before = [param._local_tensor.clone() for param in model.parameters()]
    groups = rf"group 0 .* other parameters \(1\) than group 0 of this one \({len(others) + 1}\)"
    with pytest.raises(ValueError, match=groups):
        load_here(model, other, tmp_path)
    assert not other.state and other.param_groups[0]["lr"] == 0.25
    assert all(map(torch.equal, _memory(model.parameters()), before))
    with quietly(), state_to_load(model) as state:  # as the message says
        dcp.load(state, checkpoint_id=tmp_path)
    assert all(map(torch.equal, _memory(model.parameters()), _memory(saved.parameters())))


@on_ranks(2)
def test_several_optimizers(tmp_path):
    def build():
        model = make("chunks")[0]
        first, *others = model.parameters()
        return model, torch.optim.Adam([first], lr=0.1), torch.optim.AdamW(others, lr=0.2)

    model, *optimizers = build()
    model(torch.arange(6).to(device())).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with quietly():
        dcp.save(state_to_save(model, *optimizers), checkpoint_id=tmp_path)
    there, *others = build()
    with quietly(), state_to_load(there, *others) as state:
        dcp.load(state, checkpoint_id=tmp_path)
    for optimizer, other in zip(optimizers, others, strict=True):
        for (param, entry), (its, found) in zip(
            optimizer.state.items(), other.state.items(), strict=True
        ):
            assert torch.equal(param, its)
            assert all(torch.equal(found[name], value) for name, value in entry.items())


@on_ranks(2)
def test_a_step_may_be_half_done():
    """Between a forward and its backward nothing is saved that the backward would miss."""
    model, optimizer = make("chunks")
    train(model, optimizer, 0)
    loss = model(torch.arange(5).to(device())).sum()
    state_to_save(model, optimizer)
    with state_to_load(model, optimizer):
        pass  # what is loaded is what it had
    loss.backward()
    optimizer.step()


@on_ranks(2)
def test_the_other_form_inside_is_refused():
    model, optimizer = make("chunks")
    with (
        pytest.raises(RuntimeError, match="are out already, in another form"),
        state_to_load(model, optimizer),
        as_dtensors(model),
    ):
        pass


@on_ranks(1)
def test_a_plain_linear_in_the_form_of_torch(tmp_path):
    """The names and the shapes are those of get_state_dict, for whatever reads the file."""
    model = FSDP(nn.Linear(3, 2).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.ones(1, 3).to(device())).sum().backward()
    optimizer.step()
    state = state_to_save(model, optimizer)
    assert {name: list(t.shape) for name, t in state["model"].items()} == {
        "weight": [2, 3],
        "bias": [2],
    }
    assert list(state["optimizer"]["state"]["weight"]) == ["momentum_buffer"]
    assert state["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
