"""fully_shard, against torch's own and against plain modules."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import FSDPModule as TorchsModule
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from minifsdp import FSDPModule, as_dtensors, fully_shard, register_fsdp_forward_method
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.between_steps.explain import table
from minifsdp.core.unit_state import ShardedState
from tests.ranks import device, on_ranks


class Block(nn.Module):
    """Its rows do not divide among two ranks."""

    def __init__(self, frozen: bool = False):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6)
        self.linear.requires_grad_(not frozen)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.out(torch.tanh(self.norm(self.linear(x))))

    def twice(self, x):
        return self(self(x))

    def half(self, x):
        return torch.tanh(self.linear(x))


def build(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), *(Block(frozen) for _ in range(3)), nn.Linear(6, 2))
    return model.to(device())


def sharded(shard=fully_shard, frozen: bool = False, root=None, **settings) -> nn.Module:
    model = build(frozen)
    for block in model[1:4]:
        shard(block, **settings)
    return shard(model, **(settings if root is None else root))


def adamw(model: nn.Module, **settings) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    biases = [param for name, param in named if name.endswith("bias")]
    others = [param for name, param in named if not name.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, **settings)


def train(model, optimizer, steps=4, clip=False, accumulate=0) -> list[float]:
    numbers = []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        for _ in range(accumulate):
            model.set_requires_gradient_sync(False)
            model(torch.randn(4, 3, device=device())).float().pow(2).mean().backward()
            model.set_requires_gradient_sync(True)
        loss = model(torch.randn(4, 3, device=device())).float().pow(2).mean()
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            numbers.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(loss.item())
    return numbers


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = {
    "full": {},
    "stays after forward": {"reshard_after_forward": False},
    "hybrid": {"mesh": (2, 1)},
    "hybrid, stays": {"mesh": (1, 2), "reshard_after_forward": False},
    "bf16": {
        "mp_policy": MixedPrecisionPolicy(**LOW),
        "root": {"mp_policy": MixedPrecisionPolicy(**LOW, output_dtype=torch.float32)},
    },
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "clipped": {"clip": True},
    "accumulated": {"accumulate": 1},
    "accumulated in fp32": {"accumulate": 2, "mp_policy": MixedPrecisionPolicy(**LOW)},
    "accumulated in bf16": {
        "accumulate": 2,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    },
    "frozen in part": {"frozen": True},
}


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_bit_equal_to_torchs(case):
    settings = dict(CASES[case])
    how = {key: settings.pop(key) for key in ("clip", "accumulate") if key in settings}
    if "mesh" in settings:
        names = ("replicate", "shard")
        settings["mesh"] = init_device_mesh(device().type, settings["mesh"], mesh_dim_names=names)
    theirs = sharded(torchs_fully_shard, **settings)
    expected = train(theirs, adamw(theirs), **how)
    ours = sharded(**settings)
    assert train(ours, adamw(ours), **how) == expected
    assert same(whole(ours), whole(theirs))


@on_ranks(2)
def test_a_module_keeps_its_names_and_is_of_a_subclass():
    plain, model = build(), sharded()
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert isinstance(model, FSDPModule) and isinstance(model, nn.Sequential)
    assert type(model[1]) is type(model[2]) and type(model[1]).__name__ == "FSDPBlock"
    assert isinstance(model[1], Block) and not isinstance(model[0], FSDPModule)
    assert "unit of 111 parameters, sharded over 2 ranks, in rows" in repr(model[1])
    assert "rows" in table(model)


@on_ranks(2)
def test_a_class_that_is_gone_is_not_remembered():
    def made() -> weakref.ref[type]:
        class Passing(nn.Linear):
            pass

        model = fully_shard(Passing(3, 3).to(device()))
        model(torch.ones(1, 3, device=device())).sum().backward()
        return weakref.ref(Passing)

    gone = [made() for _ in range(2)]
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@on_ranks(2)
def test_a_module_may_have_attributes_and_methods_of_many_names():
    class Named(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self._engine, self._output_dtype = 2.0, torch.float64

        def _choose(self, first, second):
            return first + second

        def _units(self):
            return self._choose(1, 2) * self._engine

        def _gathered(self, x):
            return super().forward(x) * self._units()

        def forward(self, x):
            return self._gathered(x).to(self._output_dtype)

    torch.manual_seed(0)
    plain, model = Named().to(device()), Named().to(device())
    model.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, device=device())
    assert torch.equal(fully_shard(model)(x), plain(x))


@pytest.mark.parametrize("name", ["_unit", "_hooks"])
@on_ranks(1)
def test_a_name_that_is_taken_is_refused_and_changes_nothing(name):
    module = build()
    setattr(module, name, nn.Identity())
    with pytest.raises(ValueError, match=rf"Sequential has an attribute '{name}' of its own"):
        fully_shard(module)
    assert type(module) is nn.Sequential and not isinstance(module[0].weight, DTensor)


@on_ranks(2)
def test_unshard_shows_whole_parameters_until_reshard_or_the_next_call():
    plain, model = build(), sharded()
    handle = model.unshard(async_op=True)
    handle.wait()
    assert torch.equal(model[0].weight, plain[0].weight)
    model.reshard()
    assert isinstance(model[0].weight, DTensor)
    for _ in range(2):
        model[1].unshard()
        assert torch.equal(model[1].linear.weight, plain[1].linear.weight)
        model(torch.randn(2, 3, device=device())).sum().backward()
        assert isinstance(model[1].linear.weight, DTensor)
    model.reshard()  # nothing to do


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_whole_parameters_may_be_seen_and_set_as_those_of_a_wrapper(wrapped):
    plain, model = build(), build()
    fully_shard([model[1], model[3].out])
    model = FSDP(model) if wrapped else fully_shard(model)
    names = dict(plain.named_parameters())
    with torch.no_grad():
        with FSDP.summon_full_params(model):
            found = dict(model.named_parameters())
            assert found.keys() == names.keys()
            assert all(torch.equal(found[name], names[name]) for name in names)
            for param in (*found.values(), *names.values()):
                param.mul_(2)
        with FSDP.summon_full_params(model[1], recurse=False, writeback=False):
            model[1].linear.weight.zero_()
        assert same(whole(model), whole(plain))
        assert isinstance(model[1].linear.weight, DTensor)
    x = torch.randn(4, 3, device=device())
    out = model(x)
    with FSDP.summon_full_params(model):  # as an error says that tells of a sharded parameter
        assert torch.equal(model[2].out.weight, plain[2].out.weight)
    assert torch.equal(out, plain(x))
    out.sum().backward()


@on_ranks(2)
def test_an_unshard_that_was_refused_can_be_asked_for_again():
    model = sharded()
    refused = pytest.raises(RuntimeError, match="unit '1' are out already, in another form")
    with as_dtensors(model), refused:
        model[1].unshard()
    model[1].unshard()
    assert not isinstance(model[1].linear.weight, DTensor)
    model[1].reshard()


def backward(model, by_hand=lambda model: None):
    """Two steps, each with ``by_hand`` between its forward and its backward."""
    optimizer = adamw(model)
    for step in range(2):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step)).to(device())
        loss = model(x).pow(2).sum()
        by_hand(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def one_unit(model):
    model[1].unshard(async_op=True).wait()
    assert model[1].linear.weight.shape == (7, 6)
    assert not isinstance(model[1].linear.weight, DTensor)


def all_of_them(model):
    model.unshard()
    for block in model[1:4]:
        block.unshard()


def and_back(model):
    one_unit(model)
    model[1].reshard()


BY_HAND = {f.__name__: f for f in (one_unit, all_of_them, and_back)}


WAYS = {
    "as it is": {},
    "kept": {"reshard_after_forward": False},
    "low": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_hand", BY_HAND)
@on_ranks(2)
def test_unshard_between_a_forward_and_its_backward_changes_nothing(by_hand, way):
    expected, model = backward(sharded(**WAYS[way])), sharded(**WAYS[way])
    found = backward(model, BY_HAND[by_hand])
    assert all(torch.equal(p, expected[name]) for name, p in found.items())
    assert model._hooks.engine.stats.unsharded_units == 0


@on_ranks(2)
def test_unshard_in_a_step_gathers_a_unit_ahead_of_its_turn():
    expected, model, seen = backward(sharded()), sharded(), []

    def ahead(target):
        def hook(*_):
            before = model[target]._unit.state.sharded
            model[target].unshard(async_op=True).wait()
            model[target].reshard()  # nothing, in a step
            seen.append((target, before, model[target]._unit.state.sharded))

        return hook

    model[0].register_forward_pre_hook(ahead(3))  # its turn is after 1 and 2
    model[3].register_full_backward_pre_hook(ahead(1))
    found = backward(model)
    assert all(torch.equal(p, expected[name]) for name, p in found.items())
    started = (ShardedState.SHARDED, ShardedState.UNSHARDING)
    assert {(3, *started), (1, *started)} <= {*seen}


@on_ranks(2)
def test_a_slice_is_a_plain_module_of_the_same_units():
    plain, model = build(), sharded()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).to(device())
    inner = plain[1](plain[0](x)).detach()
    for found, expected in ((model[1:4], plain[1:4]), (model[1:3] + model[3:4], plain[1:4])):
        assert type(found) is nn.Sequential and found[0] is model[1]
        for each, its in ((found, model), (expected, plain)):
            its.zero_grad()
            each(inner).pow(2).sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (name[0] in "04"), name
            assert q.grad is None or torch.equal(p.grad.full_tensor(), q.grad), name
    backward(model)  # and the model itself goes on
    assert type(type(model)(nn.Linear(2, 2))) is nn.Sequential


def by_name(modules):
    return nn.ModuleDict(dict(zip("ab", modules, strict=True)))


@pytest.mark.parametrize("kind", [nn.ModuleList, by_name])
@on_ranks(2)
def test_a_container_is_refused_and_what_is_in_it_is_not(kind):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).to(device()), nn.Linear(4, 4).to(device())]
    plain = copy.deepcopy(layers)
    with pytest.raises(ValueError, match=r"Module(List|Dict) has no forward.*'[0a].weight'"):
        fully_shard(kind(layers))
    for layer in layers:
        fully_shard(layer)
    for one, two in (layers, plain):
        two(one(torch.ones(2, 4, device=device()))).sum().backward()
    for layer, expected in zip(layers, plain, strict=True):
        assert torch.equal(layer.weight.grad.full_tensor(), expected.weight.grad)


@on_ranks(2)
def test_what_is_so_anyway_may_be_asked_for():
    model = sharded()
    model.set_reduce_scatter_unused_params(True, recurse=False)
    model._set_unshard_async_op(False)
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    handle.remove()
    model.reset_iter_state()
    expected = backward(sharded())
    found = backward(model)
    assert all(torch.equal(p, expected[name]) for name, p in found.items())
    with pytest.raises(NotImplementedError, match="set_reduce_scatter_unused_params='False'"):
        model.set_reduce_scatter_unused_params(False)
    with pytest.raises(NotImplementedError, match="_set_unshard_async_op=True"):
        model._set_unshard_async_op(True)


def test_every_method_of_torchs_is_there_or_refused_by_name():
    for name in vars(TorchsModule):
        assert name.startswith("_") or hasattr(FSDPModule, name), name


@on_ranks(2)
def test_inside_of_a_wrapper_in_chunks_dtensors_are_shown_between_steps():
    expected, inner = build(), build()
    fully_shard(inner[1])
    model = FSDP(inner)
    x = torch.randn(4, 3, device=device())
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert isinstance(inner[1].linear.weight, DTensor)
    model(x).sum().backward()
    assert isinstance(inner[1].linear.weight, DTensor)


@on_ranks(2)
def test_dtensors_are_on_the_mesh_that_was_given():
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("mine",))
    assert sharded(mesh=mesh)[1].linear.weight.device_mesh is mesh


@on_ranks(2)
def test_other_methods_that_are_registered_gather_too():
    plain, model = build(), sharded()
    x = torch.randn(2, 6, device=device())
    for method in ("twice", "half"):  # the second one has its parameters from nowhere else
        register_fsdp_forward_method(model[1], method)
        found, expected = getattr(model[1], method)(x), getattr(plain[1], method)(x)
        assert type(found) is torch.Tensor and torch.equal(found, expected)
    register_fsdp_forward_method(model[0], "reset_parameters")  # nothing: it is no unit
    with pytest.raises(ValueError, match="no method 'thrice'"):
        register_fsdp_forward_method(model[1], "thrice")


@on_ranks(2)
def test_reshard_after_forward_can_be_changed():
    model = sharded()
    x = torch.randn(2, 3, device=device())
    for reshards, gathers in ((False, 4), (True, 7)):
        model.set_reshard_after_forward(reshards)
        before = model._hooks.engine.stats.all_gathers
        model(x).sum().backward()
        assert model._hooks.engine.stats.all_gathers - before == gathers
    with pytest.raises(
        ValueError,
        match=r"reshard_after_forward=2: it is True or False here.* given to fully_shard",
    ):
        model.set_reshard_after_forward(2)


@pytest.mark.parametrize("shard", [fully_shard, torchs_fully_shard])
@on_ranks(2)
def test_a_state_goes_on_in_ours_and_in_torchs(shard):
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    other = sharded(shard)
    its = adamw(other)
    state = {name: value.clone() for name, value in state.items()}
    set_state_dict(
        other, its, model_state_dict=state, optim_state_dict=copy.deepcopy(optimizer_state)
    )
    assert train(other, its) == train(model, optimizer)
    assert same(whole(other), whole(model))


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}])
@on_ranks(2)
def test_torchs_grad_scaler_skips_a_step_on_all_ranks(settings):
    model = fully_shard(nn.Linear(4, 4).to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    scaler = torch.amp.GradScaler(device().type, init_scale=8.0)
    scaler.scale(model(torch.ones(2, 4, device=device())).sum()).backward()
    if dist.get_rank() == 0:
        model.weight.grad.to_local()[0] = torch.inf
    before = model.weight.to_local().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight.to_local(), before) and scaler.get_scale() == 4


@on_ranks(2)
def test_a_plain_model_loads_the_full_state():
    model = sharded()
    train(model, adamw(model))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        plain = build()
        plain.load_state_dict(state)
    assert same(whole(model), {k: v.to(device()) for k, v in state.items()}) or dist.get_rank()


@on_ranks(1)
def test_what_is_not_there_yet_is_refused_by_name():
    model = fully_shard(nn.Linear(2, 2))
    for name in (
        "set_symm_mem_for_comm",
        "set_allocate_memory_from_process_group_for_comm",
        "set_reduce_scatter_max_input_buffers",
    ):
        with pytest.raises(NotImplementedError, match=rf"minifsdp: {name} .* leave the call out"):
            getattr(model, name)(True)


@on_ranks(1)
def test_mistakes_are_refused_and_change_nothing():
    model = nn.Linear(2, 2)
    fully_shard(model)
    with pytest.raises(ValueError, match="is a unit of FSDP already"):
        fully_shard(model)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    plain = build()
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)  # it has a state from the start
    with pytest.raises(RuntimeError, match="was built before"):
        fully_shard(plain)
    assert type(plain) is nn.Sequential and not isinstance(plain[0].weight, DTensor)
    del optimizer
    mesh = init_device_mesh(device().type, (1, 1, 1))
    with pytest.raises(ValueError, match="hybrid sharding takes a pair"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    scalar = nn.ParameterList([nn.Parameter(torch.ones(()))])
    scalar.forward = lambda x: x * scalar[0]
    with pytest.raises(ValueError, match="'0' has no dimension"):
        fully_shard(scalar)


@on_ranks(2)
def test_blocks_may_be_compiled():
    expected, model = sharded(), sharded()
    for block in model[1:4]:
        block.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(model, adamw(model)) == train(expected, adamw(expected))


@on_ranks(2)
def test_what_is_compiled_around_compiles_the_modules():
    graphs = []

    def backend(graph, inputs):
        graphs.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    expected, model = sharded(), sharded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(4, 3, device=device())
        found = torch.compile(model, backend=backend)(x)
    assert torch.equal(found, expected(x))
    assert torch.tanh in graphs and nn.functional.linear in graphs


class Picks(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(1)


@on_ranks(2)
def test_each_setting_reaches_the_unit():
    low = MixedPrecisionPolicy(torch.bfloat16)
    x = torch.randn(4, 3, device=device())
    assert fully_shard(nn.Linear(3, 2).to(device()), mp_policy=low)(x).dtype is torch.bfloat16
    low = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    assert fully_shard(nn.Linear(3, 2).to(device()), mp_policy=low)(x).dtype is torch.float64
    assert fully_shard(Picks(3, 2).to(device()), mp_policy=low)(x).dtype is torch.int64
    offloaded = fully_shard(nn.Linear(3, 2).to(device()), offload_policy=CPUOffloadPolicy())
    assert offloaded._unit.offload_from is not None and offloaded.weight.device.type == "cpu"
    assert sharded()[1]._unit.reshard_after_forward
    assert not sharded(reshard_after_forward=False)[1]._unit.reshard_after_forward
