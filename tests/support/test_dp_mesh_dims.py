"""tensor_parallel.py, dp_mesh_dims: parameters that are DTensors of the whole mesh, against torch's
own ``fully_shard``."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import minifsdp
from minifsdp import fully_shard
from tests.ranks import cached_in_a_world, device, on_ranks, run

# The same ranks: how to divide an operation, torch finds out once for each of them, by trying.
pytestmark = pytest.mark.xdist_group("dtensors")

torchs = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(torchs, "DataParallelMeshDims"):
    pytest.skip("this torch has no dp_mesh_dims", allow_module_level=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Gains(nn.Module):
    """A block for meshes of three dimensions and of four. What of a matrix product is where, torch
    finds out by trying all that is possible: on four dimensions that takes a second for each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gain, self.row = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(1, 8))

    def forward(self, x):
        return torch.tanh(self.norm(x) * self.gain) * self.row


# Along these dimensions, over "tp".
CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "gain": 0, "row": 1}


@cached_in_a_world
def grid(names: tuple[str, ...], shape: tuple[int, ...]):
    return init_device_mesh(device().type, shape, mesh_dim_names=names)


def build(mesh, block=Block) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block()).to(device())
    for block in model:
        for name, param in [*block.named_parameters()]:
            placements = [Replicate() for _ in range(mesh.ndim)]
            if name in CUT and "tp" in mesh.mesh_dim_names:
                placements[mesh.mesh_dim_names.index("tp")] = Shard(CUT[name])
            module, _, attribute = name.rpartition(".")
            given = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
            setattr(block.get_submodule(module), attribute, given)
    return model


def sharded(shard, mesh, block=Block, **settings) -> nn.Sequential:
    model = build(mesh, block)
    for block in model:
        shard(block, mesh=mesh, **settings)
    return shard(model, mesh=mesh, **settings)


def train(model, mesh) -> list:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), []
    over_data = [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names]
    for step in range(3):
        torch.manual_seed(step)
        x = distribute_tensor(torch.randn(8, 8, device=device()), mesh, over_data)
        loss = model(x).square().mean().float()
        loss.backward()
        grads = [(str(p.grad.placements), p.grad.to_local()) for p in model.parameters()]
        found.append((loss.full_tensor().item(), grads))
        optimizer.step()
        optimizer.zero_grad()
    params = [(str(p.placements), p.device_mesh, p.to_local()) for p in model.parameters()]
    return [found, params, [p.full_tensor() for p in model.parameters()], [*model.state_dict()]]


def same(found, expected, exact: bool = True) -> bool:
    """Where four ranks add up, the two do it in different orders."""
    if isinstance(expected, torch.Tensor):
        equal = partial(torch.allclose, rtol=1e-5, atol=1e-6)
        return (torch.equal if exact else equal)(found, expected)
    if isinstance(expected, list | tuple):
        pairs = zip(found, expected, strict=True)
        return all(same(one, other, exact) for one, other in pairs)
    if isinstance(expected, float) and not exact:
        return math.isclose(found, expected, rel_tol=1e-6)
    return found == expected


TWO, THREE, CONTEXT = ("dp", "tp"), ("replicate", "dp", "tp"), ("dp", "cp", "tp")
MESHES = {
    "the data first": (TWO, (2, 2), {"shard": "dp"}, {}),
    "the data last": (("tp", "dp"), (2, 2), {"shard": ("dp",)}, {}),
    "replicas": (THREE, (2, 1, 2), {"shard": "dp", "replicate": "replicate"}, {}),
    "two to shard over, in replicas": (("replicate", "dp", "cp"), (2, 2, 1), {
        "shard": ("dp", "cp"), "replicate": "replicate",
    }, {}),
    "columns": (TWO, (2, 2), {"shard": "dp"}, {
        "shard_placement_fn": lambda param: Shard(1) if param.dim() == 2 else None,
    }),
    "one hybrid": (THREE, (1, 2, 2), {"shard": "dp", "replicate": "replicate"}, {}),
    "two to shard over": (CONTEXT, (2, 2, 1), {"shard": ("dp", "cp")}, {}),
    "two to shard over, cut first": (CONTEXT, (1, 2, 2), {"shard": ("dp", "cp")}, {}),
    "two of replicas": (("a", "b", "dp"), (1, 2, 2), {"shard": "dp", "replicate": ("a", "b")}, {}),
    "two of replicas, cut first": (("a", "b", "dp", "tp"), (1, 2, 1, 2), {
        "shard": "dp", "replicate": ("a", "b"),
    }, {}),
    "low": (TWO, (2, 2), {"shard": "dp"}, {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }),
}  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", MESHES)
def test_bit_equal_to_torchs(kind):
    run(check_bit_equal, 4, kind)


def check_bit_equal(kind: str) -> None:
    names, shape, dims, settings = MESHES[kind]
    as_one = hasattr(_fsdp_param.FSDPParam, "_build_spmd_sharding_spec")  # since 2.13
    if "cp" in dims["shard"] and not as_one:
        pytest.skip("this torch shows an optimizer each dimension to shard over")
    mesh = grid(names, shape)
    block, found = Gains if len(names) > 2 else Block, []
    for shard, which in ((torchs_fully_shard, torchs), (fully_shard, minifsdp)):
        chosen = which.DataParallelMeshDims(**dims)
        found.append(train(sharded(shard, mesh, block, dp_mesh_dims=chosen, **settings), mesh))
    assert same(found[1], found[0], exact=kind != "two to shard over")
    cut_first = names[-1] == "tp" and shape[-1] > 1
    assert ("_StridedShard" in str(found[1][1])) == cut_first


@on_ranks(4)
def test_replicas_alone_are_a_dimension_of_size_1_to_shard_over():
    """As the error for them says."""
    mesh = grid(TWO, (2, 2))
    alone = torchs.DataParallelMeshDims(replicate="dp")
    expected = train(sharded(torchs_fully_shard, mesh, Gains, dp_mesh_dims=alone), mesh)
    mesh = grid(("dp", "one", "tp"), (2, 1, 2))
    both = minifsdp.DataParallelMeshDims(shard="one", replicate="dp")
    found = train(sharded(fully_shard, mesh, Gains, dp_mesh_dims=both), mesh)
    assert [loss for loss, _ in found[0]] == [loss for loss, _ in expected[0]]
    assert same(found[2:], expected[2:])


@on_ranks(4)
def test_gradients_of_a_mean_over_the_whole_batch_are_those_of_a_plain_model():
    """If they are added up, as using.md says."""
    mesh, dims = grid(TWO, (2, 2)), minifsdp.DataParallelMeshDims("dp")
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block()).to(device())
    model = sharded(fully_shard, mesh, dp_mesh_dims=dims)
    for module in (model, *model):
        module.set_gradient_divide_factor(1.0)
    x = torch.randn(8, 8, device=device())
    plain(x).square().mean().backward()
    model(distribute_tensor(x, mesh, [Shard(0), Replicate()])).square().mean().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-7)


@on_ranks(4)
def test_mistakes_are_refused_by_name():
    mesh, dims = grid(TWO, (2, 2)), minifsdp.DataParallelMeshDims
    mistakes = {
        r"Mesh dim name 'data' not found in .*\('dp', 'tp'\)": {"dp_mesh_dims": dims("data")},
        r"Mesh dim name 'dp' not found in .*\(\)": {"dp_mesh_dims": dims("dp"), "mesh": None},
        r"\('tp', 'dp'\) are to be one dimension, and not side by side in \('dp', 'tp'\)": {
            "dp_mesh_dims": dims(("tp", "dp"))
        },
        r"shard=None.* is not there yet.* one\s+more dimension, of size 1": {
            "dp_mesh_dims": dims(replicate="dp")
        },
        r"Expected Replicate\(\) on DP dim 'tp' \(index 1\) of .*'up.weight', which is .*Shard": {
            "dp_mesh_dims": dims("tp")
        },
        "reshard_after_forward=.2 with dp_mesh_dims": {
            "dp_mesh_dims": dims("dp"), "reshard_after_forward": 2,
        },
        "'norm.weight' is .* on DeviceMesh": {
            "dp_mesh_dims": dims("dp"), "mesh": grid(("dp", "tp"), (4, 1)),
        },
    }  # fmt: skip
    for match, settings in mistakes.items():
        with pytest.raises((ValueError, NotImplementedError), match=match):
            fully_shard(build(mesh)[0], **{"mesh": mesh, **settings})
    with pytest.raises(ValueError, match=r"must be DTensors .*'norm.weight' is plain"):
        fully_shard(Block().to(device()), mesh=mesh, dp_mesh_dims=dims("dp"))
