"""The program that grows (tutorials/grow.py): each step is whole, and does what its page says."""

import copy
import gc
import math
import re
from functools import partial
from types import ModuleType
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.streams import make_streams
from tests.ranks import cached_in_a_world, device, on_ranks
from tutorials import grow
from tutorials.exercises.virtual import Block as VirtualBlock
from tutorials.train_gpt import GPT, Block

LAST = grow.NAMES[-1]


def since(step: str) -> list[str]:
    """The programs from this one on."""
    return grow.NAMES[grow.NAMES.index(step) :]


# ------------------------------------------------------------------------------------ the diffs


def test_diffs_are_what_save_makes_of_what_build_has_written(tmp_path, monkeypatch):
    grow.build(tmp_path / "built")
    (tmp_path / "steps").mkdir()
    for path in grow.DIFFS:
        (tmp_path / "steps" / path.name).write_text(path.read_text())
    monkeypatch.setattr(grow, "HERE", tmp_path / "steps")
    monkeypatch.setattr(grow, "FIRST", tmp_path / "first.py")
    grow.save(tmp_path / "built")
    for path in grow.DIFFS:
        assert (tmp_path / "steps" / path.name).read_text() == path.read_text(), path.name


def test_a_change_of_the_first_program_reaches_the_last():
    source = grow.FIRST.read_text()
    changed = source.replace("used and freed right after, in the", "used and freed, in the")
    assert changed != source
    for name in grow.NAMES[1:]:
        changed = grow.applied(changed, grow.diff(name))
    assert changed == grow.text(LAST).replace("and freed right after, in the", "and freed, in the")


def test_a_hunk_that_does_not_fit_says_so():
    with pytest.raises(ValueError, match=r"(?s)fits 0 times.*import deque"):
        grow.applied("nothing of it", grow.diff("8_limiter"))
    with pytest.raises(ValueError, match="fits 2 times"):
        grow.applied("a\nb\na\nb\n", "@@ x @@\n a\n-b\n+c\n")


def test_a_page_says_to_which_exercise_a_step_is_an_answer():
    exercises = {"7_all_or_none": "grow.4", "6_reduce": "grow.3"}
    text = "\n".join(grow.on_page("20_no_sync", exercises))
    of_page = [name for name in grow.NAMES[1:] if grow.page(name) == "20_no_sync"]
    assert of_page == ["5_end_of_backward", "6_reduce", "7_all_or_none"]
    keys = re.findall(r"new lines \(an answer to (.*): try", text)
    assert keys == ["grow.3", "grow.3", "grow.4"]
    assert "answer" not in "\n".join(grow.on_page("20_no_sync", {"4_overlap": "grow.1"}))


def test_a_hunk_shows_enough_to_fit_once():
    old = "a\nb\nc\nd\n" * 2
    new = old[: len(old) // 2] + old[len(old) // 2 :].replace("c", "C")
    assert grow.applied(old, grow.between(old, new)) == new


@pytest.mark.parametrize("name", grow.NAMES[1:])
def test_a_step_is_small_and_has_a_page(name):
    assert grow.size(name) <= 33 and len(grow.diff(name).splitlines()) <= 100
    assert (grow.FIRST.parent / f"{grow.page(name)}.py").exists()
    assert grow.title(name).endswith(".")
    assert max(map(len, grow.text(name).splitlines())) <= 100


def test_most_steps_are_about_twenty_lines_and_the_last_program_is_no_longer_than_it_was():
    sizes = [grow.size(name) for name in grow.NAMES[1:]]
    assert len(sizes) == 18 and sum(sizes) / len(sizes) < 25
    assert len(grow.text(LAST).splitlines()) <= 547


# ------------------------------------------------------------------------ the numbers are DDP's


class Twice(nn.Module):
    """One layer is used twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.unused = (nn.Linear(7, n) for n in (7, 7, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(torch.tanh(self.b(torch.tanh(self.a(x))))))


class Inner(nn.Module):
    """A unit around two units, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(7, 5), nn.Linear(5, 7), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale


def gpt(tied: bool = False) -> nn.Module:
    model = GPT(layers=3, width=32)
    if tied:
        model.head.weight = model.token.weight
    return model


MODELS = {
    "GPT": (gpt, (Block,)),
    "tied": (partial(gpt, tied=True), (Block,)),
    "twice": (Twice, (nn.Linear,)),
    "nested": (lambda: nn.Sequential(nn.Linear(7, 7), Inner(), Inner()), (Inner, nn.Linear)),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0]().to(device())


def loss_of(model: nn.Module, step: int) -> Tensor:
    """On different data on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    if any(isinstance(module, Block) for module in model.modules()):
        rows = torch.randint(256, (4, 33), generator=generator).to(device())
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    return model(torch.randn(5, 7, generator=generator).to(device())).pow(2).mean()


def train(model: nn.Module, steps: int = 4) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cached_in_a_world
def trained_by_ddp(kind: str) -> tuple[list[float], dict[str, nn.Parameter]]:
    """Its losses and parameters, with which all programs are compared in all of their settings."""
    model = DDP(build(kind), find_unused_parameters=kind == "twice")
    return train(model), dict(model.module.named_parameters())


def assert_as_ddp(name: str, kind: str, exact: bool = True, **settings: Any) -> None:
    model = build(kind)
    engine = grow.load(name).fsdp(model, *MODELS[kind][1], **settings)
    losses, (expected, params) = train(model), trained_by_ddp(kind)
    found = engine.full_params()
    assert params.keys() <= found.keys()
    if exact:
        assert losses == expected
        assert all(torch.equal(found[name], param) for name, param in params.items())
    else:  # the sum of three or more, in a different order
        torch.testing.assert_close(losses, expected)
        for name, param in params.items():
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", grow.NAMES)
@on_ranks(2)
def test_trains_bit_for_bit_as_ddp(name, kind):
    assert_as_ddp(name, kind)


@pytest.mark.parametrize("name", grow.NAMES)
@on_ranks(3)
def test_with_sizes_that_three_ranks_do_not_divide(name):
    assert_as_ddp(name, "nested", exact=False)


@pytest.mark.few(4)
@pytest.mark.parametrize("limit", [1, 3, math.inf])
@pytest.mark.parametrize("name", since("8_limiter"))
@on_ranks(2)
def test_whatever_the_limit(name, limit):
    for kind in ("GPT", "nested", "twice"):
        assert_as_ddp(name, kind, limit=limit)


@pytest.mark.parametrize("limit", [1, math.inf])
@pytest.mark.parametrize("name", since("9_forward_prefetch"))
@on_ranks(2)
def test_nothing_is_prefetched_in_the_forward(name, limit):
    for kind in ("GPT", "nested", "twice"):
        assert_as_ddp(name, kind, limit=limit, forward_prefetch=False)


@pytest.mark.few(4)
@pytest.mark.parametrize("prefetch", [(True, "post"), (False, None), (False, "pre")])
@pytest.mark.parametrize("limit", [1, math.inf])
@pytest.mark.parametrize("name", since("11_backward_prefetch"))
@on_ranks(2)
def test_whatever_is_prefetched(name, limit, prefetch):
    forward, backward = prefetch
    for kind in ("GPT", "nested", "twice"):
        settings = {"forward_prefetch": forward, "backward_prefetch": backward}
        assert_as_ddp(name, kind, limit=limit, **settings)


@pytest.mark.parametrize("name", since("13_strategies"))
@on_ranks(2)
def test_units_that_stay_till_their_backward(name):
    for kind in MODELS:
        assert_as_ddp(name, kind, reshard_after_forward=False)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "where", ["around", "inside", "in a part", "around and in a part", "model"]
)
@pytest.mark.parametrize("name", since("12_checkpoints"))
@on_ranks(2)
def test_checkpoints(name, where, early_stop):
    """Without an early stop a forward that runs again comes to its end, where units are freed."""
    model, reference = build("GPT"), build("GPT")
    grow.load(name).fsdp(model, Block)
    for each in (model, reference):
        inside = {"inside": each.blocks, "model": [each]}.get(where, [])
        inside = [block.mlp for block in each.blocks] if "in a part" in where else inside
        for module in inside:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        if "around" in where:  # the call: hooks run in it as well
            each.blocks = nn.Sequential(*map(Around, each.blocks))
    with set_checkpoint_early_stop(early_stop):
        assert train(model) == train(DDP(reference))


@pytest.mark.parametrize("name", since("12_checkpoints"))
@on_ranks(2)
def test_a_checkpoint_of_what_a_units_own_parameter_is_used_in(name):
    """Views that were made without gradients would save other tensors the second time."""
    model, reference = build("nested"), build("nested")
    grow.load(name).fsdp(model, Inner)
    for each in (model, reference):
        for inner in each[1:]:
            inner.forward = partial(checkpoint, inner.forward, use_reentrant=False)
    assert train(model) == train(DDP(reference))


class Around(nn.Module):
    """Runs a block, and in the backward once more."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("name", since("14_precision"))
@on_ranks(2)
def test_low_precision_as_the_engine_has_it(name, reduce_dtype):
    model, reference = build("GPT"), build("GPT")
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    engine = grow.load(name).fsdp(model, Block, **dtypes)
    policy = {"auto_wrap_policy": ModuleWrapPolicy({Block})}
    expected = FSDP(reference, mixed_precision=MixedPrecision(**dtypes), **policy)
    assert train(model) == train(expected)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    with FSDP.summon_full_params(expected):
        names = {name.replace("_fsdp_wrapped_module.", "") for name, _ in params_of(expected)}
        found = engine.full_params()
        assert found.keys() == names
        for name, param in params_of(expected):
            path = name.replace("_fsdp_wrapped_module.", "")
            assert torch.equal(found[path], param), path


def params_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


@on_ranks(2)
def test_inputs_are_cast_with_low_precision_and_not_without_it():
    module, seen = grow.load(LAST), []
    for dtype in (torch.bfloat16, None):
        model = nn.Linear(7, 7).to(device())
        model.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
        module.fsdp(model, param_dtype=dtype)
        x = torch.randn(2, 7, device=device())
        assert model(x).dtype == (dtype or torch.float32)
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("name", since("15_hybrid"))
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2,)])
@on_ranks(2)
def test_meshes_of_two_ranks(name, shape):
    for kind in ("GPT", "nested"):
        mesh = init_device_mesh(device().type, shape)
        assert_as_ddp(name, kind, mesh=mesh)


@pytest.mark.parametrize("name", since("15_hybrid"))
@on_ranks(4)
def test_two_replicas_of_two_shards(name):
    mesh = init_device_mesh(device().type, (2, 2))
    assert_as_ddp(name, "nested", exact=False, mesh=mesh)
    model = build("nested")
    (unit, *_) = grow.load(name).fsdp(model, nn.Linear, mesh=mesh).units
    assert unit.sharded_flat_param.numel() == unit.flat_param.numel() // 2


# ------------------------------------------------------------------ when memory comes and goes


def bytes_of(units: list[Any]) -> list[int]:
    return [unit.flat_param.untyped_storage().nbytes() for unit in units]


@pytest.mark.parametrize("name", grow.NAMES)
@on_ranks(2)
def test_units_are_freed_in_time(name):
    model, seen = build("GPT"), []
    units = grow.load(name).fsdp(model, Block).units
    root, *blocks = units
    one, whole = blocks[0].flat_param.nbytes, root.flat_param.nbytes
    for block in blocks:
        block.flat_param.register_hook(lambda grad: seen.append(bytes_of(units)))
    for _ in range(2):
        loss = loss_of(model, 0)
        seen.clear()
        stays = whole if name in since("13_strategies") else 0
        assert bytes_of(units) == [stays, 0, 0, 0]  # the root's backward comes next
        loss.backward()
        # At most the one before it, which is gathered ahead, has memory as well.
        assert [sum(map(bool, memory)) for memory in seen] in ([2, 2, 2], [3, 3, 2])
        for memory, at in zip(seen, (3, 2, 1), strict=True):
            assert memory[0] == whole and memory[at] == one
        assert bytes_of(units) == [0, 0, 0, 0]
    with torch.no_grad():
        loss_of(model, 0)
    assert bytes_of(units) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", grow.NAMES)
@on_ranks(2)
def test_original_parameters_are_gone_at_once(name):
    model = build("tied")
    originals = [ref(param) for param in model.parameters()]
    gc.collect()
    gc.disable()  # which would hide a cycle: it keeps the whole model till it happens to run
    try:
        engine = grow.load(name).fsdp(model, Block)
        assert [original() for original in originals] == [None] * len(originals)
        assert engine.units
    finally:
        gc.enable()


class TwoNames(nn.Module):
    """One parameter under two names of one module, and a module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(7, 7)
        self.weight = self.again = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.weight) + self.again


@pytest.mark.parametrize("name", ["0_one_file", "17_names", LAST])
@on_ranks(2)
def test_a_parameter_with_two_names(name):
    torch.manual_seed(0)
    model = TwoNames().to(device())
    reference = DDP(copy.deepcopy(model))
    engine = grow.load(name).fsdp(model, nn.Linear)
    assert train(model) == train(reference)
    assert engine.full_params().keys() >= {"weight", "again", "a.weight", "a.bias"}


@pytest.mark.parametrize("name", grow.NAMES)
@on_ranks(2)
def test_two_backwards_add_up(name):
    model = build("GPT")
    grow.load(name).fsdp(model, Block)
    alone = []
    for step in range(2):
        loss_of(model, step).backward()
        alone.append([local(param.grad).clone() for param in model.parameters()])
        model.zero_grad()
    for step in range(2):
        loss_of(model, step).backward()
    for param, first, second in zip(model.parameters(), *alone, strict=True):
        assert torch.equal(local(param.grad), first + second)
    assert any(first.any() for first in alone[0])


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", since("7_all_or_none"))
@on_ranks(2)
def test_a_step_that_fails_changes_nothing(name, where):
    model, reference = build("GPT"), DDP(build("GPT"))
    units = grow.load(name).fsdp(model, Block).units
    loss_of(model, 0).backward()  # there are gradients already
    loss_of(reference, 0).backward()
    before = [local(param.grad).clone() for param in model.parameters()]

    def fail(*_: object) -> None:
        raise OSError("on purpose")

    part = model.blocks[1]
    if where == "forward":
        hook = part.mlp.register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="on purpose"):
            loss_of(model, 1)
    else:
        hook = part.register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        loss = loss_of(model, 1)
        with pytest.raises(OSError, match="on purpose"):
            loss.backward()
    hook.remove()
    after = [local(param.grad) for param in model.parameters()]
    assert all(map(torch.equal, after, before))
    loss = loss_of(model, 2)
    assert not any(bytes_of(units)[1:])
    loss.backward()
    expected = loss_of(reference, 2)
    expected.backward()
    assert loss.item() == expected.item()
    assert not any(bytes_of(units))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for optimizer in optimizers:
        optimizer.step()
    assert loss_of(model, 3).item() == loss_of(reference, 3).item()


@on_ranks(2)
def test_a_frozen_parameter_is_refused_where_one_flat_tensor_is_trained():
    for name in grow.NAMES[: grow.NAMES.index("17_names")]:
        model = nn.Linear(7, 7)
        model.bias.requires_grad_(False)
        with pytest.raises(AssertionError, match="trained as a whole"):
            grow.load(name).fsdp(model)


# ----------------------------------------------------------------------------------------- rows


@on_ranks(2)
def test_a_shard_is_this_ranks_rows_of_each_parameter():
    model = build("nested")
    plain = [param.detach() for param in copy.deepcopy(model[1].a).parameters()]
    (unit,) = [
        unit
        for unit in grow.load("16_rows").fsdp(model, nn.Linear).units
        if unit.module is model[1].a
    ]
    rows = [-(-len(param) // 2) for param in plain]  # of each rank
    shard = unit.sharded_flat_param.detach().split(
        [n * param[0].numel() for n, param in zip(rows, plain, strict=True)]
    )
    for piece, n, param in zip(shard, rows, plain, strict=True):
        mine = param[n * dist.get_rank() :][:n].flatten()
        assert torch.equal(piece[: mine.numel()], mine)
        assert not piece[mine.numel() :].any()


@pytest.mark.parametrize("program", since("17_names"))
@on_ranks(2)
def test_parameters_keep_their_names_and_shapes(program):
    model = build("nested")
    model[1].a.weight.requires_grad_(False)
    plain = dict(copy.deepcopy(model).named_parameters())
    engine = grow.load(program).fsdp(model, Inner, nn.Linear)
    rank = dist.get_rank()
    assert {name for name, _ in model.named_parameters()} == plain.keys()
    for name, param in model.named_parameters():
        expected = plain[name].detach().reshape(plain[name].shape or (1,))
        assert isinstance(param, nn.Parameter)
        assert param.requires_grad == plain[name].requires_grad
        rows = expected.chunk(2)[rank : rank + 1]
        assert torch.equal(local(param.detach()), rows[0] if rows else expected[:0]), name
        if program in since("18_dtensors"):
            assert isinstance(param.data, DTensor), name
            assert param.shape == expected.shape and param.placements == (Shard(0),)
            assert torch.equal(param.full_tensor(), expected)
    assert train(model) == train(DDP(rebuilt()))
    assert torch.equal(engine.full_params()["1.a.weight"], plain["1.a.weight"])


def rebuilt() -> nn.Module:
    model = build("nested")
    model[1].a.weight.requires_grad_(False)
    return model


@on_ranks(2)
def test_the_norm_of_all_gradients_is_that_of_ddp():
    model, reference = build("GPT"), DDP(build("GPT"))
    grow.load(LAST).fsdp(model, Block)
    for each in (model, reference):
        loss_of(each, 0).backward()
    norm, expected = (
        nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, reference)
    )
    torch.testing.assert_close(norm.full_tensor(), expected)


# -------------------------------------------------------------------------- on the virtual GPU


def on_virtual(
    module: ModuleType, steps: int = 4, layers: int = 8, **settings: Any
) -> tuple[VirtualGpu, Any]:
    with cluster("a100-40", nodes=2, gpus_per_node=8) as gpu:
        layered = [VirtualBlock(1024) for _ in range(layers)]
        model = nn.Sequential(nn.Linear(1024, 1024), *layered)
        module.Streams = partial(make_streams, gpu)
        engine = module.fsdp(model, VirtualBlock, **settings)
        step_on(gpu, model, steps)
    return gpu, engine


def step_on(gpu: VirtualGpu, model: nn.Module, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.empty(4096, 1024)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gpu.step()


def figure(name: str, key: str, **settings: Any) -> float:
    value: float = on_virtual(grow.load(name), **settings)[0].report()[key]
    return value


@pytest.mark.parametrize("name", grow.NAMES)
def test_no_wait_is_missing(name):
    assert on_virtual(grow.load(name))[0].races() == []


WAITS = {  # lines, and what stands in their place
    "        unit.wait_for_unshard()\n        unit.show_views()\n": "        unit.show_views()\n",
    "        self.streams.unshard.wait_event(self.streams.compute.record_event())\n": "",
    "        streams.reduce.wait_event(streams.compute.record_event())\n": "",
    "        self.streams.compute.record_stream(self.flat_param.data)\n": "",
    "        self.event.wait()\n        self.sent = None\n": "        self.sent = None\n",
}


@pytest.mark.parametrize("line", WAITS)
def test_each_wait_is_needed(line):
    source, module = grow.text("11_backward_prefetch"), ModuleType("without")
    assert source.count(line) >= 1
    exec(source.replace(line, WAITS[line]), vars(module))
    assert on_virtual(module)[0].races() != []


def test_a_gather_that_waits_for_nothing_sends_what_the_optimizer_has_still_to_write():
    line = "        self.streams.unshard.wait_event(self.streams.compute.record_event())\n"
    source, module = grow.text("3_gather"), ModuleType("without")
    assert source.count(line) == 1
    exec(source.replace(line, ""), vars(module))
    assert on_virtual(module)[0].races() != []


@pytest.mark.slow
def test_what_each_step_is_for():
    assert figure("3_gather", "step") == figure("2_cuda", "step") == figure("0_one_file", "step")
    assert figure("4_overlap", "step") < 0.98 * figure("3_gather", "step")
    assert figure("3_gather", "peak unsharded units") <= 2
    assert figure("4_overlap", "peak unsharded units") > 8  # the host runs ahead
    assert figure("8_limiter", "peak unsharded units") <= 3  # two, and the root around them
    assert figure("8_limiter", "peak reserved") < 0.6 * figure("7_all_or_none", "peak reserved")
    unlimited = figure("8_limiter", "peak reserved", limit=math.inf)
    assert unlimited == figure("7_all_or_none", "peak reserved")
    for name in since("9_forward_prefetch"):
        assert figure(name, "peak unsharded units", limit=1) <= 2, name  # one, and the root
    # NCCL does one thing at a time. So without prefetching the next gather waits for the reduction
    # and the computation for that gather, and nothing is gained before step 11.
    assert figure("6_reduce", "step") < figure("5_end_of_backward", "step")
    assert figure("11_backward_prefetch", "step") < 0.98 * figure("10_order", "step")
    at_once, module = "reduce.submit(self.launch)\n", ModuleType("waits at once")
    source = grow.text("11_backward_prefetch")
    assert at_once in source
    exec(source.replace(at_once, f"{at_once}        self.event.wait()\n"), vars(module))
    waits = on_virtual(module)[0].report()["step"]
    assert figure("11_backward_prefetch", "step") < 0.98 * waits


def gathers(name: str, **settings: Any) -> list[str]:
    """The units of the last of four steps, in the order of their gathers."""
    module, order = grow.load(name), []
    unshard = module.Unit.unshard
    module.Unit.unshard = lambda unit: (order.append(unit), unshard(unit))[1]
    _, engine = on_virtual(module, layers=3, **settings)
    names = {unit: str(at) for at, unit in enumerate(engine.units)}
    return [names[unit] for unit in order[len(order) // 4 * 3 :]]


def test_the_order_of_gathers():
    forward, backward = ["0", "1", "2", "3"], ["3", "2", "1"]
    # The last block's output is the root's, and the block's hook is the older one.
    with_root = ["3", "0", "2", "1"]
    assert gathers("8_limiter") == [*forward, *with_root]
    for ways in ({}, {"forward_prefetch": False}):
        for name in ("9_forward_prefetch", "10_order"):
            assert gathers(name, **ways) == [*forward, *with_root]
    for ways in ({}, {"forward_prefetch": False}, {"backward_prefetch": "post"}):
        for name in ("11_backward_prefetch", "12_checkpoints"):
            assert gathers(name, **ways) == [*forward, *with_root]
        assert gathers("13_strategies", **ways) == [*forward, *backward]
    assert gathers("13_strategies", reshard_after_forward=False) == forward


class Reversed(nn.Sequential):
    """It uses its modules in the reverse of the order in which they were made."""

    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(self):
            x = module(x)
        return x


def test_the_next_unit_is_the_one_that_the_last_forward_had_next():
    found = {name: backwards(name) for name in since("8_limiter")}
    assert found["8_limiter"] == [3, 2, 1, 0, 0, 1, 2, 3]
    assert found["9_forward_prefetch"] != found["8_limiter"]  # some were gathered in vain
    assert all(found[name] == found["8_limiter"] for name in since("10_order"))


def backwards(name: str) -> list[int]:
    """The gathers in the last of four steps of a model that is Reversed, by their units."""
    module, order = grow.load(name), []
    unshard = module.Unit.unshard
    module.Unit.unshard = lambda unit: (order.append(unit), unshard(unit))[1]
    with cluster("a100-40", nodes=2, gpus_per_node=8) as gpu:
        model = Reversed(*(VirtualBlock(1024) for _ in range(4)))
        module.Streams = partial(make_streams, gpu)
        units = module.fsdp(model, VirtualBlock).units
        step_on(gpu, model, 3)
        order.clear()
        step_on(gpu, model, 1)
    return [units.index(unit) for unit in order]


def test_the_last_one_takes_as_long_as_the_core_and_needs_no_more_memory():
    from minifsdp import core

    with cluster("a100-40", nodes=2, gpus_per_node=8) as gpu:
        model = nn.Sequential(nn.Linear(1024, 1024), *(VirtualBlock(1024) for _ in range(8)))
        policy = core.ModuleWrapPolicy({VirtualBlock})
        settings = {"forward_prefetch": True, "limit_all_gathers": 2}  # as in the program
        model = core.FullyShardedDataParallel(model, auto_wrap_policy=policy, **settings)
        step_on(gpu, model)
    expected = gpu.report()
    for name in since("13_strategies"):
        assert figure(name, "step") <= 1.03 * expected["step"], name
    assert figure("15_hybrid", "peak allocated") <= 1.02 * expected["peak allocated"]
