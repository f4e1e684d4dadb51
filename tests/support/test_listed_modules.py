"""listed_modules.py: several modules as one unit, against DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import minifsdp
from minifsdp import FSDPModule, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.between_steps.explain import table
from minifsdp.support.listed_modules import LIST, ListedModules
from tests.ranks import device, on_ranks


class Model(nn.Module):
    """A small GPT: an embedding, blocks, a norm, and a head that may be tied to the embedding.

    Args:
        run: in which way the parts run.
    """

    def __init__(self, tied: bool = False, run: str = "as usual"):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.run = run
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words, backwards: bool = False):
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if self.run == "other order" and backwards:
            return self.norm(self.head(x) @ self.embed(words).transpose(1, 2) @ x)
        if self.run == "head twice":
            return self.head(self.norm(x)) + self.head(x)
        if self.run == "head first":
            return self.norm(self.head(x) @ x.new_ones(11, 6))
        if self.run == "norm alone":
            return self.norm(x)
        if self.run == "checkpointed":
            x = checkpoint(self.norm, x, use_reentrant=False)
            return checkpoint(self.head, x, use_reentrant=False)
        if self.run == "norm checkpointed":
            return self.head(checkpoint(self.norm, x, use_reentrant=True))
        if self.run == "checkpointed together":
            return checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=True)
        return self.head(self.norm(x))


def build(**settings) -> Model:
    torch.manual_seed(0)
    return Model(**settings).to(device())


def sharded(lists, frozen=(), shard=fully_shard, how=None, **settings) -> Model:
    model = build(**settings)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    for names in lists:
        shard([model.get_submodule(name) for name in names], **(how or {}))
    for block in model.blocks:
        if not isinstance(block, FSDPModule):
            shard(block)
    shard(model)
    return model


def train(model, steps=4, forward=None) -> list[torch.Tensor]:
    """The losses and, at the end, the gradients of the last step and the parameters."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        words = torch.randint(11, (4, 5), device=device())
        loss = (forward or type(model).__call__)(model, words).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found + [whole(p.grad) for p in params] + [whole(p.detach()) for p in params]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathers(model, forward) -> int:
    before = model._hooks.engine.stats.all_gathers
    forward()
    return model._hooks.engine.stats.all_gathers - before


LAST = ("norm", "head")
CASES = {
    "norm and head": ([LAST], {}),
    "stay after forward": ([LAST], {"how": {"reshard_after_forward": False}}),
    "tied": ([("embed", "head")], {"tied": True}),
    "all of the tied": ([("embed", "norm", "head")], {"tied": True}),
    "two lists": ([LAST, ("blocks.0", "blocks.1")], {}),
    "blocks": ([("blocks.2", "blocks.0")], {}),
    "one runs twice": ([LAST], {"run": "head twice"}),
    "one of tied runs twice": ([("embed", "head")], {"run": "head twice"}),
    "in another order": ([("head", "norm")], {}),
    "checkpointed": ([LAST], {"run": "checkpointed"}),
    "one of them checkpointed": ([LAST], {"run": "norm checkpointed"}),
    "checkpointed together": ([LAST], {"run": "checkpointed together"}),
    "twice in the list": ([("norm", "head", "norm")], {}),
    "one of them frozen": ([LAST], {"frozen": ["norm"]}),
    "all of them frozen": ([LAST, ("blocks.0", "blocks.1")], {"frozen": ["blocks.0", "blocks.1"]}),
    "a list of one": ([("head",)], {}),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_bit_equal_to_ddp(case):
    lists, settings = CASES[case]
    settings = dict(settings)
    frozen, how = settings.pop("frozen", ()), settings.pop("how", None)
    plain = build(**settings)
    for name in frozen:
        plain.get_submodule(name).requires_grad_(False)
    expected = train(DDP(plain))
    model = sharded(lists, frozen, how=how, **settings)
    found = train(model)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not any(unit.reasons for unit in model._hooks.engine.units)


class Halves(Model):
    """The body, without its head."""

    def forward(self, words, head: bool = True):
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x)) if head else self.norm(x)


def halves(step_of) -> list[torch.Tensor]:
    """Train a model of which ``step_of(model, words)`` runs a part."""
    torch.manual_seed(0)
    model = Halves().to(device())
    plain = DDP(Halves().to(device()), find_unused_parameters=True)
    plain.module.load_state_dict(model.state_dict())
    fully_shard([model.norm, model.head])
    for block in model.blocks:
        fully_shard(block)
    return train(fully_shard(model), forward=step_of), train(plain, forward=step_of)


@on_ranks(2)
def test_some_of_the_modules_run_and_others_do_not():
    found, expected = halves(lambda model, words: model(words, head=False))
    for ours, theirs in zip(found[:4], expected[:4], strict=True):
        assert torch.equal(ours, theirs)
    model = sharded([LAST], run="norm alone")
    model(torch.ones(2, 3, dtype=torch.long, device=device())).sum().backward()
    assert model.head.weight.grad is None and whole(model.norm.bias.grad).any()


@on_ranks(2)
def test_the_others_may_be_called_after_the_model_by_themselves():
    """A loss in chunks, say. torch's example for lists."""

    def in_chunks(model, words):
        hidden = model(words, head=False)
        inner = model.module if isinstance(model, DDP) else model
        return torch.stack([inner.head(chunk) for chunk in hidden.chunk(3)])

    torch.manual_seed(0)
    words = [torch.randint(11, (6, 5), device=device()) for _ in range(3)]
    reference, model = Halves().to(device()), Halves().to(device())
    model.load_state_dict(reference.state_dict())
    fully_shard([model.norm, model.head])
    fully_shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for its_words in words:  # the same on all ranks, so that one process knows what is right
        losses = [in_chunks(m, its_words).pow(2).mean() for m in (reference, model)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)


@on_ranks(2)
def test_one_gather_in_the_forward_and_one_in_the_backward():
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    for lists, tied in (([LAST], False), ([("embed", "head")], True)):
        model = sharded(lists, tied=tied)
        units = len(model._hooks.engine.units)
        assert units == 5  # the root, three blocks, the list
        for _ in range(3):
            loss = model(words).sum()
            assert gathers(model, loss.backward) == units - 1  # the root has stayed
        with torch.no_grad():
            assert gathers(model, lambda model=model: model(words)) == units


@on_ranks(2)
def test_the_unit_is_there_from_the_first_module_to_the_last():
    model = sharded([("embed", "norm")])
    unit, seen = model.embed._unit, []

    def look(*_):
        seen.append((LIST in unit.reasons, unit.unsharded.storage.nbytes() > 0))

    for module in (model.embed, model.blocks[1], model.norm, model.head):
        module.register_forward_hook(look)
    for _ in range(2):
        loss = model(torch.ones(2, 3, dtype=torch.long, device=device())).sum()
        # The reason is for the time between the two modules, in which neither of them runs.
        assert seen == [(False, True), (True, True), (True, True), (False, False)]
        seen.clear()
        loss.backward()
        assert unit.unsharded.storage.nbytes() == 0


@on_ranks(2)
def test_what_does_not_run_keeps_nothing_alive():
    model = sharded([LAST], run="norm alone")
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(words)
        assert not model.norm._unit.reasons
        assert model.norm._unit.unsharded.storage.nbytes() == 0


@on_ranks(2)
def test_a_list_begins_anew_with_each_forward():
    model = sharded([LAST], run="norm alone")
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    with torch.no_grad():
        model(words)
        model.run = "head first"
        assert gathers(model, lambda: model(words)) == 5  # one of the list


@on_ranks(2)
def test_a_forward_that_failed_leaves_no_list_open():
    model = sharded([("embed", "head")])
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(words)
        assert not model.embed._unit.reasons
    handle.remove()
    assert torch.equal(model(words), build()(words))
    handle = model.embed.register_forward_hook(lambda *_: 1 / 0)
    caught = Catches(model)
    plain = build()(words)
    fully_shard(caught)
    assert torch.equal(caught(words, handle), plain)
    assert not model.embed._unit.reasons


class Catches(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, words, handle):
        try:
            self.model.embed(words)
        except ZeroDivisionError:
            handle.remove()
        return self.model(words)


@on_ranks(2)
def test_blocks_are_prefetched_while_a_list_is_open():
    model = sharded([("embed", "head")], tied=True)
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    for _ in range(3):
        model(words).sum().backward()
    stats = model._hooks.engine.prefetcher.stats
    before = model._hooks.engine.stats.prefetches, model._hooks.engine.stats.declined_prefetches
    model(words).sum().backward()
    prefetched = model._hooks.engine.stats.prefetches - before[0]
    assert prefetched >= 6 - 2 and model._hooks.engine.stats.declined_prefetches == before[1]
    assert not any(stats.mistargets.values()), stats.mistargets
    order = model._hooks.engine.prefetcher.pre_forward_order.last
    assert len(order) == 4 and order[0] is model.embed._unit  # the list where it begins


@on_ranks(2)
def test_methods_may_be_called_on_any_of_the_modules():
    plain, model = build(), sharded([LAST])
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    model.norm.unshard()
    assert torch.equal(model.head.weight, plain.head.weight)
    model.head.unshard()  # nothing: it is there
    model.head.reshard()
    assert isinstance(model.norm.weight, DTensor) and isinstance(model.head.weight, DTensor)
    model.head.unshard()
    with torch.no_grad():
        assert torch.equal(model(words), plain(words))
    assert isinstance(model.norm.weight, DTensor)
    model.head.set_reshard_after_forward(False, recurse=False)
    assert not model.norm._unit.reshard_after_forward
    assert model.norm._unit.reshard_after_forward is model.head._unit.reshard_after_forward
    model.blocks[0].set_modules_to_forward_prefetch([model.norm, model.head])
    loss = model(words).sum()
    assert torch.equal(loss, plain(words).sum())
    loss.backward()
    model.set_requires_gradient_sync(False)
    model(words).sum().backward()
    model.set_requires_gradient_sync(True)
    model(words).sum().backward()
    plain(words).sum().mul(3).backward()
    torch.testing.assert_close(whole(model.norm.weight.grad), plain.norm.weight.grad)


@on_ranks(2)
def test_states_and_tables_have_the_unit_once():
    plain, model = build(), sharded([LAST])
    theirs = sharded([LAST], shard=torchs_fully_shard)
    state = get_model_state_dict(model)
    assert list(state) == list(plain.state_dict()) == list(get_model_state_dict(theirs))
    assert all(torch.equal(whole(state[n]), value) for n, value in plain.state_dict().items())
    assert train(model)[0] == train(theirs)[0]
    lines = table(model).splitlines()
    assert sum("norm, head" in line for line in lines) == 1
    assert model.norm._unit.name == "norm, head"
    assert (
        "unit of 78 parameters, sharded over 2 ranks, in rows, with the modules 'norm, head'"
        in (repr(model.head))
    )
    before = whole(model.head.weight)
    with minifsdp.as_dtensors(model):
        model.head.weight.data.mul_(2)
    assert torch.equal(whole(model.head.weight), before * 2)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.get_total_norm([whole(p.grad) for p in theirs.parameters()])
    assert norm.full_tensor() > 0 and expected > 0


@on_ranks(2)
def test_inside_of_a_wrapper_in_chunks():
    model = build()
    fully_shard([model.norm, model.head])
    expected, found = train(DDP(build())), train(FSDP(model))
    assert all(torch.equal(a, b) for a, b in zip(found[:4], expected[:4], strict=True))


@on_ranks(2)
def test_what_a_list_ignores_those_around_it_ignore():
    model = build()
    fully_shard([model.norm, model.head], ignored_params={model.norm.weight})
    fully_shard(model)
    assert not isinstance(model.norm.weight, DTensor) and isinstance(model.norm.bias, DTensor)
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    assert torch.equal(model(words), build()(words))


@on_ranks(2)
def test_a_list_takes_what_is_left_and_drops_what_is_inside():
    model = build()
    fully_shard(model.blocks[0])
    given = [model, model.norm, model]
    assert fully_shard(given) is given
    assert model._unit.module is model and not isinstance(model.norm, FSDPModule)
    assert model._unit.name == "" and model.blocks[0]._unit.name == "blocks.0"


@on_ranks(2)
def test_a_list_may_be_all_there_is():
    plain, model = build(), build()
    fully_shard([model.norm, model.head])
    x = torch.randn(2, 6, device=device())
    assert torch.equal(model.head(model.norm(x)), plain.head(plain.norm(x)))
    assert model.norm._unit.label == "<root>"


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def sharded_part(model):
    fully_shard([model.norm, model.blocks[0]])
    return [model.head, model.norm]


def part_of_a_unit(model):
    model.both = fully_shard(nn.Sequential(model.norm, model.head))
    return [model.norm, model.blocks[0]]


def tied_outside(model):
    model.head.weight = model.embed.weight
    fully_shard([model.norm, model.embed])
    return [model]


REFUSED = {
    "empty": (ValueError, "an empty list", lambda model: []),
    "no module": (TypeError, "not a Parameter .in a list.", lambda model: [model.norm.weight]),
    "no list": (TypeError, "not a str", lambda model: "norm"),
    "a container": (ValueError, r"'1' \(ModuleList\) has no forward", lambda m: [m.norm, m.blocks]),
    "a unit": (ValueError, r"'1' \(FSDPLayerNorm\) is a unit of FSDP already", sharded_part),
    "in a unit": (ValueError, r"'0' \(LayerNorm\) is in unit", part_of_a_unit),
    "tied": (ValueError, "'embed.weight' and 'head.weight' are .*'embed, norm'", tied_outside),
    "no rows": (
        ValueError,
        "'1.scale' has no dimension",
        lambda m: [m.norm, Scalar().to(device())],
    ),
    "dtypes": (ValueError, "1.weight", lambda model: [model.norm, model.head.double()]),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_mistakes_are_refused_and_change_nothing(case):
    kind, match, given = REFUSED[case]
    model = build()
    given = given(model)
    before = [type(module) for module in model.modules()]
    with pytest.raises(kind, match=match):
        fully_shard(given)
    assert [type(module) for module in model.modules()] == before


@on_ranks(2)
def test_modules_of_two_models_are_refused():
    first, second = build(), build()
    fully_shard([first.norm, second.norm])
    fully_shard(first)
    fully_shard(second)
    words = torch.ones(2, 3, dtype=torch.long, device=device())
    for model in (first, second):
        with pytest.raises(RuntimeError, match=r"'norm'.*number . \(FSDPLayerNorm\) is not in"):
            model(words)


@pytest.mark.direct
def test_a_list_is_an_empty_name_for_its_modules():
    norm, head = nn.LayerNorm(2), nn.Linear(2, 2)
    assert list(dict(ListedModules([norm, head]).named_modules())) == ["", "0", "1"]
