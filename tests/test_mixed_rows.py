"""mixed_rows.py: units whose frozen parameters have dtypes of their own."""

import copy
import tempfile
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp.mixed_rows import MixedRows, rows_of
from tests.parity import mesh
from tests.ranks import device, on_ranks
from tests.small import travels
from tests.test_users_comm import all_gather

LOW, FULL, CODES = torch.bfloat16, torch.float32, torch.uint8


class Adapted(nn.Module):
    """A layer as peft adapts it: the base is frozen and low, the adapters are trained and full. A
    part of the weight is codes of one byte, as in QLoRA, and the norm stays full."""

    def __init__(self, width: int = 5, rank: int = 3, low=LOW, full=FULL) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=low)
        codes = torch.randint(256, (width, width), dtype=CODES)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.norm = nn.LayerNorm(width)
        self.requires_grad_(False)
        self.lora_a = nn.Linear(width, rank, bias=False, dtype=full)
        self.lora_b = nn.Linear(rank, width, bias=False, dtype=full)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight
        x = self.norm(x.to(self.norm.weight.dtype)).to(weight.dtype)
        decoded = (self.codes.to(weight.dtype) - 128) / 256
        # A layer saves the weight that it computes with: the parameter itself, and what is decoded.
        result = nn.functional.linear(self.base(x), decoded)
        adapters = self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype)))
        return result + adapters.to(result.dtype)


def adapted(layers: int = 3, **kinds) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(**kinds) for _ in range(layers))).to(device())


def by_fully_shard(model: nn.Module, **settings) -> nn.Module:
    for layer in model:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def in_rows(model: nn.Module, **settings) -> FSDP:
    policy = ModuleWrapPolicy({Adapted})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=True, **settings)


WAYS = {"fully_shard": by_fully_shard, "FSDP": in_rows}
by_way = pytest.mark.parametrize("way", WAYS)


def batch(step: int = 0, width: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator).to(device())


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.01), []
    for step in range(steps):
        loss = model(batch(step)).float().pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters as a plain model has them, under their names there."""
    if isinstance(model, FSDP):
        return model.state_dict()
    model = model.module if isinstance(model, DDP) else model
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    found, expected = whole(model), whole(plain)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name].to(value.device), value), name


def units(model: nn.Module) -> list:
    found = (minifsdp.wrapping.module_tree.unit_of(module) for module in model.modules())
    return [unit for unit in dict.fromkeys(found) if unit is not None and unit.numel]


def check_parity(model: nn.Module, plain: nn.Module, steps: int = 3) -> None:
    """With DistributedDataParallel, bit for bit. Nothing is left unsharded."""
    before, leaks = copy.deepcopy(plain.state_dict()), sum(unit.leaks for unit in units(model))
    for loss, other in zip(train(model, steps), train(DDP(plain), steps), strict=True):
        assert torch.equal(loss, other)
    assert leaks == sum(unit.leaks for unit in units(model)), "parameters were saved as they are"
    assert_same(model, plain)
    assert any(not torch.equal(before[name], value) for name, value in plain.state_dict().items())


# ------------------------------------------------------------------------------- the layout alone

SHAPES = [torch.Size(shape) for shape in ([3, 2], [5], [4, 3], [0, 2], [7], [1, 1])]
DTYPES = [FULL, LOW, CODES, torch.int64, torch.bool, FULL]
TRAINED = [True, False, False, False, False, True]


def tensors() -> list[Tensor]:
    found = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        found.append(torch.randint(2, shape).to(dtype))
    found[1][:] = torch.tensor([float("nan"), -0.0, 1, 2, 3])
    found[2].view(-1)[:] = torch.tensor([0, 0, 192, 255] * 3)  # NaN, as float32
    return found


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.direct
class TestDirectly:
    @pytest.mark.parametrize("ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("trained", [TRAINED, [False] * 6])
    def test_what_was_divided_is_found_again_bit_for_bit(self, trained, ranks):
        layout, given = MixedRows(SHAPES, trained, ranks, DTYPES), tensors()
        flat = layout.flatten(given)
        for view, tensor in zip(layout.unflatten(flat), given, strict=True):
            assert view.dtype is tensor.dtype and view.shape == tensor.shape
            assert bits(view) == bits(tensor)
        parts = [layout.local_tensors(layout.shard(flat, r), r) for r in range(ranks)]
        for locals_of_one, tensor in zip(zip(*parts, strict=True), given, strict=True):
            assert bits(torch.cat(locals_of_one)) == bits(tensor)
            assert [*map(len, locals_of_one)] == [*map(len, tensor.chunk(ranks))] + [0] * (
                ranks - len(tensor.chunk(ranks))
            ), "as DTensors divide it"

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_views_share_memory_and_nothing_else_refers_to_it(self, ranks):
        layout = MixedRows(SHAPES, TRAINED, ranks, DTYPES)
        flat = layout.flatten(tensors())
        trained, frozen = (part.data for part in flat.split(
            [layout.trained_numel, layout.padded_numel - layout.trained_numel]))  # fmt: skip
        count = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
        views = layout.unflatten(trained, frozen)
        others = torch._C._storage_Use_Count(flat.untyped_storage()._cdata) - count
        assert others == len(views)
        views[2].fill_(1)
        assert layout.unflatten(flat)[2].tolist() == [[1] * 3] * 4
        assert layout.unflatten(trained)[1:5] == [None] * 4, "they have no gradient"

    def test_each_parameter_costs_its_own_bytes(self):
        layout = MixedRows([torch.Size([64, 8])] * 3, [True, False, False], 2, [FULL, LOW, CODES])
        marks = layout.marks * 4
        assert sum(layout.blocks) == 32 * 8 * (4 + 2 + 1) + marks + 16
        assert layout.trained_numel == 2 * (32 * 8 + layout.marks)

    def test_what_is_cast_is_laid_anew(self):
        kept, given = MixedRows(SHAPES, TRAINED, 2, DTYPES), tensors()
        low = kept.computed_in(LOW)
        assert low.dtypes == [LOW, LOW, CODES, torch.int64, torch.bool, LOW]
        assert kept.computed_in(LOW) is low and kept.computed_in(None) is kept
        assert (low.marks, low.trained_blocks) == (kept.marks, kept.trained_blocks)
        for rank in range(2):
            shard = kept.shard(kept.flatten(given), rank)
            assert kept.cast(shard, kept, rank) is shard
            found = low.local_tensors(kept.cast(shard, low, rank), rank)
            for tensor, before in zip(found, kept.local_tensors(shard, rank), strict=True):
                assert bits(tensor) == bits(before.to(tensor.dtype))

    def test_trained_parameters_have_one_dtype(self):
        names = dict(zip("abcdef", DTYPES, strict=True))
        assert isinstance(rows_of(SHAPES, TRAINED, 2, names), MixedRows)
        assert not isinstance(rows_of(SHAPES, TRAINED, 2, dict.fromkeys("abcdef", LOW)), MixedRows)
        with pytest.raises(ValueError, match=r"same dtype.*Found .*float32: a, f; .*bfloat16: b\."):
            rows_of(SHAPES, [True, True, False, False, False, True], 2, names)


# ------------------------------------------------------------------------------------- training


@by_way
@on_ranks(2)
def test_it_is_trained_as_with_ddp(way):
    check_parity(WAYS[way](adapted()), adapted())


@on_ranks(1)
def test_on_one_rank_too():
    check_parity(by_fully_shard(adapted()), adapted())


SETTINGS = {
    "kept after forward": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_with_settings(name):
    check_parity(by_fully_shard(adapted(), **SETTINGS[name]), adapted())


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@on_ranks(2)
def test_with_replicas(sizes):
    check_parity(by_fully_shard(adapted(), mesh=mesh(sizes[0])), adapted())


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_with_strategies(strategy):
    model = in_rows(adapted(), sharding_strategy=ShardingStrategy[strategy])
    check_parity(model, adapted())


@on_ranks(4)
def test_with_four_ranks_of_which_two_share_it_after_the_forward():
    models = [by_fully_shard(adapted(), reshard_after_forward=way) for way in (True, 2)]
    models.append(by_fully_shard(adapted(), mesh=mesh(replicas=2)))
    plain = adapted()
    losses, expected = [train(model) for model in models], train(DDP(plain))
    assert losses[0] == losses[1]
    for found in losses:
        torch.testing.assert_close(found, expected)
    for found in map(whole, models):
        for name, value in whole(plain).items():
            torch.testing.assert_close(found[name], value)


@by_way
@on_ranks(2)
def test_a_model_that_is_frozen_as_a_whole(way):
    model, plain = WAYS[way](adapted().requires_grad_(False)), adapted()
    head = nn.Linear(5, 5).to(device(), LOW)
    result = head(model(batch()))
    assert torch.equal(result, head(plain(batch())))
    result.sum().backward()
    assert_same(model, plain)


# --------------------------------------------------------------------------------------- precision


class Seen(nn.Module):
    """Notes the dtypes that its parameters have in its forward."""

    def __init__(self, low, full) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dtypes = Adapted(low=low, full=full), {}

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = {name: param.dtype for name, param in self.named_parameters()}
        return self.layer(x)


POLICIES = {
    "param": MixedPrecisionPolicy(LOW),
    "param, reduce": MixedPrecisionPolicy(LOW, FULL),
    "half": MixedPrecisionPolicy(torch.float16, cast_forward_inputs=False),
    "reduce": MixedPrecisionPolicy(reduce_dtype=LOW),
}


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="torch 2.11's own fully_shard takes no integers"
)
@pytest.mark.parametrize("full, low", [(FULL, LOW), (LOW, FULL)])
@pytest.mark.parametrize("name", POLICIES)
@on_ranks(2)
def test_with_mixed_precision_as_torchs_fully_shard(name, full, low):
    """It casts what is frozen, too, unless that is integers."""
    ours = fully_shard(Seen(low, full), mp_policy=POLICIES[name])
    theirs = torchs_fully_shard(Seen(low, full), mp_policy=POLICIES[name])
    for loss, other in zip(train(ours), train(theirs), strict=True):
        assert torch.equal(loss, other)
    assert_same(ours, theirs)
    assert ours.dtypes == theirs.dtypes and ours.dtypes["layer.codes"] is CODES


@on_ranks(2)
def test_an_evaluation_in_full_precision_is_of_the_unsharded_model():
    """What is trained has the low dtype already, and what is frozen has not."""
    plain = adapted(low=FULL, full=LOW)
    with patch.dict("os.environ", {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        model = in_rows(adapted(low=FULL, full=LOW), mixed_precision=MixedPrecision(LOW))
    for _ in range(2):
        model.train()
        low = model(batch())
        with torch.no_grad():
            exact = model.eval()(batch())
        assert torch.equal(exact, plain(batch())) and not torch.equal(exact, low)
        low.sum().backward()


# ------------------------------------------------------------------------------ bytes and memory


@by_way
@on_ranks(2)
def test_bytes_that_are_sent_and_held(way):
    model = adapted(width=64)
    own = sum(param.nbytes for param in model[0].parameters())
    trained = sum(param.nbytes for param in model[0].parameters() if param.requires_grad)
    model, counts = WAYS[way](model), {"all_gather": 0, "reduce_scatter": 0}

    def counting(name):
        def change(method):
            def counted(comm, unit, tensor, *args):
                counts[name] += tensor.numel() * tensor.dtype.itemsize
                return method(comm, unit, tensor, *args)

            return counted

        return change

    with (
        travels("all_gather", counting("all_gather")),
        travels("reduce_scatter", counting("reduce_scatter")),
    ):
        model(batch(width=64)).float().sum().backward()
    unit = units(model)[0]
    rest = 2 * 4 * unit.layout.marks + 2 * 4 * 64 * 4  # rows of lora_a, of which there are three
    assert own < unit.unsharded.nbytes <= own + rest + 2 * 32
    assert unit.padded_shard.nbytes == unit.unsharded.nbytes // 2
    assert counts["all_gather"] == 3 * 2 * unit.unsharded.nbytes
    assert 3 * trained < counts["reduce_scatter"] <= 3 * (trained + rest)
    for param in model.parameters():
        assert (param.grad is not None) is param.requires_grad


@on_ranks(2)
def test_what_is_frozen_is_freed_between_forward_and_backward():
    model = by_fully_shard(adapted())
    loss = model(batch()).float().sum()
    for unit in units(model)[:3]:
        assert unit.unsharded.storage.size() == 0 and not unit.leaked
    loss.backward()
    for unit in units(model):
        assert unit.unsharded.storage.size() == 0


# --------------------------------------------------------------------------------------- refusals


@on_ranks(2)
def test_ranks_of_which_one_has_another_dtype_are_told():
    model = by_fully_shard(adapted(low=torch.float16 if dist.get_rank() else LOW))  # as many bytes
    with pytest.raises(ValueError, match=r"float16(.|\n)*bfloat16|bfloat16(.|\n)*float16"):
        model(batch())


@on_ranks(2)
def test_trained_parameters_of_two_dtypes_are_refused_by_name():
    model = adapted()
    model[1].base.bias.requires_grad_(True)
    for wrap in WAYS.values():
        with pytest.raises(ValueError, match=r"same dtype.*bfloat16: base.bias; .*: lora_a.weight"):
            wrap(copy.deepcopy(model))


@on_ranks(2)
def test_chunks_say_that_rows_do_it():
    with pytest.raises(ValueError, match=r"same dtype.*rows \(use_orig_params=True\)"):
        FSDP(adapted())


@on_ranks(2)
def test_to_thaw_a_parameter_of_another_dtype_is_refused():
    model = by_fully_shard(adapted())
    train(model, 1)
    model[1].base.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"same dtype.*bfloat16: base.bias"):
        model(batch())
    model[1].base.bias.requires_grad_(False)
    model(batch()).float().sum().backward()


# ------------------------------------------------------------------------------- between the steps


@by_way
@on_ranks(2)
def test_parameters_that_are_cast_or_frozen_later(way):
    model, plain = WAYS[way](adapted()), adapted()
    train(model, 1), train(DDP(plain), 1)
    for either in (model, plain):
        for name, param in either.named_parameters():
            if "lora_a" in name:
                param.requires_grad_(False)
    check_parity(model, plain)
    for dtype in (torch.float64, FULL):
        model.to(dtype), plain.to(dtype)
        assert all((unit.mixed is not None) for unit in units(model)), "of integers"
        check_parity(model, plain, 1)


class Casts(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x.to(layer.weight.dtype))
        return x


WHOLE = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}


@pytest.mark.parametrize(
    "shard",
    [
        partial(fully_shard, mp_policy=MixedPrecisionPolicy()),
        partial(fully_shard, mp_policy=MixedPrecisionPolicy(LOW)),
        partial(FSDP, mixed_precision=MixedPrecision(LOW), **WHOLE),
    ],
    ids=["full", "low", "low, whole"],
)
@on_ranks(2)
def test_a_unit_of_one_dtype_may_become_one_of_two(shard):
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Casts(nn.Linear(5, 5), nn.Linear(5, 5)).to(device())
        model[0].requires_grad_(False)
        return model

    early, late = make(), make()
    early[0].to(LOW)
    early, model = shard(early), shard(late)
    model(batch()).sum().backward()
    model.zero_grad()
    late[0].to(LOW)
    assert train(early) == train(model)
    assert_same(model, early)
    assert late[0].weight.dtype is LOW


@by_way
@on_ranks(2)
def test_model_and_optimizer_are_saved_and_loaded(way):
    """By torch.distributed.checkpoint, sharded; and full, into a plain model."""
    models = [WAYS[way](adapted()) for _ in range(2)]
    optimizers = []
    for number, model in enumerate(models):
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizers.append(torch.optim.AdamW(trained, lr=0.01))
        for step in range(2 - number):
            model(batch(step)).float().pow(2).sum().backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
    (first, second), (taught, fresh) = models, optimizers
    with torch.no_grad():
        for param in second.parameters():
            param.fill_(1)  # so that loading has to change what is frozen, too
    folder = shared_folder()
    saved = dict(zip(("model", "optimizer"), of_torch.get_state_dict(first, taught), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    found = dict(zip(("model", "optimizer"), of_torch.get_state_dict(second, fresh), strict=True))
    dcp.load(found, checkpoint_id=folder)
    of_torch.set_state_dict(
        second, fresh, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    assert_same(second, first)
    options = of_torch.StateDictOptions(full_state_dict=True)
    full = of_torch.get_model_state_dict(first, options=options)
    if full:  # torch gives it to the first rank only
        plain = adapted()
        assert plain.load_state_dict(full) == ([], [])
        assert full["0.base.weight"].dtype is LOW and full["0.codes"].dtype is CODES
    whole_of_all = None if way == "FSDP" else options  # a wrapper takes it without them
    of_torch.set_model_state_dict(second, adapted().state_dict(), options=whole_of_all)
    assert_same(second, adapted())
    of_torch.set_model_state_dict(second, saved["model"])
    losses = []
    for model, optimizer in zip(models, optimizers, strict=True):
        model(batch(5)).float().pow(2).sum().backward()
        optimizer.step()
        losses.append(model(batch(6)).float().pow(2).sum().detach())
    assert losses[0] == losses[1]
    assert_same(second, first)


def shared_folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2)
def test_state_dicts_of_a_wrapper(kind):
    first, second = in_rows(adapted()), in_rows(adapted())
    train(first, 1)
    with torch.no_grad():
        for param in second.parameters():
            param.fill_(1)
    with FSDP.state_dict_type(first, minifsdp.StateDictType[kind]):
        state = first.state_dict()
    with FSDP.state_dict_type(second, minifsdp.StateDictType[kind]):
        assert second.load_state_dict(state) == ([], [])
    assert_same(second, first)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for model in (first, second)
    ]
    first(batch()).float().sum().backward()
    optimizers[0].step()
    state = FSDP.optim_state_dict(first, optimizers[0])
    assert all("lora" in name for name in state["state"])
    loadable = FSDP.optim_state_dict_to_load(second, optimizers[1], state)
    optimizers[1].load_state_dict(loadable)
    again = FSDP.optim_state_dict(second, optimizers[1])
    for name, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(again["state"][name][key], value), (name, key)


@on_ranks(2)
def test_bytes_are_written_back_as_they_are():
    """As float32 four codes may be 0 and then -0, or NaN before and after."""
    model = in_rows(adapted())
    version = units(model)[0].sharded_flat_param._version
    for value in ([0, 0, 0, 0], [0, 0, 0, 128], [0, 0, 192, 127]):
        with FSDP.summon_full_params(model):
            model[0].codes.data.view(-1)[:24] = torch.tensor(value * 6, dtype=CODES)
        with FSDP.summon_full_params(model, writeback=False):
            assert model[0].codes.view(-1)[:24].tolist() == value * 6
    changed = units(model)[0].sharded_flat_param._version
    with FSDP.summon_full_params(model):
        pass
    assert version < changed == units(model)[0].sharded_flat_param._version


@on_ranks(2)
def test_summoned_gradients_are_those_of_what_is_trained():
    model, plain = in_rows(adapted()), adapted()
    ddp = DDP(plain)
    for either in (model, ddp):
        either(batch()).float().pow(2).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, param), expected in zip(
            model.module.named_parameters(), plain.parameters(), strict=True
        ):
            assert (param.grad is None) is (expected.grad is None), name
            assert param.grad is None or torch.equal(param.grad, expected.grad)
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(model.clip_grad_norm_(0.5), total)


@by_way
@on_ranks(2)
def test_gradients_that_wait(way):
    """no_sync, and the norm of torch."""
    model, plain = WAYS[way](adapted()), adapted()
    ddp = DDP(plain)
    for either in (model, ddp):
        if way == "fully_shard" and either is model:
            model.set_requires_gradient_sync(False)
            model(batch(1)).float().pow(2).sum().backward()
            model.set_requires_gradient_sync(True)
        else:
            with either.no_sync():
                either(batch(1)).float().pow(2).sum().backward()
        either(batch(2)).float().pow(2).sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("reentrant", [False, True])
@by_way
@on_ranks(2)
def test_activation_checkpointing(way, reentrant):
    class Again(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model, plain = adapted(), adapted()
    for layer in model:
        layer.__class__ = Again
    if way == "FSDP":
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Again}), use_orig_params=True)
    else:
        model = by_fully_shard(model)

    for step in range(2):
        losses = []
        for either in (model, plain):
            x = batch(step).requires_grad_()
            losses.append(either(x).float().pow(2).sum())
            losses[-1].backward()
        assert torch.equal(*losses)
    for name, value in plain.named_parameters():
        if value.grad is not None:
            dist.all_reduce(value.grad.div_(2))
            assert value.grad.abs().sum() > 0, name
    found = [param.grad for param in model.parameters() if param.grad is not None]
    expected = [param.grad for param in plain.parameters() if param.grad is not None]
    for grad, other in zip(found, expected, strict=True):
        torch.testing.assert_close(grad.full_tensor(), other)


@by_way
@on_ranks(2)
def test_after_a_failed_forward_all_is_as_before(way):
    model = WAYS[way](adapted())
    with pytest.raises(RuntimeError):
        model(batch()[:, :3])
    for unit in units(model):
        assert unit.unsharded.storage.size() == 0
    check_parity(model, adapted())


@on_ranks(2)
def test_gathered_by_hand():
    model, plain = by_fully_shard(adapted()), adapted()
    for layer, expected in zip(model, plain, strict=True):
        layer.unshard()
        for param, value in zip(layer.parameters(), expected.parameters(), strict=True):
            assert torch.equal(param, value)
        layer.reshard()
    check_parity(model, plain)


@on_ranks(2)
def test_what_modules_find_while_it_is_sharded_has_its_dtype():
    model = in_rows(adapted(), mixed_precision=MixedPrecision(LOW))
    loss = model(batch()).float().sum()
    kinds = {"codes": CODES, "norm.weight": LOW, "base.bias": LOW, "lora_a.weight": LOW}
    for name, dtype in kinds.items():
        module, _, attribute = name.rpartition(".")
        placeholder = getattr(model.module[0].get_submodule(module), attribute)
        assert placeholder.dtype is dtype and placeholder.element_size() == dtype.itemsize
    loss.backward()


@on_ranks(2)
def test_values_of_the_first_rank_are_taken():
    model, plain = adapted(), adapted()
    if dist.get_rank():
        for param in model.parameters():
            param.data.fill_(2)
    assert_same(in_rows(model, sync_module_states=True), plain)


@on_ranks(2)
def test_on_meta_until_it_has_values():
    with torch.device("meta"):
        model = nn.Sequential(*(Adapted() for _ in range(3)))
    model, plain = by_fully_shard(model), adapted()
    model.to_empty(device=device())
    of_torch.set_model_state_dict(
        model, plain.state_dict(), options=of_torch.StateDictOptions(full_state_dict=True)
    )
    assert_same(model, plain)
    check_parity(model, plain)


@on_ranks(2)
def test_the_table_has_its_dtypes_and_bytes():
    model = in_rows(adapted(), mixed_precision=MixedPrecision(LOW))
    lines = minifsdp.between_steps.explain.table(model).splitlines()
    assert "bfloat16, uint8  rows" in lines[1]
    model(batch())
    assert f"{units(model)[0].unsharded.nbytes} B" in lines[1]


@on_ranks(2)
def test_an_all_gather_of_the_program_gets_bytes():
    model, gathers = by_fully_shard(adapted()), all_gather()
    model[1].set_custom_all_gather(gathers)
    check_parity(model, adapted(), 1)
    sizes = {units(model)[1].unsharded.nbytes, units(model)[1].padded_shard.nbytes}
    assert gathers.calls and all({*sizes} == {*call[:2]} for call in gathers.calls)
