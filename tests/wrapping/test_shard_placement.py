"""shard_placement.py: parameters that are divided along another dimension, against torch's own
``fully_shard``."""

import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from minifsdp import FSDPModule, fully_shard
from tests.parity import mesh
from tests.ranks import device, on_ranks, run
from tests.test_users_comm import all_gather

LOW = torch.bfloat16


class Block(nn.Module):
    """Parameters of one, two and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.conv = nn.Conv1d(8, 4, 3, padding=1)

    def forward(self, x):
        up = nn.functional.linear(self.norm(x), self.up.weight.to(x.dtype), self.up.bias)
        conv = self.conv(x.transpose(-1, -2)).transpose(-1, -2)
        return x + self.down(torch.tanh(up)) + conv.repeat(1, 1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.skips = False

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks[: 1 if self.skips else 2]:
            x = checkpoint(block, x, use_reentrant=False) if self.skips else block(x)
        return self.head(x)


def placed(param: nn.Parameter) -> Shard | None:
    """Weights of [12, 8] by columns, of [8, 12] by rows, of [16, 8] by columns; [4, 8, 3] by its
    middle, with a negative number."""
    if param.dim() == 3:
        return Shard(-2)
    return Shard(1) if param.dim() == 2 and param.shape != (8, 12) else None


def last_of(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1) if param.shape[-1] % 4 == 0 else Shard(0)


def plain() -> Model:
    torch.manual_seed(0)
    return Model().to(device())


def build(shard, meta=False, how=lambda model: None, **settings):
    with torch.device("meta" if meta else device()):
        model = Model() if meta else plain()
    how(model)
    for block in model.blocks:
        shard(block, **settings)
    model = shard(model, **settings)
    if meta:
        model.to_empty(device=device())
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, plain().state_dict(), options=options)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def words(step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, 16, (2, 3), generator=seed).to(device())


def train(model, optimizer, parts: int = 1, clip: bool = False, first: int = 0) -> list:
    found = []
    for step in range(first, first + 3):
        for part in range(parts):
            if isinstance(model, FSDPModule) or parts > 1:
                model.set_requires_gradient_sync(part == parts - 1)
            loss = model(words(10 * step + part)).float().square().mean()
            loss.backward()
            found.append(loss.item())
        grads = [p.grad for p in model.parameters()]
        found.append([None if g is None else (str(g.placements), g.to_local()) for g in grads])
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def all_of(model: nn.Module) -> list:
    """All that users see of the parameters."""
    state = model.state_dict()
    parts = [p.to_local().clone() for p in model.parameters()]
    return [
        [(name, str(p.placements), p.shape, p.stride()) for name, p in model.named_parameters()],
        [(name, str(value.placements), value.to_local().clone()) for name, value in state.items()],
        [(part, part.is_contiguous(), part.stride()) for part in parts],
        [p.full_tensor() for p in model.parameters()],
    ]


def same(found, expected, equal=torch.equal) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype is expected.dtype and equal(found, expected)
    if isinstance(expected, list | tuple):
        pairs = zip(found, expected, strict=True)
        return len(found) == len(expected) and all(same(*pair, equal) for pair in pairs)
    if isinstance(expected, float):
        return equal(torch.tensor(found), torch.tensor(expected))
    return found == expected


def tied(model: Model) -> None:
    model.head.weight = model.embed.weight


def lora(model: Model) -> None:
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().to(LOW), requires_grad=False)
        block.conv.requires_grad_(False)


def frozen(model: Model) -> None:
    for block in model.blocks:
        block.requires_grad_(False)


SETTINGS = {
    "default": {},
    "the last dimension": {"shard_placement_fn": last_of},
    "kept": {"reshard_after_forward": False},
    "low": {"mp_policy": MixedPrecisionPolicy(LOW, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "meta": {"meta": True},
    "tied": {"how": tied},
    "frozen": {"how": frozen},
    "two dtypes": {"how": lora},
    "two dtypes, low": {"how": lora, "mp_policy": MixedPrecisionPolicy(LOW)},
    "skips": {"how": lambda model: setattr(model, "skips", True)},
}
BY_RANKS = [(2, name) for name in SETTINGS] + [(4, "default"), (4, "hybrid")]


@pytest.mark.few(5)
@pytest.mark.parametrize(("ranks", "setting"), BY_RANKS)
def test_bit_equal_to_torchs(ranks, setting):
    run(check_bit_equal, ranks, setting)


def settings_of(name: str) -> dict:
    if name == "hybrid":
        return {"mesh": mesh(replicas=2)}
    return {"mesh": init_device_mesh(device().type, (dist.get_world_size(),)), **SETTINGS[name]}


def check_bit_equal(setting: str) -> None:
    for parts, clip in ((1, True), (2, False)):
        found = []
        for shard in (torchs_fully_shard, fully_shard):
            model = build(shard, **{"shard_placement_fn": placed, **settings_of(setting)})
            found.append([all_of(model), train(model, adamw(model), parts, clip), all_of(model)])
        theirs, ours = found
        # Where a weight lies decides which kernel of a GPU computes with its 16 bits.
        low_on_gpu = "low" in setting and device().type != "cpu"
        assert same(ours, theirs, *[partial(torch.allclose, rtol=0.02, atol=0.01)] * low_on_gpu)
        assert setting == "the last dimension" or "Shard(dim=1)" in str(ours[0][0])


@on_ranks(2)
def test_modules_compute_with_what_they_computed_with_before():
    model, before = build(fully_shard, shard_placement_fn=placed), plain()
    seen = []
    for block in model.blocks:
        up = block.up
        block.norm.register_forward_hook(lambda *_, up=up: seen.append(up.weight.detach().clone()))
        block.norm.register_forward_hook(lambda *_, up=up: seen.append(up.weight.stride()))
    model(words(0))
    for at, block in enumerate(before.blocks):
        assert torch.equal(seen[2 * at], block.up.weight) and seen[2 * at + 1] == (8, 1)


@on_ranks(2)
def test_whole_parameters_may_be_looked_at_between_steps():
    """Also of a unit of one parameter."""
    model = plain()
    fully_shard(model.head, shard_placement_fn=placed)
    fully_shard(model, shard_placement_fn=placed)
    for module in (model, model.head):
        module.unshard()
    for (name, param), expected in zip(model.named_parameters(), plain().parameters(), strict=True):
        assert torch.equal(param, expected) and param.is_contiguous(), name


@on_ranks(4)
def test_fewer_ranks_share_it_between_forward_and_backward():
    """torch's own cannot (2.13): it looks for the dimension among chunks of the first one."""
    found = []
    for ranks in (True, 2):
        model = build(fully_shard, shard_placement_fn=placed, reshard_after_forward=ranks)
        train(model, adamw(model))
        found.append(all_of(model)[3])
    assert same(*found)


@on_ranks(2)
def test_a_program_may_move_cast_and_freeze_it_and_set_its_communication():
    model = build(fully_shard, shard_placement_fn=placed)
    other = build(fully_shard)
    for each in (model, other):
        each.blocks[0].set_custom_all_gather(all_gather())
        train(each, adamw(each))
        each.blocks[1].up.weight.requires_grad_(False)
        each.double()
        train(each, adamw(each), first=3)
    for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.dtype is torch.float64 and torch.equal(
            mine.full_tensor(), expected.full_tensor()
        )


@on_ranks(4)
def test_with_tensor_parallel_layers_as_torchs():
    grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    found = []
    for shard in (torchs_fully_shard, fully_shard):
        torch.manual_seed(0)
        model = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}).to(device())
        model = nn.Sequential(*model.values()).to(device())
        parallelize_module(model, grid["tp"], {"0": plan["up"], "1": plan["down"]})
        shard(model, mesh=grid["dp"], shard_placement_fn=lambda p: Shard(p.dim() - 1))
        torch.manual_seed(dist.get_rank() // 2)
        optimizer = adamw(model)
        for _ in range(2):
            model(torch.randn(4, 8, device=device())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([(str(p.placements), p.to_local(), p.shape) for p in model.parameters()])
    assert same(found[1], found[0]) and "_StridedShard" in str(found[1])


def states_of(model, optimizer) -> dict:
    params, states = get_state_dict(model, optimizer)
    return {"model": params, "optimizer": states}


def whole(model: nn.Module) -> list:
    return [p.full_tensor().tolist() for p in model.parameters()]


def check_save(folder: str) -> list:
    model = build(fully_shard, shard_placement_fn=placed)
    optimizer = adamw(model)
    train(model, optimizer)
    dcp.save(states_of(model, optimizer), checkpoint_id=folder)
    return whole(model)


def check_load(folder: str, choose) -> list:
    model = build(fully_shard, shard_placement_fn=choose)
    optimizer = adamw(model)
    loaded = states_of(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    assert all(moment.any() for moment in moments)
    found = whole(model)
    dcp.save(states_of(model, optimizer), checkpoint_id=folder)
    return found


def test_checkpoints_go_to_other_ranks_and_placements_and_back():
    with tempfile.TemporaryDirectory() as folder:
        saved = run(check_save, 2, folder)[0]
        for ranks, choose in ((4, None), (1, placed), (4, placed), (2, last_of)):
            assert run(check_load, ranks, folder, choose)[0] == saved


def in_torchs_record(mesh):
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("this torch has no ShardPlacementResult")
    info = common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return lambda param: common.ShardPlacementResult(placed(param), info)


@on_ranks(4)
def test_torchs_record_with_the_mesh_of_the_unit_is_what_is_in_it():
    mesh, found = init_device_mesh(device().type, (4,)), []
    for shard in (torchs_fully_shard, fully_shard):
        model = build(shard, mesh=mesh, shard_placement_fn=in_torchs_record(mesh))
        found.append([train(model, adamw(model)), all_of(model)])
    assert same(found[1], found[0])
    assert "Shard(dim=1)" in str(found[1][1])


@on_ranks(2)
def test_what_it_returns_is_looked_at():
    mistakes = {
        "uneven sharding on dim 1: parameter 'weight' has .*3, 5.*, and 2 ranks": Shard(1),
        "returns Shard.dim=2. for parameter 'weight', which has the shape .*3, 5": Shard(2),
        "Shard.dim=-3. for parameter 'weight'": Shard(-3),
        "Invalid shard_placement_fn result: Replicate.* for parameter 'weight'": Replicate(),
        "Invalid shard_placement_fn result: 1 for parameter": 1,
    }
    layer = nn.Linear(5, 3, bias=False).to(device())
    for match, found in mistakes.items():
        error = NotImplementedError if "uneven" in match else ValueError
        with pytest.raises(error, match=match):
            fully_shard(layer, shard_placement_fn=lambda param, found=found: found)
    result = type("ShardPlacementResult", (), {"placement": Shard(0), "mesh_info": None})
    with pytest.raises(
        NotImplementedError, match=r"ShardPlacementResult .* 'weight', is not there"
    ):
        fully_shard(layer, shard_placement_fn=lambda param: result())
    for given in ({}, {"mesh": init_device_mesh(device().type, (2,), mesh_dim_names=("dp",))}):
        other = init_device_mesh(device().type, (2,), mesh_dim_names=("experts",))
        with pytest.raises(NotImplementedError, match=r"unless it has the mesh .*their_mesh"):
            fully_shard(layer, shard_placement_fn=in_torchs_record(other), **given)
    asked = []
    fully_shard(layer, shard_placement_fn=asked.append)  # nothing was changed by the mistakes
    assert len(asked) == 1 and type(asked[0]) is nn.Parameter and asked[0].shape == (3, 5)
    assert isinstance(layer.weight, DTensor) and layer.weight.placements == (Shard(0),)


@on_ranks(2)
def test_ranks_that_choose_other_dimensions_are_told():
    layer = nn.Linear(4, 4).to(device())
    dim = dist.get_rank()
    fully_shard(layer, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
    with pytest.raises(ValueError, match=r"'weight' \[4, 4\], Shard\(1\)"):
        layer(torch.ones(1, 4, device=device()))
