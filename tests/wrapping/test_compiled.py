"""compiled.py: torch.compile compiles what is wrapped, and leaves the engine alone."""

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from tests.ranks import device, on_ranks
from tests.small import Block, batch, gathered_gradients, layers, stack


def counting():
    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "call" in node.op])
        return graph.forward

    return graphs, backend


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


@on_ranks(2)
def test_what_surrounds_a_wrapper_is_compiled_too():
    graphs, backend = counting()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = FSDP(layers(1), auto_wrap_policy=ModuleWrapPolicy({Block}))

        def forward(self, x):
            return self.inner(x.sin()).cos()

    model = Around().to(device())
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(batch()), model(batch()))
    targets = " ".join(target for graph in graphs for target in graph)
    assert "sin" in targets and "cos" in targets and "linear" in targets
    assert_engine_is_left_alone(graphs)
