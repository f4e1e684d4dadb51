"""ignored.py: what a wrapper leaves alone, and what it cannot."""

import copy
import gc
import io
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as by_fsdp2
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import distribute_tensor

from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.between_steps.explain import table
from minifsdp.wrapping.module_tree import ignored_params, is_ignored
from tests.ranks import device, on_ranks, run
from tests.small import scripted


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.adapter = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6))

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) + self.adapter(x)


class Net(nn.Module):
    """Ignored are the adapters, which are inside of units, the experts, with a buffer, and the
    scale, a parameter of the root itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.experts = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.experts(x)) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net().to(device())


def ignored_modules(model: Net) -> list[nn.Module]:
    return [model.experts, *(block.adapter for block in model.blocks)]


def ignored(model: Net) -> list[nn.Parameter]:
    return [p for module in ignored_modules(model) for p in module.parameters()]


POLICY = {"auto_wrap_policy": ModuleWrapPolicy({Block})}


def by_hand(model: Net, shard, **settings) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = shard(block, **settings)
    return shard(model, **settings)


WRAPS = {
    "modules": lambda m, s: FSDP(m, ignored_modules=ignored_modules(m), **POLICY, **s),
    "modules as states": lambda m, s: FSDP(m, ignored_states=ignored_modules(m), **POLICY, **s),
    "parameters": lambda m, s: FSDP(m, ignored_states=iter(ignored(m)), **POLICY, **s),
    "by hand": lambda m, s: by_hand(m, FSDP, ignored_modules=ignored_modules(m), **s),
    "one unit": lambda m, s: FSDP(m, ignored_modules=set(ignored_modules(m)), **s),
    "the inner ones' own": lambda m, s: FSDP(
        by_hand_inner(m, **s), ignored_modules=[m.experts], **s
    ),
    "all of a module's": lambda m, s: FSDP(m, ignored_states=[*ignored(m), m.scale], **POLICY, **s),
}


def by_hand_inner(model: Net, **settings) -> Net:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FSDP(block, ignored_modules=[block.adapter], **settings)
    return model


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 3, device=device())


def train(model: nn.Module, between=lambda: None, steps: int = 3) -> list[float]:
    """With other data on every rank."""
    # On a GPU torch has other kernels for many tensors, but not for DTensors beside others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for step in range(steps):
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reduce_all_but(model: nn.Module, left: list[nn.Parameter]) -> None:
    """What DDP does, to the other gradients."""
    for param in model.parameters():
        if not any(param is other for other in left):
            param.grad.div_(dist.get_world_size())
            dist.all_reduce(param.grad)


def expected(wrap: str = "") -> tuple[Net, list[float]]:
    plain = net()
    left = [*ignored(plain), plain.scale] if wrap == "all of a module's" else ignored(plain)
    return plain, train(plain, lambda: reduce_all_but(plain, left))


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2)
def test_trains_as_a_plain_model_whose_other_gradients_are_averaged(wrap, rows):
    plain, losses = expected(wrap)
    model = WRAPS[wrap](net(), {"use_orig_params": rows})
    assert train(model) == losses
    assert_same(model.state_dict(), plain.state_dict())
    weights = [torch.empty_like(model.experts[0].weight) for _ in range(2)]
    dist.all_gather(weights, model.experts[0].weight.detach())
    assert not torch.equal(*weights)  # each rank's own


OTHER_SETTINGS = {
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(True), "device_id": "cpu"},
    "a policy for all": {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear, nn.Sequential, Block})},
}


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("settings", OTHER_SETTINGS)
@on_ranks(2)
def test_other_settings(settings, rows):
    plain, losses = expected()
    model = net()
    given = {"ignored_modules": ignored_modules(model), "use_orig_params": rows, **POLICY}
    given |= OTHER_SETTINGS[settings]
    if settings == "offloaded":
        given["device_id"] = device()
    model = FSDP(model, **given)
    assert train(model) == losses
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_in_activation_checkpoints(rows, reentrant):
    plain, losses = expected()
    model = WRAPS["modules"](net(), {"use_orig_params": rows})
    implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    around = partial(checkpoint_wrapper, checkpoint_impl=implementation)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=around,
        check_fn=lambda module: module in (model.blocks[0].adapter, model.blocks[1]),
    )
    assert train(model) == losses
    found = {k.replace("_checkpoint_wrapped_module.", ""): v for k, v in model.state_dict().items()}
    assert_same(found, plain.state_dict())


@on_ranks(2)
def test_all_may_be_ignored():
    check_all_may_be_ignored()


@on_ranks(2, pretended_gpu=True)
def test_all_may_be_ignored_on_a_gpu():
    """What ranks compare is carried by NCCL, though no parameter says that it should be there."""
    check_all_may_be_ignored()


def check_all_may_be_ignored():
    plain = net()
    losses = train(plain)
    model = net()
    model = FSDP(model, ignored_states=model.parameters())
    assert train(model) == losses
    assert_same(model.state_dict(), plain.state_dict())


@on_ranks(2)
def test_checkpoints_have_them():
    model, other = net(), net()
    for either in (model, other):
        fully_shard(either, ignored_params={*ignored(either)})
    train(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other)]
    model(batch(0)).sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    state, optimizer_state = get_state_dict(model, optimizers[0])
    assert state.keys() == net().state_dict().keys()
    state = {name: value.clone() for name, value in state.items()}
    set_state_dict(
        other,
        optimizers[1],
        model_state_dict=state,
        optim_state_dict=copy.deepcopy(optimizer_state),
    )
    for either, optimizer in zip((model, other), optimizers, strict=True):
        either(batch(1)).sum().backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(
            getattr(mine, "_local_tensor", mine), getattr(theirs, "_local_tensor", theirs)
        )


@on_ranks(2)
def test_bit_equal_to_torchs():
    params, losses = {}, {}
    for cls in (FSDP, TorchsFSDP):
        model = net()
        settings = {"ignored_modules": ignored_modules(model), "use_orig_params": True}
        settings["device_id"] = device()
        losses[cls] = train(cls(model, **settings))
        params[cls] = {name: p.detach() for name, p in model.experts.named_parameters()}
    assert losses[FSDP] == losses[TorchsFSDP]
    assert_same(*params.values())


@on_ranks(2)
def test_fully_shard_is_bit_equal_to_torchs():
    states, losses = [], []
    for shard in (fully_shard, torchs_fully_shard):
        model = net()
        its = {*ignored(model), model.scale}
        for block in model.blocks:
            shard(block, ignored_params=its)
        losses.append(train(shard(model, ignored_params=its)))
        assert all(type(p) is nn.Parameter for p in its)
        state = model.state_dict()
        states.append(
            {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
        )
    assert losses[0] == losses[1]
    assert_same(*states)


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_they_stay_the_parameters_that_they_were(rows):
    plain = net()
    before = {name: p for name, p in plain.named_parameters() if "adapter" in name}
    optimizer = torch.optim.SGD(before.values())  # it may be built before wrapping
    model = WRAPS["modules"](plain, {"use_orig_params": rows})
    found = dict(model.named_parameters())
    assert all(found[name] is param for name, param in before.items())
    assert not any("adapter" in info.name or "experts" in info.name
                   for unit in model.engine.units for info in unit.param_infos)  # fmt: skip
    with FSDP.summon_full_params(model):
        assert list(dict(model.named_parameters())) == list(dict(net().named_parameters()))
        assert (
            dict(model.named_parameters())["blocks.0.adapter.0.weight"]
            is found["blocks.0.adapter.0.weight"]
        )
    state = {name: value + 1 for name, value in net().state_dict().items()}
    model.load_state_dict(state)
    assert_same(model.state_dict(), state)
    assert optimizer.param_groups[0]["params"][0] is found["blocks.0.adapter.0.weight"]


@on_ranks(2)
def test_a_policy_wraps_nothing_in_them_and_asks_about_nothing_in_them():
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append((module, nonwrapped_numel))
        return recurse or isinstance(module, nn.Linear)

    plain = net()
    parts = [inner for module in ignored_modules(plain) for inner in module.modules()]
    model = FSDP(plain, auto_wrap_policy=policy, ignored_modules=ignored_modules(plain))
    assert not {module for module, _ in asked} & {*parts}
    names = [unit.name for unit in model.engine.units]
    assert names == ["", "first", "blocks.0.linear", "blocks.1.linear", "head"]
    assert asked[0][1] == sum(p.numel() for p in Net().parameters()) - sum(
        map(torch.numel, ignored(plain))
    )


@on_ranks(2)
def test_sync_module_states_leaves_them_to_each_rank():
    model = net()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(dist.get_rank())
    mine = {k: v.clone() for k, v in model.experts.state_dict().items()}
    theirs = net()
    model = FSDP(model, ignored_modules=ignored_modules(model), sync_module_states=True)
    assert_same(model.experts.state_dict(), mine)
    with FSDP.summon_full_params(model):
        assert torch.equal(model.head.weight, theirs.head.weight)


@pytest.mark.parametrize("all_below", [False, True])
@on_ranks(1)
def test_they_get_no_memory_and_no_values(all_below):
    there = net()
    model = Net().to("meta")
    model.experts, kept = there.experts, copy.deepcopy(there.experts.state_dict())
    left = [model.experts, *(block.adapter for block in model.blocks)]
    model.scale = there.scale  # has no reset_parameters
    init = (lambda module: module.to_empty(device=device())) if all_below else None
    model = FSDP(model, ignored_modules=left, param_init_fn=init)
    assert_same(model.experts.state_dict(), kept)
    assert model.blocks[0].adapter[0].weight.is_meta
    assert not any(p.is_meta for p in model._unit.optimized_params)


@on_ranks(1)
def test_neither_they_nor_their_buffers_are_cast_or_moved():
    plain = net()
    plain.experts.to(torch.float64)
    plain.experts.forward = lambda x: nn.Sequential.forward(plain.experts, x.double()).bfloat16()
    low = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FSDP(plain, ignored_modules=[plain.experts], mixed_precision=low, device_id=device())
    model(batch(0)).sum().backward()
    assert {t.dtype for t in plain.experts.state_dict().values()} == {torch.float64, torch.int64}
    assert plain.experts[0].weight.grad.dtype is torch.float64
    assert is_ignored(plain.experts[1]) and not is_ignored(plain.blocks)


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_what_is_shared_with_an_ignored_module_is_ignored_everywhere(rows):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[2].weight = model[1].weight
        return model.to(device())

    torch.manual_seed(0)
    model = tied()
    plain = copy.deepcopy(model)
    losses = train(plain, lambda: reduce_all_but(plain, [*plain[2].parameters()]))
    model = FSDP(model, ignored_modules=[model[2]], use_orig_params=rows)
    assert [info.name for info in model._unit.param_infos] == ["0.weight", "0.bias", "1.bias"]
    assert train(model) == losses
    assert model[1].weight is model[2].weight


@on_ranks(1)
def test_what_cannot_be_sharded_may_be_ignored():
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(3, 3, sparse=True), nn.Linear(3, 3))
    mesh = init_device_mesh(device().type, (1,))
    model = model.to(device())
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh))
    model.append(scripted(nn.Linear(3, 3).to(device())))
    wrapped = FSDP(model, ignored_modules=[model[1], model[2], model[3]])
    assert [info.name for info in wrapped._unit.param_infos] == ["0.weight", "0.bias"]
    model[1](torch.tensor([1, 1, 2], device=device())).sum().backward()
    weight = model[2].weight
    weight.grad = distribute_tensor(torch.full((3, 3), 2.0, device=device()), mesh)
    torch.testing.assert_close(wrapped.clip_grad_norm_(1.0).cpu(), torch.tensor(51.0).sqrt())
    whole, sparse = weight.grad.to_local().cpu(), model[1].weight.grad.cpu().to_dense()
    torch.testing.assert_close(whole, torch.full((3, 3), 2 / 51**0.5))
    torch.testing.assert_close(sparse[1], torch.full((3,), 2 / 51**0.5))
    with pytest.raises(ValueError, match=r"'1' .* has sparse"):
        FSDP(copy.deepcopy(model[:2]))
    scalar = nn.Sequential(nn.Linear(3, 3))
    scalar[0].scale = nn.Parameter(torch.ones((), device=device()))
    fully_shard(scalar, ignored_params={scalar[0].scale})


@on_ranks(2)
def test_no_sync_leaves_them_as_they_are():
    plain, model = net(), WRAPS["modules"](net(), {})
    with model.no_sync():
        model(batch(0)).sum().backward()
    model(batch(1)).sum().backward()
    for step in range(2):
        plain(batch(step)).sum().backward()
    for mine, theirs in zip(ignored(model), ignored(plain), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_clipping_counts_their_gradients(rows, p):
    plain, model = net(), WRAPS["modules"](net(), {"use_orig_params": rows})
    for either in (plain, model):
        either(batch(0)).pow(2).sum().backward()
    left = ignored(model)
    own = torch.cat([param.grad.reshape(-1) for param in left])
    reduce_all_but(plain, [])  # all of them, by hand
    for param in left:
        param.grad.div_(2)
        dist.all_reduce(param.grad)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
    torch.testing.assert_close(model.clip_grad_norm_(0.1, p), expected)
    for mine, theirs in zip(left, ignored(plain), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with FSDP.summon_full_params(model, with_grads=True):
        torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
    # Where ranks have different ones, all find the same norm still, and scale alike.
    for param, grad in zip(left, own.split([param.numel() for param in left]), strict=True):
        param.grad = grad.view(param.shape) * (1 + dist.get_rank())
    norms = [torch.zeros((), device=device()) for _ in range(2)]
    dist.all_gather(norms, model.clip_grad_norm_(0.1, p))
    assert norms[0] == norms[1] > 0


@on_ranks(2)
def test_ranks_may_ignore_different_parameters():
    """Experts of other sizes, or none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)).to(device())
    if dist.get_rank():
        model[1] = nn.Identity()
    model = FSDP(model, ignored_modules=[model[1]])
    model(batch(0)).sum().backward()
    assert model.clip_grad_norm_(1.0) > 0


@on_ranks(2)
def test_explain_counts_them():
    model = WRAPS["modules"](net(), {})
    numel = sum(map(torch.numel, ignored(model)))
    (line,) = (row for row in table(model).splitlines() if row.startswith("ignored"))
    assert line.split()[1:4] == [f"{numel}", f"{numel * 4}", "B"]
    assert "ignored" not in table(FSDP(net()))


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(1)
def test_they_may_be_changed_after_wrapping(rows):
    plain = net()
    left = [*ignored(plain), plain.scale]
    model = FSDP(plain, ignored_states=left, use_orig_params=rows)
    model.scale = nn.Parameter(torch.full((1,), 2.0, device=device()))
    model.blocks[0].adapter[1].bias = nn.Parameter(torch.ones(6, device=device()))
    model(batch(0)).sum().backward()
    assert plain.scale.grad is not None and plain.scale in {*model.parameters()}
    assert is_ignored(plain.scale) and not is_ignored(plain.head.weight)
    plain.scale = None
    other = net()
    model = FSDP(other, ignored_modules=[other.experts], use_orig_params=rows)
    other.experts[0].register_parameter("more", nn.Parameter(torch.ones(2, device=device())))
    other.experts.append(nn.Linear(6, 6).to(device()))
    model(batch(0)).sum().backward()
    assert {*ignored_params(model)} == {*other.experts.parameters()}
    assert model.clip_grad_norm_(1.0) > 0
    with pytest.raises(RuntimeError, match="'head' of Net in unit <root> cannot be replaced"):
        other.head = nn.Linear(6, 2)


@on_ranks(1)
def test_a_copy_is_not_ignored():
    plain = net()
    model = FSDP(plain, ignored_modules=[plain.experts])
    file = io.BytesIO()
    torch.save(model.experts, file)
    file.seek(0)
    for other in (copy.deepcopy(model.experts), torch.load(file, weights_only=False)):
        assert not is_ignored(other[0]) and not is_ignored(other[0].weight)
        assert FSDP(nn.Sequential(other))._unit.numel == 54


MISTAKES = {
    "no list": (TypeError, r"ignored_modules takes a list of nn.Module, not Linear: put it",
                lambda m: {"ignored_modules": m.head}),
    "parameters as modules": (TypeError, r"ignored_modules takes .* there is a Parameter among 1",
                              lambda m: {"ignored_modules": [m.scale]}),
    "names": (TypeError, r"ignored_states takes a list of nn.Module or nn.Parameter, .* a str",
              lambda m: {"ignored_states": ["head"]}),
    "both kinds": (TypeError, r"ignored_states takes a list of nn.Parameter, all of one kind; the",
                   lambda m: {"ignored_states": [m.head, m.scale]}),
    "both arguments": (ValueError, "were given together",
                       lambda m: {"ignored_states": [m.scale], "ignored_modules": [m.head]}),
    "itself": (ValueError, "Net is to be wrapped and to be ignored: nothing would be sharded",
               lambda m: {"ignored_modules": [m]}),
    "a unit": (ValueError, r"module 'blocks.0' \(FullyShardedDataParallel\) cannot be ignored: it ",
               lambda m: {"ignored_modules": [m.blocks[0]]}),
    "a part of a unit": (ValueError, r"'blocks.0.linear' \(Linear\) is in unit <root> .* Ignore it",
                         lambda m: {"ignored_states": [m.blocks[0].linear]}),
    "a unit's parameter": (ValueError, "parameter 'blocks.0._flat_param' cannot be ignored: it is",
                           lambda m: {"ignored_states": [*m.blocks[0].parameters()]}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(2)
def test_mistakes_are_refused_by_name_and_change_nothing(mistake):
    error, match, arguments = MISTAKES[mistake]
    model = net()
    model.blocks[0] = FSDP(model.blocks[0])
    given = arguments(model)
    with pytest.raises(error, match=f"(?s){match}"):
        FSDP(model, **given)
    model = FSDP(model)
    assert model._unit.numel == sum(p.numel() for p in Net().parameters()) - 42 - 30


@on_ranks(1)
def test_fully_shard_takes_parameters_only():
    model = net()
    with pytest.raises(
        TypeError, match=r"ignored_params takes a list of nn.Parameter, .* a Linear"
    ):
        fully_shard(model, ignored_params={model.head})
    with pytest.raises(ValueError, match=r"'head.weight' cannot be ignored: it is sharded already"):
        fully_shard(model.head)
        fully_shard(model, ignored_params={*model.head.parameters()})


@on_ranks(1)
def test_nothing_is_marked_if_wrapping_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeError, match="was built before wrapping"):
        FSDP(model, ignored_modules=[model.experts])
    assert not is_ignored(model.experts) and not is_ignored(model.experts[0].weight)
    del optimizer
    assert FSDP(model)._unit.numel == sum(p.numel() for p in Net().parameters())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3)))
    model[1][0].weight = model[0][0].weight
    return model.to(device())


@on_ranks(1)
def test_what_another_wrapper_has_sharded_cannot_be_ignored():
    model = tied()
    kept = FSDP(model[0])  # holds the unit
    match = "'0.weight' cannot be ignored: it is sharded already as '0.weight' of unit <root>"
    with pytest.raises(ValueError, match=match):
        FSDP(model[1], ignored_states=[model[1][0].weight])
    with pytest.raises(ValueError, match=match.replace("'0", "'1.0", 1)):
        FSDP(nn.Sequential(kept, model[1]), ignored_modules=[model[1][0]])


@on_ranks(1)
def test_what_another_wrapper_ignores_cannot_be_sharded():
    model = tied()
    shared = model[0][0].weight
    one = FSDP(model[0], ignored_states=[shared])
    with pytest.raises(ValueError, match=r"'0.weight' of Sequential is ignored by the wrapper of"):
        FSDP(model[1])
    other = FSDP(model[1], ignored_states=[shared])
    outer = FSDP(nn.Sequential(one, other))  # both are below this one
    assert sum(unit.numel for unit in outer.engine.units) == 6
    plain = net()
    wrapped = FSDP(plain, ignored_modules=[plain.experts])
    with pytest.raises(ValueError, match=r"'<root>' of Sequential is ignored by the wrapper of"):
        FSDP(plain.experts)
    experts = plain.experts
    del plain, wrapped
    gc.collect()
    assert FSDP(experts)._unit.numel == 54  # nobody ignores it any more


def replicate(how: str, module: nn.Module) -> None:
    if how == "by DDP":
        by_ddp(module)
    else:
        by_fsdp2(module, mesh=init_device_mesh(device().type, (dist.get_world_size(),)))


REPLICATED = {
    "around": lambda m, shard, rep: (shard(m.blocks[0]), rep(m)),
    "below": lambda m, shard, rep: (rep(m.blocks[0]), shard(m.blocks[1]), shard(m)),
    "two levels below": lambda m, shard, rep: (
        rep(m.blocks[0].adapter), shard(m.blocks[0]), shard(m),
    ),
    "beside": lambda m, shard, rep: (rep(m.blocks[0]), shard(m.blocks[1])),
}  # fmt: skip


class Small(nn.Module):
    """All of it may be replicated."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](self.first(x))))


@pytest.mark.parametrize("place", REPLICATED)
@pytest.mark.parametrize("how", ["by DDP", "by FSDP2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_replicate_is_composed_as_with_torchs(place, how, ranks):
    run(check_replicate, ranks, place, how)


def check_replicate(place: str, how: str) -> None:
    found = []
    for shard in (torchs_fully_shard, fully_shard):
        torch.manual_seed(0)
        model = Small().to(device())
        REPLICATED[place](model, shard, partial(replicate, how))
        losses = train(model, lambda: None)
        values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        found.append((losses, [*model.state_dict()], values))
    (losses, names, values), mine = found
    assert mine[:2] == (losses, names)
    assert all(map(torch.equal, mine[2], values))


@pytest.mark.parametrize("how", ["by DDP", "by FSDP2"])
@on_ranks(2)
def test_replicate_and_shards_of_the_same_module_are_refused(how):
    again = "Cannot apply `replicate\\(\\)` on a Module already managed by `fully_shard`"
    for shard in (fully_shard, FSDP):
        model = net()
        replicate(how, model)
        with pytest.raises(
            ValueError, match=r"replicate\(\) has \w*Net already.* \(replicate, shard\)"
        ):
            shard(model)
        model = shard(net())
        for module in (model, model.experts[0]):  # the second would be a part of a unit
            match = f"{again}|replicate\\(\\) cannot wrap this: the model .* is sharded by minifsdp"
            with pytest.raises((RuntimeError, TypeError), match=match):
                replicate(how, module)


@pytest.mark.parametrize("how", ["by DDP", "by FSDP2"])
@on_ranks(2)
def test_replicate_around_and_below_wrappers(how):
    found = []
    for place in ("nowhere", "around", "below"):
        torch.manual_seed(0)
        model = Small().to(device())
        if place == "below":
            replicate(how, model.blocks[0].adapter)
        model.blocks[0] = FSDP(model.blocks[0])
        if place == "around":
            replicate(how, model)
        else:
            model = FSDP(model)
        found.append(train(model, lambda: None))
    assert found[0] == found[1] == found[2]
