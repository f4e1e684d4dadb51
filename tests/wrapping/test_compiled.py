"""compiled.py: torch.compile compiles what is wrapped, and leaves the engine alone."""

import gc
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from tests.ranks import device, on_ranks
from tests.small import Block, batch, gathered_gradients, layers, stack


def counting():
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "call" in node.op])
        return graph.forward

    return graphs, backend


def of_the_engine():
    """Names of the engine's functions that have been compiled, but for those that call modules."""
    folder = str(Path(minifsdp.__file__).parent)
    compiled = [m for m in get_compilation_metrics() if (m.co_filename or "").startswith(folder)]
    return {metrics.co_name for metrics in compiled if not metrics.co_name.startswith("call_")}


def assert_engine_is_left_alone(graphs):
    assert not any("minifsdp" in target for graph in graphs for target in graph)
    # To switch itself off is the first that it would meet, and what it cannot compile.
    reasons = " ".join(counters["graph_break"])
    assert "FullyShardedDataParallel.forward" in reasons and "set_eval_frame" not in reasons


@on_ranks(2)
def test_a_compiled_wrapper_computes_the_same_and_its_modules_are_compiled():
    plain, (graphs, backend) = stack(3), counting()
    model = stack(3)
    compiled = torch.compile(model, backend=backend)
    for at in range(3):
        for each in (plain, compiled):
            each(batch(step=at)).pow(2).sum().backward()
    expected, found = gathered_gradients(plain), gathered_gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sum("linear" in str(graph) for graph in graphs) >= 1
    assert_engine_is_left_alone(graphs)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.sin()).cos()


@on_ranks(2)
def test_what_surrounds_a_wrapper_is_compiled_too():
    graphs, backend = counting()
    inner = FSDP(layers(1), auto_wrap_policy=ModuleWrapPolicy({Block}))
    model = Around(inner).to(device())
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(batch()), model(batch()))
    targets = " ".join(target for graph in graphs for target in graph)
    assert "sin" in targets and "cos" in targets and "linear" in targets
    assert_engine_is_left_alone(graphs)


class Tanh(Block):
    def forward(self, x):  # of its own: torch.compile calls those of torch.nn in another way
        return super().forward(x).tanh()


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *(Tanh(nn.Linear(6, 6)) for _ in range(3))).to(device())


def losses(model):
    """Of three steps."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for at in range(3):
        loss = model(batch(step=at)).pow(2).sum()
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        found.append(loss.item())
    return found


def in_chunks(model):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Tanh}))


def in_rows(model):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Tanh}), use_orig_params=True)


def without_a_wrapper(model):
    for module in reversed([*model.modules()]):
        if isinstance(module, Tanh):
            fully_shard(module)
    return fully_shard(model)


@pytest.mark.parametrize("wrap", [in_chunks, in_rows, without_a_wrapper])
@on_ranks(2)
def test_a_block_may_be_compiled_before_it_becomes_a_unit(wrap):
    (graphs, backend), plain, model = counting(), in_chunks(blocks()), blocks()
    for place, module in enumerate(model):
        if isinstance(module, Tanh):
            model[place] = torch.compile(module, backend=backend, fullgraph=True)
    model = wrap(model)
    assert losses(model) == losses(plain)
    assert sum("linear" in str(graph) for graph in graphs) >= 1


def compiled_first(model, backend):
    compiled = torch.compile(model, backend=backend)
    without_a_wrapper(model)
    return compiled


def in_place_first(model, backend):
    model.compile(backend=backend)
    return without_a_wrapper(model)


def in_place_afterwards(model, backend):
    without_a_wrapper(model).compile(backend=backend)
    return model


def sharded_from_outside(model, backend):
    return without_a_wrapper(torch.compile(model, backend=backend))


def blocks_without_a_root(model, backend):
    for place, module in enumerate(model.inner):
        if isinstance(module, Tanh):
            model.inner[place] = torch.compile(module, backend=backend, fullgraph=True)
        fully_shard(module)
    return model


WAYS = [
    compiled_first,
    in_place_first,
    in_place_afterwards,
    sharded_from_outside,
    blocks_without_a_root,
]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_model_may_be_compiled_before_or_after_it_is_sharded(way):
    (graphs, backend), plain = counting(), FSDP(Around(blocks()))
    model = way(Around(blocks()), backend)
    assert losses(model) == losses(plain)
    called = [target for graph in graphs for target in graph]
    assert any("linear" in target for target in called)
    assert not any("minifsdp" in target for target in called)
    assert not of_the_engine()


@on_ranks(2)
def test_what_was_compiled_before_runs_while_parameters_are_out():
    """It has no hooks to go through there, and would look for them for ever."""
    _, backend = counting()
    model = blocks()
    compiled = torch.compile(Around(model), backend=backend)
    without_a_wrapper(compiled._orig_mod)
    expected = compiled(batch())
    with FSDP.summon_full_params(compiled._orig_mod), torch.no_grad():
        assert torch.equal(compiled(batch()), expected)
    compiled._orig_mod.unshard()
    assert torch.equal(compiled(batch()), expected)
    expected.sum().backward()


class AsItsWeight(nn.Linear):
    """It asks for its dtype, as the models of transformers do."""

    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype))


@pytest.mark.parametrize("wrap", [in_chunks, without_a_wrapper])
@on_ranks(2)
def test_what_lists_its_parameters_is_compiled_for_itself_and_not_for_all_that_are_sharded(wrap):
    _, backend = counting()
    model = wrap(nn.Sequential(*(Tanh(AsItsWeight(6, 6)) for _ in range(2))).to(device()))
    model.compile(backend=backend)
    first = losses(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = in_chunks(blocks())
        assert losses(model) < first
        del other
        gc.collect()
        losses(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("wrap", [in_chunks, in_rows, without_a_wrapper])
@on_ranks(2)
def test_a_step_may_be_compiled_with_its_backward(wrap):
    """There Dynamo is on when autograd calls the engine. It compiled thirty of its functions, and
    could not compile one, where the size of a batch is not known."""
    (graphs, backend), plain, model = counting(), in_chunks(blocks()), wrap(blocks())

    def step(model, optimizer, x):
        loss = model(x).pow(2).sum()
        loss.backward()
        update(optimizer)
        return loss.detach()

    @torch.compiler.disable  # torch 2.11 rounds in another way where it compiles an optimizer
    def update(optimizer):
        optimizer.step(), optimizer.zero_grad()

    def losses(step, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [batch(step=at)[: 2 + at % 2] for at in range(4)]
        return [step(model, optimizer, x).item() for x in batches]

    assert losses(torch.compile(step, backend=backend), model) == losses(step, plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(model, FSDP):
        with model.no_sync():
            model(batch()).sum().backward()
        with pytest.raises(RuntimeError, match="wait to be reduced"):
            torch.compile(optimizer.step, backend=backend)()
    model(batch()).sum().backward()
    torch.compile(optimizer.step, backend=backend)()
    assert sum("linear" in str(graph) for graph in graphs) >= 1
    assert not of_the_engine()


@pytest.mark.parametrize("wrap", [in_chunks, in_rows, without_a_wrapper])
@on_ranks(2)
def test_there_may_be_more_kinds_of_units_than_dynamo_compiles_one_code(wrap):
    graphs, backend = counting()
    kinds = [type(f"Kind{at}", (Tanh,), {}) for at in range(torch._dynamo.config.recompile_limit)]
    model = nn.Sequential(*(kind(nn.Linear(6, 6)) for kind in [*kinds, Tanh])).to(device())
    model = wrap(model)
    for at in range(len(model)):
        model[at] = torch.compile(model[at], backend=backend, fullgraph=True)
    model(batch()).sum().backward()
    assert len(graphs) == len(model)
