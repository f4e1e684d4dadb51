"""tensor_parallel.py: fully_shard of parameters that are DTensors on a mesh of their own, against
torch's own and against a plain model, on 2 x 2 ranks."""

import copy
import tempfile
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import minifsdp
from minifsdp import FullyShardedDataParallel, fully_shard
from minifsdp.core.unit_state import ShardedState
from minifsdp.support.param_access import Placeholder
from minifsdp.support.tensor_parallel import _on_mesh
from tests.ranks import cached_in_a_world, device, on_ranks

# The same ranks: how to divide an operation, torch finds out once for each of them, by trying.
pytestmark = pytest.mark.xdist_group("dtensors")

WORDS, WIDTH = 12, 8


class Block(nn.Module):
    """Of ``inner`` 6, each rank of two has three rows, which do not divide among two."""

    def __init__(self, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, inner: int = 6):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.checkpointed = False

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def build(inner: int = 6) -> Model:
    torch.manual_seed(0)
    return Model(inner).to(device())


@cached_in_a_world
def grid(shape: tuple[int, ...] = (2, 2)):
    names = ("replicate", "dp", "tp")[-len(shape) :]
    return init_device_mesh(device().type, shape, mesh_dim_names=names)


# The parts of a sequence are on the ranks of "tp" between the layers that are divided there.
SEQUENCE, WHOLE = Shard(1), Replicate()
OF_A_BLOCK = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=SEQUENCE),
    "down": RowwiseParallel(output_layouts=SEQUENCE),
}
OF_THE_REST = {
    "embed": RowwiseParallel(input_layouts=WHOLE, output_layouts=SEQUENCE),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=WHOLE),
}
COLUMNS_AND_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def parallel(model: Model, mesh, plan=OF_A_BLOCK, rest=OF_THE_REST) -> Model:
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, rest) if rest else model


def sharded(shard=fully_shard, model=None, how=lambda model: None, mesh=None, **settings):
    mesh = grid() if mesh is None else mesh
    plans = {key: settings.pop(key) for key in ("plan", "rest") if key in settings}
    model = parallel(build() if model is None else model, mesh["tp"], **plans)
    how(model)
    data = mesh["replicate", "dp"] if mesh.ndim == 3 else mesh["dp"]
    for block in model.blocks:
        shard(block, mesh=data, **settings)
    return shard(model, mesh=data, **settings)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=False)


def words(step: int, rank: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (3, 4), generator=seed).to(device())


def loss_of(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    found = model(given).float().flatten(0, 1)
    return nn.functional.cross_entropy(found, given.roll(1, 1).flatten())


def data_rank() -> int:
    return dist.get_rank() // 2


def train(model, steps=3, clip=False, accumulate=0) -> list[float]:
    optimizer, numbers = adamw(model), []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate + 1):
            model.set_requires_gradient_sync(part == accumulate)
            loss = loss_of(model, words(10 * step + part, data_rank()))
            loss.backward()
            numbers.append(loss.item())
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
            numbers.append(norm.full_tensor().item())
        optimizer.step()
    model.optimizer = optimizer
    return numbers


def differ(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """The names of parameters whose values, gradients, or places on ranks are not the same."""
    found = []
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        pairs = [(one, other)]
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            pairs.append((one.grad, other.grad))
        for a, b in pairs:
            alike = (a.shape, a.device_mesh, a.placements) == (b.shape, b.device_mesh, b.placements)
            if not alike or not torch.equal(a.to_local(), b.to_local()):
                found.append(name)
    return found


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def freeze(model: Model) -> None:
    for block in model.blocks:
        block.up.requires_grad_(False)
        block.norm.weight.requires_grad_(False)


def tie(model: Model) -> None:
    model.head.weight = model.embed.weight


def run_again(model: Model) -> None:
    model.checkpointed = True


def run_parts_again(model: Model) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CASES = {
    "full": {},
    "columns and rows, the rest is plain": {"plan": COLUMNS_AND_ROWS, "rest": None},
    "stays after forward": {"reshard_after_forward": False},
    "bf16": {"mp_policy": LOW},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "clipped": {"clip": True},
    "frozen in part": {"how": freeze},
    "tied": {"how": tie},
    "blocks are run again": {"how": run_again},
    "what is in blocks is run again": {"how": run_parts_again},
    "hybrid, one replica": {"mesh": (1, 2, 2)},
    "hybrid, one shard": {"mesh": (2, 1, 2)},
}


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_bit_equal_to_torchs(case):
    settings = dict(CASES[case])
    clip = settings.pop("clip", False)
    if "mesh" in settings:
        settings["mesh"] = grid(settings["mesh"])
    theirs, ours = sharded(torchs_fully_shard, **settings), sharded(**settings)
    expected = train(theirs, clip=clip)
    assert train(ours, clip=clip) == expected
    assert differ(ours, theirs) == []
    states = zip(ours.parameters(), theirs.parameters(), strict=True)
    for one, other in states if case == "full" else ():
        for key, value in theirs.optimizer.state[other].items():
            found = ours.optimizer.state[one][key]
            assert torch.equal(*(getattr(t, "_local_tensor", t) for t in (found, value)))


@on_ranks(4)
def test_an_accumulation_adds_up_in_a_different_order():
    """Only of the norms, of which each rank of "tp" has a summand: torch adds up those of several
    backwards first. What is added is the same, so three numbers of fp32 may round differently."""
    theirs, ours = sharded(torchs_fully_shard), sharded()
    assert train(ours, 1, accumulate=2) == train(theirs, 1, accumulate=2)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        a, b = one.grad.full_tensor(), other.grad.full_tensor()
        if "norm" in name:
            bound = 3 * torch.finfo(a.dtype).eps * max(1.0, b.abs().max().item())
            assert (a - b).abs().max() <= bound, name
        else:
            assert torch.equal(a, b), name


@on_ranks(4)
def test_like_a_plain_model_on_the_global_batch():
    plain, ours = build(), sharded()
    optimizers = adamw(plain), adamw(ours)
    for step in range(4):
        both = torch.cat([words(step, 0), words(step, 1)])
        expected = loss_of(plain, both)
        found = loss_of(ours, words(step, data_rank()))
        for loss, optimizer in zip((expected, found), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = found.detach().clone()
        dist.all_reduce(mean, group=grid()["dp"].get_group())
        # Sums in other orders: some units in the last place of the numbers.
        assert abs(mean.item() / 2 - expected.item()) < 2e-6
    full = whole(ours)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-5, atol=1e-6, msg=name)


@on_ranks(4)
def test_what_an_optimizer_sees_and_what_modules_see():
    plain, model = build(), sharded()
    weight = model.blocks[0].up.weight
    assert isinstance(weight, nn.Parameter) and weight.shape == (6, WIDTH)
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
    dp, tp = grid().get_coordinate()
    rows = plain.blocks[0].up.weight.chunk(2)[tp].chunk(2)[dp]
    assert torch.equal(weight.to_local(), rows)
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda up, _: seen.append(type(up.weight)))
    loss = loss_of(model, words(0, 0))
    assert seen == [DTensor]
    assert model.blocks[0].up.weight.shape == (6, WIDTH)  # of the placeholder
    loss.backward()
    assert model.blocks[0].up.weight is weight
    assert weight.grad.placements == weight.placements


@on_ranks(4)
def test_unshard_shows_dtensors_of_the_other_mesh():
    plain, model = build(), sharded()
    block = model.blocks[0]
    block.unshard()
    weight = block.up.weight
    assert weight.device_mesh == grid()["tp"] and weight.placements == (Shard(0),)
    assert torch.equal(weight.full_tensor(), plain.blocks[0].up.weight)
    assert torch.equal(block.norm.weight.to_local(), plain.blocks[0].norm.weight)
    block.reshard()
    assert block.up.weight.device_mesh.ndim == 2
    block.unshard()
    loss_of(model, words(0, 0)).backward()  # ends it
    assert block.up.weight.grad is not None


@on_ranks(4)
def test_between_forward_and_backward_no_block_has_memory():
    """Autograd has saved DTensors, whose parts on this rank are gathered again for the backward."""
    model = sharded()
    loss = model(words(0, 0)).square().mean()
    for block in model.blocks:
        assert block._unit.state.sharded is ShardedState.SHARDED
        assert block._unit.unsharded.storage.size() == 0
        assert block._unit.leaks == 0  # or this is another memory, and autograd has the one of then
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(4)
def test_an_evaluation_finds_the_whole_of_a_weight_that_is_sharded():
    """Also if another module reads it."""
    model, seen = sharded(), []
    weight = build().blocks[0].up.weight
    up = model.blocks[0].up
    model.norm.register_forward_hook(lambda *_: seen.extend([type(up.weight), up.weight * 2]))
    with torch.no_grad():
        model(words(0, 0))
    assert seen[0] is Placeholder
    assert seen[1].shape == weight.shape and torch.equal(seen[1].full_tensor(), weight * 2)


@on_ranks(4)
def test_evaluations_free_all_units_but_those_that_somebody_has_kept():
    theirs, model = sharded(torchs_fully_shard), sharded()
    expected = theirs(words(0, 0)).detach()
    kept: list[torch.Tensor] = []
    up, takes = model.blocks[0].up, {}
    takes["a DTensor"] = lambda: up.weight
    takes["its local tensor"] = lambda: up.weight.to_local()  # without gradients, the very one
    takes["a view of that"] = lambda: up.weight.to_local()[:]
    with torch.inference_mode(), warnings.catch_warnings():
        # There torch (2.13) raises and catches an error in each linear layer, and that keeps the
        # arguments until Python's collector runs.
        warnings.filterwarnings("ignore", "a parameter of unit")
        # And it may round in another way (2.14), with its own fully_shard, too.
        assert torch.equal(model(words(0, 0)), theirs(words(0, 0)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(words(0, 0)), expected)
    assert model.blocks[0]._unit.state.sharded is ShardedState.SHARDED
    assert model.blocks[0]._unit.unsharded.storage.size() == 0
    values = build().blocks[0].up.weight.chunk(2)[grid().get_coordinate()[1]]
    for take in takes.values():
        kept.clear()
        handle = up.register_forward_hook(lambda *_, take=take: kept.append(take()))
        model.blocks[0]._unit.leaks = 0
        with (
            torch.no_grad(),
            pytest.warns(UserWarning, match=r"unit 'blocks\.0' is still referred"),
        ):
            model(words(0, 0))
        handle.remove()
        assert torch.equal(getattr(kept[0], "_local_tensor", kept[0]), values)


@on_ranks(4)
def test_a_gradient_is_waited_for():
    mesh = grid()["tp"]
    weight = distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()])
    view = torch.zeros(4, 2, device=device(), requires_grad=True)
    seen = []
    view.register_hook(lambda grad: seen.append(type(grad)))
    on_its_way = all_reduce(torch.ones(4, 2, device=device()), "sum", mesh)
    assert type(on_its_way) is AsyncCollectiveTensor
    grad = DTensor.from_local(on_its_way, mesh, [Replicate()], run_check=False)
    _on_mesh(view, weight._spec, grid()["dp"]).backward(grad)
    assert seen == [torch.Tensor] and torch.equal(view.grad.cpu(), torch.full((4, 2), 2.0))


@on_ranks(4)
def test_a_change_in_a_forward_is_refused():
    model = sharded()
    norm = model.blocks[0].norm

    def change(*_):
        with torch.no_grad():
            norm.weight.mul_(2)

    norm.register_forward_hook(change)
    for _ in range(4):  # after the first steps not by its values
        with pytest.raises(RuntimeError, match=r"unit 'blocks\.0' was changed in place"):
            model(words(0, 0))


@on_ranks(4)
def test_gradients_of_gradients_are_refused():
    model = sharded(plan=COLUMNS_AND_ROWS, rest=None)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        model.blocks[0](torch.randn(2, WIDTH, device=device())).sum().backward(create_graph=True)


@on_ranks(4)
def test_hooks_get_this_ranks_part_and_attributes_are_kept():
    model = parallel(build(), grid()["tp"])
    model.head.weight.no_decay = True
    sharded_model = fully_shard(model, mesh=grid()["dp"])
    assert sharded_model.head.weight.no_decay
    shapes = []
    model.head.weight.register_hook(lambda grad: shapes.append(grad.shape))
    model.head.weight.register_post_accumulate_grad_hook(lambda p: shapes.append(p.grad.shape))
    loss_of(model, words(0, 0)).backward()
    assert shapes == [(WORDS // 2, WIDTH), (WORDS, WIDTH)]


@on_ranks(4)
def test_the_example_on_the_page_for_users():
    page = Path(minifsdp.__file__).parent.parent / "tutorials/reference/using.md"
    section = page.read_text().split("## Tensor-parallel layers")[1]
    code = section.split("```")[1].replace("(2, 4)", "(2, 2)").replace('"cuda"', "kind")
    model = build()
    names = {**globals(), "model": model, "layers": model.blocks, "kind": device().type}
    exec(code, names)
    theirs = sharded(torchs_fully_shard, plan=COLUMNS_AND_ROWS, rest=None)
    assert train(model) == train(theirs) and differ(model, theirs) == []


# ------------------------------------------------------------------------------------- checkpoints

FULL = StateDictOptions(full_state_dict=True)


@on_ranks(4)
def test_state_dicts_full_and_divided():
    model = sharded(model=build(8))
    train(model)
    full = get_model_state_dict(model, options=FULL)
    assert full.keys() == build(8).state_dict().keys()
    states = get_optimizer_state_dict(model, model.optimizer, options=FULL)
    other = sharded(model=build(8))
    optimizer = adamw(other)
    set_model_state_dict(other, full, options=FULL)
    set_optimizer_state_dict(other, optimizer, states, options=FULL)
    again = get_optimizer_state_dict(other, optimizer, options=FULL)["state"]
    for name, state in states["state"].items():
        assert all(torch.equal(again[name][key], value) for key, value in state.items()), name
    own = {name: value.clone() for name, value in model.state_dict().items()}
    loads = {
        "full": lambda m: m.load_state_dict(full),
        "divided": lambda m: m.load_state_dict(own),
        "assigned": lambda m: m.load_state_dict(own, assign=True),
        "by torch's function": lambda m: set_model_state_dict(m, dict(own)),
    }
    for param in (*model.parameters(), *other.parameters()):
        param.grad = None
    assert differ(other, model) == []
    for how, load in loads.items():
        loaded = sharded(model=build(8))
        with torch.no_grad():
            for param in loaded.parameters():
                param.zero_()
        load(loaded)
        assert differ(loaded, model) == [], how


@on_ranks(4)
def test_a_full_state_dict_where_rows_do_not_divide():
    """torch's own function cannot divide it there (2.13); load_state_dict() does."""
    model, full = sharded(), whole(sharded())
    model.load_state_dict({name: value + 1 for name, value in full.items()})
    assert all(torch.equal(value, full[name] + 1) for name, value in whole(model).items())


def states_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load(model, folder):
    optimizer = adamw(model)
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    model.optimizer = optimizer
    return model


def optimizer_states(model):
    return get_optimizer_state_dict(model, model.optimizer, options=FULL)["state"]


@on_ranks(4)
def test_a_checkpoint_is_loaded_on_other_meshes():
    folders: list[object] = [None]
    with tempfile.TemporaryDirectory() as own:
        folders[0] = own
        dist.broadcast_object_list(folders)
        first, second = (f"{folders[0]}/{number}" for number in (1, 2))
        model = sharded(model=build(8))
        train(model)
        dcp.save(states_of(model, model.optimizer), checkpoint_id=first)
        for param in model.parameters():
            param.grad = None
        expected, momenta = whole(model), optimizer_states(model)

        assert differ(load(sharded(torchs_fully_shard, model=build(8)), first), model) == []
        flat = build(8)
        for block in flat.blocks:
            fully_shard(block)
        load(fully_shard(flat), first)  # four ranks without tensor parallelism
        plain = {"model": build(8).state_dict()}
        dcp.load(plain, checkpoint_id=first)  # one device
        dcp.save(states_of(flat, flat.optimizer), checkpoint_id=second)
        back = load(sharded(model=build(8)), second)
        for found in (whole(flat), plain["model"], whole(back)):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        for found in (optimizer_states(flat), optimizer_states(back)):
            for name, state in momenta.items():
                assert all(torch.equal(found[name][key], value) for key, value in state.items())
        assert train(back, 1) == train(model, 1)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(4)
def test_a_model_on_meta(assign):
    with torch.device("meta"):
        plain = Model(8)
    model, values = sharded(model=plain), sharded(model=build(8))
    assert all(param.is_meta for param in model.parameters())
    if not assign:
        model.to_empty(device=device())
    model.load_state_dict(copy.copy(values.state_dict()), assign=assign)
    assert train(model) == train(values)
    assert differ(model, values) == []


# ----------------------------------------------------------------------------------------- refusals


@on_ranks(4)
def test_meshes_that_do_not_fit_are_refused():
    mesh = grid()
    other = init_device_mesh(device().type, (4,), mesh_dim_names=("all",))
    further = r"weight' is a DTensor with .*divided further by fully_shard\(module, mesh"
    for given in (None, mesh, mesh["tp"], other):
        model = parallel(build(), mesh["tp"])
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=further):
            fully_shard(model.blocks[0], mesh=given) if given else fully_shard(model)
        assert all(param is before[name] for name, param in model.named_parameters())
    for rows in (False, True):
        with pytest.raises(ValueError, match=r"DTensor.*divided further by fully_shard"):
            FullyShardedDataParallel(parallel(build(), mesh["tp"]), use_orig_params=rows)
    model = nn.Linear(2, 2)
    summand = DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Partial()], run_check=False)
    model.weight = nn.Parameter(summand)
    with pytest.raises(ValueError, match="each rank has a summand"):
        fully_shard(model, mesh=mesh["dp"])


@on_ranks(4)
def test_a_plain_parameter_among_dtensors_is_torchs_error():
    """It is no parameter of a unit inside, which a message of ours is about."""
    model = sharded(plan={"up": ColwiseParallel(use_local_output=False)}, rest=None)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor") as error:
        model.blocks[0](torch.randn(2, WIDTH, device=device()))
    assert "units inside of it" not in str(error.value)
