"""on_demand.py: what is gathered and freed beside the order of the moments."""

import warnings
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.core.limiter import EventQueue
from tests.parity import check_at_rest
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    mean_gradients,
    stack,
    storage,
)
from tests.test_hooks import wrap


class Whole(nn.Module):
    """The root has a first layer, a head, and between them units and perhaps a layer of its own."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.blocks = nn.ModuleList(Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.between = nn.Linear(6, 6) if between is not None else None
        self.run_between = between

    def forward(self, tokens):
        x = self.first(tokens)
        for block in self.blocks:
            x = block(x)
            if self.between is not None:
                x = self.run_between(self.between, x)
        return self.head(x)


class Tied(Whole):
    """The head has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.first.weight


def tokens(at=0):
    made = torch.Generator().manual_seed(10 * at + dist.get_rank())
    return torch.randint(9, (5,), generator=made).to(device())


def root_in_steps(make, steps=2, **settings):
    """Whether the root has its memory when each block's backward begins, in some steps in which it
    trains as a plain model does; and how many units were gathered in the last."""
    plain = make().to(device())
    model = FSDP(make().to(device()), auto_wrap_policy=ModuleWrapPolicy({Block}), **settings)
    (root, *_), there = model.engine.units, []
    for block in model.module.blocks:
        block.module.register_full_backward_pre_hook(lambda *_: there.append(bool(storage(root))))
    for at in range(steps):
        there.clear()
        model.zero_grad()
        before = model.engine.stats.all_gathers
        model(tokens(at)).pow(2).sum().backward()
        expected = mean_gradients(plain, plain(tokens(at)).pow(2).sum())
        assert_same_gradients(gathered_gradients(model), expected)
        check_at_rest(model)
    assert not model.engine.limiter._alive  # it has heard of each free, once
    return there, model.engine.stats.all_gathers - before


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("make", [Whole, Tied])
@on_ranks(2)
def test_the_root_is_freed_when_its_heads_backward_is_over(make, strategy, rows):
    """An embedding's backward needs no parameter. Else the largest unit of many models would stay
    to the end of the backward."""
    there, _ = root_in_steps(make, sharding_strategy=strategy, use_orig_params=rows)
    assert there == [False] * 3


@on_ranks(2)
def test_the_root_stays_while_something_is_saved_of_it():
    """Its layer between the blocks runs for the last time before the first of them."""
    there, gathers = root_in_steps(lambda: Whole(lambda layer, x: layer(x)))
    assert (there, gathers) == ([True, True, False], 1 + 2 * 3)


class Prompted(Block):
    """A frozen unit whose second input is a leaf with a gradient, as in prompt tuning."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.requires_grad_(False)

    def forward(self, x, prompt):
        return super().forward(x + prompt.sigmoid())


class PromptTuned(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Prompted() for _ in range(4))

    def forward(self, x, prompts):
        x = self.first(x)
        for block, prompt in zip(self.blocks, prompts, strict=True):
            x = block(x, prompt)
        return x


@pytest.mark.parametrize("rows", [True, False])
@on_ranks(2)
def test_a_frozen_unit_with_a_leaf_among_its_inputs_is_freed_by_the_next_ones_backward(rows):
    model = FSDP(
        PromptTuned().to(device()),
        auto_wrap_policy=ModuleWrapPolicy({Prompted}),
        use_orig_params=rows,
    )
    prompts = [torch.full((6,), float(at), device=device(), requires_grad=True) for at in range(4)]
    there = []

    def look(*_):
        there.append([bool(storage(unit)) for unit in model.engine.units[1:]])

    for block in model.module.blocks:
        block.module.register_full_backward_hook(look)
    for _ in range(2):
        there.clear()
        model(batch(), prompts).pow(2).sum().backward()
        # At the end of a backward the unit itself is there, and the one that was prefetched.
        assert there == [
            [False, False, True, True],
            [False, True, True, False],
            [True, True, False, False],
            [True, False, False, False],
        ]
        check_at_rest(model)
    plain, copies = PromptTuned().to(device()), [p.detach().requires_grad_() for p in prompts]
    for _ in range(2):
        plain(batch(), copies).pow(2).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(prompts, copies, strict=True))


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@on_ranks(2)
def test_a_frozen_unit_that_no_gradient_will_reach_is_freed_after_the_forward(strategy, rows):
    """A reference model that runs with gradients enabled, and gets no backward that would free it;
    and the frozen part of a model, up to the first input that needs a gradient."""

    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
            for at in (0, 1, 3):
                self.blocks[at].requires_grad_(False)
            self.head = nn.Linear(6, 6)

        def forward(self, x, again=""):
            """Once more block 0 runs with an input that needs a gradient."""
            y = self.blocks[0](self.head(x)) if again == "before" else x
            x = self.blocks[1](self.blocks[0](x))
            x = self.blocks[3](self.blocks[2](x))
            return self.head(y + (self.blocks[0](x) if again == "after" else x))

    def there(model):
        return [bool(storage(unit)) for unit in model.engine.units]

    settings = {"sharding_strategy": strategy, "use_orig_params": rows}
    stays = strategy is ShardingStrategy.SHARD_GRAD_OP
    frozen = wrap(Whole().to(device()).requires_grad_(False), **settings)
    model, plain = wrap(Tuned().to(device()), **settings), Tuned().to(device())
    for at, again in enumerate(("", "after", "before", "")):
        frozen(tokens())
        output = model(batch(step=at), again)
        assert there(frozen) == [False] * 4
        assert there(model) == [True, bool(again) and stays, False, stays, stays]
        model.zero_grad()
        output.pow(2).sum().backward()
        expected = mean_gradients(plain, plain(batch(step=at), again).pow(2).sum())
        assert_same_gradients(gathered_gradients(model), expected)
        check_at_rest(model)
        check_at_rest(frozen)


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_the_root_is_gathered_again_for_a_checkpoint_but_once_and_for_all(reentrant):
    """Of what a checkpoint runs again nothing is saved. A root that was freed too early stays in
    later steps; else every checkpoint in it would gather it."""

    def between(layer, x):
        return checkpoint(layer, x, use_reentrant=reentrant)

    _, gathers = root_in_steps(lambda: Whole(between), steps=1)
    assert gathers == 1 + 2 * 3 + 1
    there, gathers = root_in_steps(lambda: Whole(between), steps=2)
    assert there == [True] * 3 and gathers == 1 + 2 * 3


@on_ranks(2)
def test_a_unit_without_parameters_does_not_free_the_root_on_some_ranks_only():
    """A rank whose loss does not use the head has nothing saved of the root in the backward of the
    activation. It would gather the root once more for the checkpoint, and the other would not."""

    class TwoOutputs(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.activation = nn.Linear(6, 6), Block(nn.Tanh())
            self.head = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=False)
            return self.activation(x), self.head(x)

    model, plain = wrap(TwoOutputs().to(device())), TwoOutputs().to(device())
    for at in range(2):
        losses = [m(batch(step=at))[dist.get_rank()].pow(2).sum() for m in (model, plain)]
        model.zero_grad()
        losses[0].backward()
        for param in plain.parameters():  # mean_gradients() wants one of each
            losses[1] = losses[1] + 0 * param.sum()
        assert_same_gradients(gathered_gradients(model), mean_gradients(plain, losses[1]))
        check_at_rest(model)


@on_ranks(2)
def test_to_the_limiter_a_root_that_is_gathered_again_is_alive_once():
    model = FSDP(
        Whole(lambda layer, x: checkpoint(layer, x, use_reentrant=False)).to(device()),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    engine, alive = model.engine, []
    for block in model.module.blocks:
        block.module.register_full_backward_hook(
            lambda *_: alive.append(engine.limiter._alive.count(engine.root))
        )
    model(tokens()).pow(2).sum().backward()
    assert alive == [1, 1, 1]


@on_ranks(2)
def test_so_is_a_unit_that_a_checkpoint_around_it_runs_again_after_it_was_freed_early():
    class Shifted(Block):
        """Nothing is saved of its own parameter, so the backward of what is in it frees it."""

        def __init__(self):
            super().__init__(Block(nn.Linear(6, 6)))
            self.shift = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return super().forward(x + self.shift)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shifted = nn.Linear(6, 6), Shifted()

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.shifted, self.first(x), use_reentrant=False)
            return x

    model = FSDP(Twice().to(device()), auto_wrap_policy=ModuleWrapPolicy({Block}))
    limiter, alive = model.engine.limiter, []

    def admit(unit, needed):
        admitted = EventQueue.admit(limiter, unit, needed)
        alive.append(max(Counter(limiter._alive).values()))
        return admitted

    with patch.object(limiter, "admit", admit):
        model(batch()).sum().backward()
    assert set(alive) == {1}


@on_ranks(2)
def test_the_root_stays_where_somebody_refers_to_its_parameters():
    """It is told of when the unit's turn is over, as of any unit; not before."""

    class Keeps(Whole):
        def forward(self, x):
            self.kept = (self.head.weight,)
            return super().forward(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there, _ = root_in_steps(Keeps)
    assert there == [True] * 3
    assert sum("still referred to when the unit is freed" in str(w.message) for w in caught) == 1


@on_ranks(2)
def test_a_gradient_asked_for_in_the_roots_forward_does_not_free_it():
    class Slope(Whole):
        def forward(self, tokens):
            x = self.first(tokens)
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[0](at).pow(2).sum(), at)
            return super().forward(tokens) + self.head(slope)

    model, plain = wrap(Slope().to(device())), Slope().to(device())
    for at in range(2):
        losses = [m(tokens(at)).pow(2).sum() for m in (model, plain)]
        model.zero_grad()
        losses[0].backward()
        assert_same_gradients(gathered_gradients(model), mean_gradients(plain, losses[1]))


@on_ranks(2)
def test_where_nothing_can_be_seen_of_what_is_saved_units_stay_as_their_strategy_says():
    def make():  # the bias is saved itself: without hooks no count shows it
        return Whole(lambda layer, x: layer(x) * layer.bias).to(device())

    model, plain = wrap(make(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), make()
    with torch.autograd.graph.disable_saved_tensors_hooks("a test"):
        model(tokens()).pow(2).sum().backward()
    expected = mean_gradients(plain, plain(tokens()).pow(2).sum())
    assert_same_gradients(gathered_gradients(model), expected)


@on_ranks(1)
def test_a_saved_parameter_that_is_looked_at_outside_of_a_backward_is_refused():
    model = stack(1)
    node = model(batch()).grad_fn
    while "_saved_mat2" not in dir(node):
        node = node.next_functions[0][0]
    with pytest.raises(RuntimeError, match="asked for outside of a backward"):
        node._saved_mat2  # noqa: B018
