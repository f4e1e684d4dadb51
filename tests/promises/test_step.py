"""Promises inside the step: what a module may do in its forward, and a loss with its outputs."""

import warnings
from collections import deque
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from minifsdp import ShardingStrategy
from tests.promises import Averaged, Block, batch, fsdp, same, seeded, train
from tests.ranks import device, on_ranks

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


def square(model, x):
    return model(x).pow(2).sum()


class Chain(nn.Module):
    """Blocks one after the other. What they keep on the side is added to the loss."""

    def __init__(self, kind, blocks=3):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# ------------------------------------------------------------------ views that are changed in place


class Reshaped(Block):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(x)).reshape(3, 2, 3).flatten(1)


class Transposed(Block):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(x).t()).transpose(0, 1)


class Attention(Block):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        y = x.unsqueeze(0)
        return self.attention(y, y, y, need_weights=False)[0].squeeze(0)


class Recomputes(Reshaped):
    def forward(self, x):
        return (
            checkpoint(self.layer, torch.tanh(x), use_reentrant=False).reshape(3, 2, 3).flatten(1)
        )


def added_in_place(kind):
    class Residual(Chain):
        def forward(self, x):
            for block in self.blocks:
                y = block(x)
                y += x
                x = y
            return self.last(x)

    return lambda wrap: train(wrap(Residual(kind)), square)


def written_to_a_part(wrap):
    class Masked(Chain):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                x[:, :2] = 0
                x[0].mul_(2)
            return self.last(x)

    return train(wrap(Masked(Reshaped)), square)


# --------------------------------------------------- modules that read their own parameters


class Penalized(Block):
    """Keeps the norm of what it has, as weight decay in the loss does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        assert next(self.parameters()).dtype is x.dtype
        assert {n for n, _ in self.named_parameters()} == {"layer.weight", "layer.bias"}
        self.aux = sum(p.pow(2).sum() for p in self.parameters())
        return torch.tanh(self.layer(x))


def a_penalty_in_units(wrap):
    def loss(model, x):
        out = model(x).sum()
        return 0.1 * sum(m.aux for m in model.modules() if isinstance(m, Penalized)) + out

    return train(wrap(Chain(Penalized)), loss)


def a_penalty_in_the_root(wrap):
    class Root(Chain):
        def forward(self, x):
            return super().forward(x) + 0.01 * sum(p.pow(2).sum() for p in self.first.parameters())

    return train(wrap(Root(Reshaped)), square)


def recurrent(wrap):
    class Recurrent(Block):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(6, 6, num_layers=2)

        def forward(self, x):
            return self.rnn(x)[0] + sum(p.mean() for p in self.rnn.parameters())

    return train(wrap(Chain(Recurrent, 2)), square)


# ------------------------------------------------------ what leaves a unit by other ways


class Aside(Block):
    """Keeps an activation in an attribute."""

    def __init__(self):
        super().__init__()
        self.router, self.layer = nn.Linear(6, 3), nn.Linear(6, 6)

    def forward(self, x):
        self.aux = self.router(x).softmax(-1).pow(2).sum()
        return self.layer(x)


class Inner(nn.Module):
    """A part of a block. What it keeps depends on its parameters in several ways."""

    lists = True  # its parameters, which is another way to ask for them

    def __init__(self):
        super().__init__()
        self.router, self.layer = nn.GRUCell(6, 3), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x):
        dtype = next(self.parameters()).dtype if self.lists else x.dtype
        self.aux = self.router((self.scale * x).to(dtype)).softmax(-1).pow(2).sum()
        self.aux = self.aux + 0.1 * self.layer.weight.t().pow(2).sum() + (-self.scale).exp().sum()
        return self.layer(x)


class RecomputesInner(Block):
    """Runs a part of itself in a checkpoint, in which autograd saves nothing that is a unit's."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class RecomputesUnlisted(RecomputesInner):
    """The same, but it asks for its parameters one by one only."""

    def __init__(self):
        super().__init__()
        self.inner.lists = False


def auxiliary(order, kind=Aside):
    def loss(model, x):
        main = model(x).pow(2).sum()
        aux = sum(m.aux for m in model.modules() if isinstance(m, (Aside, Inner)))
        return {"before": aux + main, "after": main + aux, "alone": aux}[order]

    return lambda wrap: train(wrap(Chain(kind)), loss)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Holder(nn.Module):
    value = None


def holding(value):
    holder = Holder()
    holder.value = value
    return holder


WAYS = {
    "slots": (Slotted, lambda o: o.value),
    "deque": (lambda t: deque([t]), lambda o: o[0]),
    "generator": (lambda t: (u for u in [t]), next),
    "closure": (lambda t: lambda: t, lambda o: o()),
    "partial": (lambda t: partial(torch.mul, t), lambda o: o(1.0)),
    "dict values": (lambda t: {"a": t}.values(), lambda o: next(iter(o))),
    "iterator": (lambda t: iter([t]), next),
    "module": (holding, lambda o: o.value),
    "map": (lambda t: map(lambda u: u * 1, [t]), next),
}


def returned_in(way):
    put, take = WAYS[way]

    class Odd(Block):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return put(torch.tanh(self.layer(x)))

    class Model(Chain):
        def forward(self, x):
            for block in self.blocks:
                x = take(block(x))
            return put(self.last(x))

    return lambda wrap: train(wrap(Model(Odd)), lambda model, x: take(model(x)).pow(2).sum())


class Tied(Block):
    """Hands on its weight, for a head that has none of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        self.__dict__["kept"] = self.layer.weight  # an attribute, no second name for it
        return self.layer(x), self.layer.weight, self.layer.weight.detach()


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.between = Tied(), Reshaped()

    def forward(self, x):
        x, weight, detached = self.body(x)
        return F.linear(self.between(x), weight) + detached.sum() + self.body.kept.mean()


def parameters_that_leave_their_unit(wrap):
    return train(wrap(TiedModel()), square)


def parameters_that_leave_without_gradient(wrap):
    model = wrap(TiedModel())
    with torch.no_grad():
        out = model(batch(3, 6))
        _, weight, detached = model.module.body(batch(3, 6))
    # DDP's weight is changed by the steps to come; a shard's memory is not what has left it.
    looked_at = out, weight.clone(), detached.clone(), weight @ weight.t()
    return looked_at, train(model, square)


class Skips(Block):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, skips):
        y = torch.tanh(self.layer(x))
        return y, [*skips, y]


class SkipModel(Chain):
    def forward(self, x):
        skips = [self.first(x)]
        for block in self.blocks:
            x, skips = block(x, skips)
        return self.last(sum(skips))


def skip_connections(wrap):
    return train(wrap(SkipModel(Skips)), square)


# ------------------------------------------------- sparse tensors, which have no storage


def graph_convolutions(layout):
    class Graph(Block):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("edges", torch.eye(3).roll(1, 0).to_sparse(layout=layout))

        def forward(self, x):
            return x + torch.sparse.mm(self.edges, torch.tanh(self.layer(x)))

    return lambda wrap: train(wrap(Chain(Graph)), square)


def a_weight_that_is_made_sparse(wrap):
    class Pruned(Block):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return torch.sparse.mm(self.weight.relu().to_sparse(), torch.tanh(x).t()).t()

    return train(wrap(Chain(Pruned)), square)


# --------------------------------------------------------------- gradients within a forward


def forces(wrap):
    class Energy(Block):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return torch.tanh(self.layer(x))

    class Forces(Chain):
        def forward(self, x):
            x = x.requires_grad_()
            energy = super().forward(x).pow(2).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return torch.cat([self.last(force), force])

    return train(wrap(Forces(Energy)), square)


def gradients_of_inputs_of_a_frozen_model(wrap):
    model = Chain(Reshaped)
    trained = nn.Parameter(torch.ones(6, device=device()))
    for param in model.parameters():
        param.requires_grad_(False)
    model = wrap(model)
    found = []
    for step in range(4):
        x = batch(3, 6, step=step).requires_grad_()
        found.append(torch.autograd.grad(model(x * trained).pow(2).sum(), [x, trained]))
    return found


def gradients_of_leaves_of_a_frozen_model(wrap):
    class Guided(Chain):
        def forward(self, x, y=0):
            return super().forward(x + y)

    model, found = wrap(Guided(Reshaped).requires_grad_(False)), []
    for step in range(4):
        x, y = (batch(3, 6, step=step + 10 * n).requires_grad_() for n in range(2))
        found.append(torch.autograd.grad(square(model, x), x))
        found.append(torch.autograd.grad(model(x, y).pow(2).sum(), [x, y]))
        found.append(torch.autograd.grad(model(x, y).pow(2).sum(), y))
    return found


def second_derivatives(wrap):
    model = wrap(Chain(Reshaped))
    return [
        torch.autograd.functional.hessian(lambda x: square(model, x), batch(3, 6, step=step))
        for step in range(4)
    ]


def a_graph_that_is_used_twice(wrap):
    def loss(model, x):
        total = square(model, x)
        total.backward(retain_graph=True)
        return total

    return train(wrap(Chain(Aside)), loss)


def several_forwards(chosen=lambda n: True):
    """One backward through those that are chosen: contrastive training, D(real) + D(fake)."""

    def loss(model, x):
        losses = [square(model, x + n) for n in range(3)]
        return sum(loss for n, loss in enumerate(losses) if chosen(n))

    return lambda wrap: train(wrap(Chain(Reshaped)), loss)


# ------------------------------------------------------------------------------ checkpoints


class Reentrant(Block):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.rand(6))
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.norm(x) * self.scale
        x = checkpoint(self.one, x, use_reentrant=True)
        return checkpoint(self.two, torch.tanh(x), use_reentrant=True) * self.scale


def reentrant_checkpoints_in_a_unit(wrap):
    return train(wrap(Chain(Reentrant)), square)


def a_checkpoint_around_units(reentrant):
    class Model(Chain):
        def forward(self, x):
            def body(x):
                for block in self.blocks:
                    x = block(x)
                return x

            return self.last(checkpoint(body, self.first(x), use_reentrant=reentrant))

    return lambda wrap: train(wrap(Model(Aside)), square)


def activations_on_the_host(wrap):
    def loss(model, x):
        with torch.autograd.graph.save_on_cpu():
            return square(model, x)

    return train(wrap(Chain(Aside)), loss)


# ---------------------------------------------------------------------------------- the table

RIGHT = {
    "a reshaped output, changed in place": added_in_place(Reshaped),
    "a transposed output, changed in place": added_in_place(Transposed),
    "the output of attention, changed in place": added_in_place(Attention),
    "a recomputed output, changed in place": added_in_place(Recomputes),
    "a part of an output, overwritten": written_to_a_part,
    "a penalty on a unit's parameters": a_penalty_in_units,
    "a penalty on the root's parameters": a_penalty_in_the_root,
    "an LSTM that lists its parameters": recurrent,
    **{f"a loss in an attribute, {how}": auxiliary(how) for how in ("before", "after", "alone")},
    "a recomputed loss in an attribute, before": auxiliary("before", RecomputesInner),
    "a recomputed loss in an attribute, alone": auxiliary("alone", RecomputesInner),
    "a recomputed loss of parameters, before": auxiliary("before", RecomputesUnlisted),
    "a recomputed loss of parameters, alone": auxiliary("alone", RecomputesUnlisted),
    **{f"outputs in a {way}": returned_in(way) for way in WAYS},
    "parameters that leave their unit": parameters_that_leave_their_unit,
    "parameters that leave without gradient": parameters_that_leave_without_gradient,
    "skip connections": skip_connections,
    "graph convolutions": graph_convolutions(torch.sparse_coo),
    "graph convolutions, by compressed rows": graph_convolutions(torch.sparse_csr),
    "a weight that is made sparse": a_weight_that_is_made_sparse,
    "forces": forces,
    "gradients of the inputs of a frozen model": gradients_of_inputs_of_a_frozen_model,
    "gradients of leaves of a frozen model": gradients_of_leaves_of_a_frozen_model,
    "second derivatives": second_derivatives,
    "a graph that is used twice": a_graph_that_is_used_twice,
    "several forwards": several_forwards(),
    "a loss of one of them": several_forwards(lambda n: n == 1),
    "a loss of others on each rank": several_forwards(lambda n: n != 1 + dist.get_rank()),
    "a loss of all but the first on a rank": several_forwards(lambda n: n or dist.get_rank() == 0),
    "a loss of all but the last on a rank": several_forwards(lambda n: n < 1 + dist.get_rank()),
    "reentrant checkpoints in a unit": reentrant_checkpoints_in_a_unit,
    "a reentrant checkpoint around units": a_checkpoint_around_units(True),
    "a checkpoint around units": a_checkpoint_around_units(False),
    "activations on the host": activations_on_the_host,
}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("program", RIGHT)
@on_ranks(2)
def test_right(program, strategy):
    same(RIGHT[program], Averaged, sharding_strategy=strategy)


@on_ranks(2)
def test_units_that_hand_on_what_they_were_given_are_gathered_as_often_as_others():
    blocks = 6
    model = fsdp()(SkipModel(Skips, blocks))
    for step in range(4):
        before = model.engine.stats.all_gathers
        square(model, batch(3, 6, step=step)).backward()
        # The root stays from its forward to its backward.
        assert model.engine.stats.all_gathers - before == 2 * blocks + 1
    assert model.engine.stats.peak_unsharded_units == 3  # the root and the two of the limiter


@pytest.mark.parametrize("when", ["before the forward", "after it"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@on_ranks(2)
def test_a_penalty_outside_of_the_model_counts_the_chunks_of_one_rank_and_says_so(when, strategy):
    def program(wrap):
        model, losses = wrap(Chain(Reshaped)), []

        def loss(model, x):
            if when == "before the forward":
                penalty = sum(p.pow(2).sum() for p in model.parameters())
                losses.append(square(model, x))
            else:
                losses.append(square(model, x))
                penalty = sum(p.pow(2).sum() for p in model.parameters())
            return losses[-1] + 0.01 * penalty

        return losses, train(model, loss)[1]

    expected = seeded(program, Averaged)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = seeded(program, fsdp(sharding_strategy=strategy))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # other sums of gradients
    about = [str(w.message) for w in said if "a loss was computed with the flat" in str(w.message)]
    units = 0 if strategy is ShardingStrategy.NO_SHARD else 4  # there the chunk is all there is
    assert len(about) == len(set(about)) == units, about
