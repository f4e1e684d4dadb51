"""Promises around the step: optimizers and their checkpoints, norms, gradient scalers, hooks."""

import copy
import io
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardedGradScaler, ShardingStrategy
from minifsdp.comm.consensus import gather_objects
from tests.promises import Block, batch, fsdp, parameters, refused, same, seeded, train
from tests.ranks import device, on_ranks, run

with warnings.catch_warnings():  # it scripts functions
    warnings.simplefilter("ignore")
    import torch.distributed.optim as distributed

NO_SHARD = ShardingStrategy.NO_SHARD


class Layer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Layer(), Layer()).to(device())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).sum()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer):
    return train(model, loss_of, optimizer=optimizer)


def reload(state):
    """What torch.save and torch.load make of it, with the default of ``weights_only``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def from_rank_0(mine):
    return gather_objects(mine, dist.group.WORLD)[0]


def backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, batch(3, 6, step=step)).backward()


# -------------------------------------------------------------------------------------- they train


def adam(wrap):
    model = wrap(network())
    return trained(model, torch.optim.Adam(model.parameters(), lr=0.01))


def adamw_of_named_parameters(wrap):
    model = wrap(network())
    return trained(model, torch.optim.AdamW(model.named_parameters(), lr=0.01, weight_decay=0.1))


def others_that_are_element_wise(wrap):
    model, found = wrap(network()), []
    for name in ("RMSprop", "Adagrad", "NAdam", "Rprop"):
        optimizer = getattr(torch.optim, name)
        found.append(trained(model, optimizer(model.parameters(), lr=0.01)))
    return found


def a_model_and_something_plain_beside_it(wrap):
    model, plain = wrap(network()), nn.Linear(6, 6).to(device())
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": plain.parameters(), "lr": 0.1}], lr=0.05
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(model, lambda model, x: loss_of(model, plain(x)), optimizer=optimizer)


def groups_by_unit(wrap):
    model = wrap(network())
    last = [p for name, p in model.named_parameters() if name.removeprefix("module.")[0] == "2"]
    others = [p for name, p in model.named_parameters() if name.removeprefix("module.")[0] != "2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = [{"params": others}, {"params": last, "lr": 0.5}]
        return trained(model, torch.optim.SGD(groups, lr=0.05))


def an_optimizer_for_each_unit(wrap):
    model = wrap(network())
    optimizers = [torch.optim.Adam([p], lr=0.01) for p in model.parameters()]
    for step in range(3):
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def clipping_values(wrap):
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        backward(model, step)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def a_norm_that_is_known_already(wrap):
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    backward(model)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, torch.tensor(2.0))
    optimizer.step()
    return parameters(model)


def its_own_state_comes_back(wrap):
    model = wrap(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = [trained(model, optimizer)]
    saved = reload(optimizer.state_dict())
    for fused in (False, True):
        fresh = torch.optim.Adam(model.parameters(), lr=0.5, fused=fused)
        fresh.load_state_dict(copy.deepcopy(saved))
        losses.append(trained(model, fresh))
        fresh.load_state_dict(saved)  # and into one that has made steps
        losses.append(trained(model, fresh))
    return losses


def a_learning_rate_from_rank_0(wrap):
    """Plain SGD remembers nothing, so rank 0's state is everybody's."""
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(from_rank_0(optimizer.state_dict()))
    return trained(model, optimizer)


TRAIN = [
    adam,
    adamw_of_named_parameters,
    others_that_are_element_wise,
    a_model_and_something_plain_beside_it,
    groups_by_unit,
    an_optimizer_for_each_unit,
    clipping_values,
    a_norm_that_is_known_already,
    its_own_state_comes_back,
    a_learning_rate_from_rank_0,
]


def named(program) -> str:
    return getattr(program, "__name__", None) or str(program)


@pytest.mark.parametrize("program", TRAIN, ids=named)
@on_ranks(2)
def test_optimizers_that_are_right(program):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NumPy.*")
        same(program)
        same(program, sharding_strategy=NO_SHARD)


# ------------------------------------------------------------------------------- refused by name


class DistributedShampoo(torch.optim.SGD):
    """Somebody's own."""


class MyLBFGS(torch.optim.LBFGS):
    pass


BY_NAME = {
    "LBFGS": {},
    "Adafactor": {},
    "Muon": {},  # torch has one since 2.9
    "MyLBFGS": {},
    "DistributedShampoo": {"lr": 0.1},
    "ZeroRedundancyOptimizer": {"optimizer_class": torch.optim.SGD, "lr": 0.1},
}


@pytest.mark.parametrize("name", BY_NAME)
@on_ranks(2)
def test_an_optimizer_that_is_not_element_wise_is_refused_when_it_is_built(name):
    places = (globals(), vars(torch.optim), vars(distributed))
    optimizer = next(place[name] for place in places if name in place)

    def program(wrap):
        optimizer(wrap(network()).parameters(), **BY_NAME[name])

    refused(program, RuntimeError, [name, "looks at", "SGD, AdamW"])


@on_ranks(1)
def test_one_that_looks_at_all_elements_is_right_where_all_are():
    model = seeded(lambda wrap: wrap(network()), fsdp())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch(3, 6))
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first


def whole_norm(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def total_norm(model):
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def total_norm_of_a_generator(model):
    return nn.utils.get_total_norm(p.grad for p in model.parameters())


def total_norm_after_something_plain(model):
    grads = [torch.ones(2, device=device())]
    for p in model.parameters():
        grads.append(p.grad)
    return nn.utils.get_total_norm(grads, foreach=False)


@pytest.mark.parametrize(
    "norm", [whole_norm, total_norm, total_norm_of_a_generator, total_norm_after_something_plain]
)
@on_ranks(2)
def test_torchs_norms_of_chunks_are_refused(norm):
    def program(wrap):
        model = wrap(network())
        backward(model)
        norm(model)

    refused(program, RuntimeError, ["torch.nn.utils", "model.clip_grad_norm_(max_norm)"])
    model = seeded(lambda wrap: wrap(network()), fsdp(sharding_strategy=NO_SHARD))
    backward(model)
    expected = model.clip_grad_norm_(math.inf)
    if norm is not total_norm_after_something_plain:
        torch.testing.assert_close(norm(model).detach(), expected)


@on_ranks(2)
def test_so_they_are_where_a_default_device_is_set():
    """torch then calls each function of its own for the caller."""

    def program(wrap):
        model = wrap(network())
        backward(model)
        with torch.device(device()):
            total_norm(model)

    refused(program, RuntimeError, ["torch.nn.utils", "model.clip_grad_norm_(max_norm)"])


def by_hand_1(model):
    return sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5


def by_hand_2(model):
    return torch.stack([p.grad.detach().data.norm(2) for p in model.parameters()]).norm()


def by_hand_3(model):
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += torch.linalg.vector_norm(p.grad).item() ** 2
    return total**0.5


@pytest.mark.parametrize("norm", [by_hand_1, by_hand_2, by_hand_3])
@on_ranks(2)
def test_a_norm_by_hand_is_warned_of(norm):
    model = fsdp()(network())
    backward(model)
    with pytest.warns(UserWarning, match=r"model.clip_grad_norm_\(max_norm\) returns that of all"):
        norm(model)
    whole = fsdp(sharding_strategy=NO_SHARD)(network())
    backward(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm(whole)
        model.clip_grad_norm_(1.0)
        torch.optim.Adam(model.parameters()).step()


def by_dimension(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def by_name(model):
    flags = [(any(w in n for w in ("bias", "norm")), p) for n, p in model.named_parameters()]
    return [
        {"params": [p for small, p in flags if not small], "weight_decay": 0.1},
        {"params": [p for small, p in flags if small], "weight_decay": 0.0},
    ]


def by_name_with_a_plain_head(model):
    groups, head = by_dimension(model), nn.Linear(6, 1).to(device())
    groups[0]["params"].append(head.weight)
    groups[1]["params"].append(head.bias)
    return groups


def of_iterators(model):
    return [{**group, "params": iter(group["params"])} for group in by_name(model)]


@pytest.mark.parametrize("strategy", [NO_SHARD, ShardingStrategy.FULL_SHARD])
@pytest.mark.parametrize("groups", [by_dimension, by_name, by_name_with_a_plain_head, of_iterators])
@on_ranks(2)
def test_groups_by_name_or_dimension_are_warned_of_once(groups, strategy):
    model = fsdp(sharding_strategy=strategy)(network())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = torch.optim.AdamW(groups(model), lr=0.1)
        when_built = len(said)
        for step in range(2):
            backward(model, step)
            optimizer.step()
        told = [str(warning.message) for warning in said]
    about_groups = [text for text in told if "2 parameter groups" in text]
    assert len(about_groups) == 1
    built = [text for text in told[:when_built] if text in about_groups]
    assert len(built) == (groups is not of_iterators)
    by_names = [text for text in told if "by name ('bias')" in text]
    assert len(by_names) == (groups in (by_name, of_iterators)), told  # once for each listing
    (message,) = about_groups
    assert "AdamW was given 2 parameter groups" in message and "units <root>, '1', '2'" in message
    assert {warning.filename for warning in said} == {__file__}, [*map(str, said)]


# ---------------------------------------------------------------------- what was before wrapping


def originals_in_a_list(wrap):
    net = network()
    params = list(net.parameters())
    model = wrap(net)
    optimizer = torch.optim.SGD(params, lr=0.1)
    backward(model)
    optimizer.step()


def a_group_for_an_older_optimizer(wrap):
    other, net = nn.Linear(2, 2).to(device()), network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    params = list(net.parameters())
    model = wrap(net)
    backward(model)
    other(torch.ones(2, device=device())).sum().backward()
    optimizer.step()  # of the other one alone it is right
    optimizer.add_param_group({"params": params})
    optimizer.step()


def originals_among_others(wrap):
    net = network()
    first = net[0].weight
    model = wrap(net)
    optimizer = torch.optim.SGD([first, *model.parameters()], lr=0.1)
    backward(model)
    optimizer.step()


@pytest.mark.parametrize(
    "program", [originals_in_a_list, a_group_for_an_older_optimizer, originals_among_others]
)
@on_ranks(2)
def test_a_step_of_originals_is_refused(program):
    refused(program, RuntimeError, ["holds '", "as it was before wrapping"])


@pytest.mark.parametrize("by_hand", [False, True])
@on_ranks(2)
def test_an_optimizer_from_before_is_refused_and_the_model_stays_as_it_was(by_hand):
    net = network()
    optimizer = torch.optim.Adam(net[1].parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(RuntimeError, match=r"built before wrapping\. It holds .*linear\.weight"):
        FSDP(net[1]) if by_hand else fsdp()(net)
    assert [name for name, _ in net.named_parameters()] == list(before)
    backward(net)
    optimizer.step()  # all is as if nothing had been
    assert not torch.equal(net[1].linear.weight, before["1.linear.weight"])
    del optimizer
    net.zero_grad()
    net.load_state_dict(before, strict=False)  # the same on all ranks again
    model = fsdp()(net)
    trained(model, torch.optim.Adam(model.parameters(), lr=0.1))


# ----------------------------------------------------------------------------- gradient scalers


def poison(model: nn.Module, rank: int) -> None:
    """An overflow in a gradient, which one rank can see."""
    if dist.get_rank() == rank:
        first = next(p for p in model.parameters() if p.numel())
        first.grad.view(-1)[0] = math.inf


def scaling(make_scaler, clip=False, fused=False, overflow=True):
    def program(wrap):
        model = wrap(network())
        optimizers = [
            torch.optim.AdamW([p], lr=0.01, **({"fused": True} if fused else {}))
            for p in model.parameters()
        ]
        scaler, scales = make_scaler(), []
        for step in range(4):
            scaler.scale(loss_of(model, batch(3, 6, step=step))).backward()
            if overflow and step == 1:
                for rank in range(2) if not isinstance(model, FSDP) else [1]:
                    poison(model, rank)
            for optimizer in optimizers:
                if clip:
                    scaler.unscale_(optimizer)
            if clip and isinstance(model, FSDP):
                model.clip_grad_norm_(1e3)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == from_rank_0(scales)
        found = parameters(model)
        # Fused kernels round differently at the end of a tensor, and a flat one ends elsewhere.
        exact = not overflow and not fused
        return scales, found if exact else [p.isfinite().all() for p in found.values()]

    return program


def ours():
    return ShardedGradScaler(device().type, init_scale=1024.0, growth_interval=2)


def torchs_own():
    return TorchsScaler(device().type, init_scale=1024.0, growth_interval=2)


def plain():
    return torch.amp.GradScaler(device().type, init_scale=1024.0, growth_interval=2)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("make, fused", [(ours, False), (ours, True), (torchs_own, False)])
@on_ranks(2)
def test_all_ranks_skip_a_step_or_none(make, fused, clip, overflow):
    same(scaling(make, clip, fused, overflow))


@on_ranks(2)
def test_torchs_sharded_scaler_is_refused_where_it_does_not_ask_the_other_ranks():
    program = scaling(torchs_own, fused=True)
    refused(program, RuntimeError, ["ShardedGradScaler", "this rank's shards only"])


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_torchs_plain_scaler_is_refused_on_chunks(unscale, fused):
    refused(scaling(plain, unscale, fused), RuntimeError, ["minifsdp.ShardedGradScaler"])
    same(scaling(plain, fused=fused, overflow=False), sharding_strategy=NO_SHARD)


@on_ranks(2)
def test_a_scaler_that_is_off_is_no_scaler():
    same(scaling(lambda: torch.amp.GradScaler(device().type, enabled=False), overflow=False))
    same(scaling(lambda: ShardedGradScaler(device().type, enabled=False), overflow=False))


# ------------------------------------------------------------------------ checkpoints of optimizers


def stepped(wrap, make=torch.optim.Adam, **settings):
    model = wrap(network())
    optimizer = make(model.parameters(), lr=0.01, **settings)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def rank_0s_state(wrap):
    model, optimizer = stepped(wrap)
    state = from_rank_0(reload(optimizer.state_dict()))
    fresh = torch.optim.Adam(model.parameters(), lr=0.01)
    fresh.load_state_dict(state)
    backward(model)
    fresh.step()


def rank_0s_state_into_one_that_has_made_steps(wrap):
    model, optimizer = stepped(wrap, torch.optim.SGD, momentum=0.9)
    optimizer.load_state_dict(from_rank_0(optimizer.state_dict()))
    backward(model)
    optimizer.step()


def loaded_on_rank_1_only_and_from_rank_0(wrap):
    model, optimizer = stepped(wrap)
    state = from_rank_0(optimizer.state_dict())
    fresh = torch.optim.Adam(model.parameters(), lr=0.01)
    if dist.get_rank() == 1:
        fresh.load_state_dict(state)
    backward(model)
    fresh.step()


def that_of_a_plain_model(wrap):
    net = nn.Sequential(nn.Linear(6, 6, bias=False)).to(device())
    plain = torch.optim.Adam(net.parameters())
    net(torch.ones(6, device=device())).sum().backward()
    plain.step()
    state = plain.state_dict()
    del plain
    model = wrap(net)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    optimizer.load_state_dict(state)
    backward(model)
    optimizer.step()


def that_of_full_shard_without_sharding(wrap):
    _, optimizer = stepped(fsdp())
    model, other = stepped(fsdp(sharding_strategy=NO_SHARD), fused=True)
    other.load_state_dict(optimizer.state_dict())
    backward(model)
    other.step()


def that_without_sharding_in_full_shard(wrap):
    _, optimizer = stepped(fsdp(sharding_strategy=NO_SHARD))
    model, other = stepped(fsdp(), fused=True)
    other.load_state_dict(optimizer.state_dict())
    backward(model)
    other.step()


def that_of_full_shard_in_a_plain_model(wrap):
    model = wrap(nn.Linear(6, 6, bias=False))
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    net = nn.Linear(6, 6, bias=False).to(device())
    plain = torch.optim.Adam(net.parameters(), fused=True)
    plain.load_state_dict(optimizer.state_dict())
    backward(net)
    plain.step()


def that_of_wider_layers(wrap):
    _, optimizer = stepped(wrap)
    wider = wrap(nn.Sequential(*[Wide() for _ in range(2)], nn.Linear(6, 6)))
    other = torch.optim.Adam(wider.parameters(), fused=True)
    other.load_state_dict(optimizer.state_dict())
    backward(wider)
    other.step()


class Wide(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 9)

    def forward(self, x):
        return self.linear(x)[:, :6]


ELSEWHERE = [
    rank_0s_state,
    rank_0s_state_into_one_that_has_made_steps,
    loaded_on_rank_1_only_and_from_rank_0,
    that_of_a_plain_model,
    that_of_full_shard_without_sharding,
    that_without_sharding_in_full_shard,
    that_of_full_shard_in_a_plain_model,
    that_of_wider_layers,
]


@pytest.mark.parametrize("program", ELSEWHERE, ids=named)
@on_ranks(2)
def test_a_state_from_elsewhere_is_refused_on_every_rank(program):
    refused(program, RuntimeError, ["was loaded from elsewhere", "load it on the same rank"])


@on_ranks(2)
def saved_on_two_ranks():
    _, optimizer = stepped(fsdp())
    return optimizer.state_dict()


def loaded(states):
    def program(wrap):
        model, optimizer = stepped(wrap)
        optimizer.load_state_dict(states[dist.get_rank() % 2])
        backward(model)
        optimizer.step()

    refused(program, RuntimeError, ["was loaded from elsewhere", "of 2 of", "of 3 of"])


def test_a_state_of_two_ranks_is_refused_on_three():
    run(loaded, 3, run(saved_on_two_ranks, 2))


def save_both(model, optimizer):
    dcp.save({"model": model.state_dict(), "optim": optimizer}, checkpoint_id="/nonexistent")


def save_its_dict(model, optimizer):
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id="/nonexistent", no_dist=True)


def get_its_dict(model, optimizer):
    get_optimizer_state_dict(model, optimizer)


def get_both(model, optimizer):
    get_state_dict(model, optimizer)


@pytest.mark.parametrize("save", [save_both, save_its_dict, get_its_dict, get_both])
@pytest.mark.parametrize("steps", [0, 1])
@on_ranks(2)
def test_distributed_checkpoints_of_a_sharded_optimizer_are_refused(save, steps):
    def program(wrap):
        if steps:
            return save(*stepped(wrap))
        model = wrap(network())
        return save(model, torch.optim.Adam(model.parameters()))

    if steps or save is not save_its_dict:  # before the first step there is nothing to lose
        refused(program, BaseException, ["would take one rank's chunks", "as_dtensors"])


# --------------------------------------------------------------------------------------- hooks


def stepping_in_hooks(register):
    def program(wrap):
        model = wrap(network())
        if isinstance(model, FSDP):
            register(model)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            backward(model, step)
            if not isinstance(model, FSDP):
                optimizer.step()
                optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        return parameters(model)

    program.__name__ = register.__name__
    return program


def as_in_the_tutorial(model):
    optimizers = {
        p: torch.optim.SGD([p], lr=0.05, momentum=0.9, foreach=False) for p in model.parameters()
    }

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


def with_torchs_helper(model):
    settings = {"lr": 0.05, "momentum": 0.9}
    distributed._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), settings)


@pytest.mark.parametrize("register", [as_in_the_tutorial, with_torchs_helper], ids=named)
@on_ranks(2)
def test_an_optimizer_may_be_fused_into_the_backward(register):
    same(stepping_in_hooks(register))
    same(stepping_in_hooks(register), sharding_strategy=NO_SHARD)


def changed(change):
    def program(wrap):
        model = wrap(network())
        for p in model.parameters():
            p.register_hook(change)
        return train(model, loss_of)

    return program


def scale(grad):
    return grad * 0.3


def clamp(grad):
    return grad.clamp(-0.01, 0.01)


def in_place(grad):
    grad.mul_(0.3)


def nothing(grad):
    return None


@pytest.mark.parametrize("change", [scale, clamp, in_place, nothing], ids=named)
@on_ranks(2)
def test_hooks_that_change_each_element_give_what_they_give_with_ddp(change):
    same(changed(change))
    same(changed(change), sharding_strategy=NO_SHARD)


def accumulating(wrap):
    model, seen = wrap(network()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handles = [p.register_hook(clamp) for p in model.parameters()]
    if isinstance(model, FSDP):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape == p.shape))
    for step in range(3):
        with model.no_sync():
            backward(model, 2 * step)
        assert not seen
        backward(model, 2 * step + 1)
        assert not isinstance(model, FSDP) or seen == [True] * 3
        seen.clear()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            for handle in handles:
                handle.remove()
    return parameters(model)


@on_ranks(2)
def test_hooks_and_gradients_that_wait():
    same(accumulating)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("inner", [False, True])
@on_ranks(2)
def test_hooks_on_originals_are_refused(register, inner):
    def program(wrap):
        net = network()
        (net[2].norm if inner else net[0]).weight.__getattribute__(register)(lambda _: None)
        names = [name for name, _ in net.named_parameters()]
        try:
            wrap(net)
        finally:
            assert [name for name, _ in net.named_parameters()] == names

    name = "2.norm.weight" if inner else "0.weight"
    refused(program, ValueError, [f"parameter '{name}' has a hook", "Remove it, wrap"])


@on_ranks(2)
def test_a_hook_that_wants_another_shape_says_whose_it_is():
    def program(wrap):
        model = wrap(network())
        for p in model.parameters():
            p.register_hook(lambda grad, p=p: grad + 0.1 * p.detach())
        backward(model)

    refused(program, RuntimeError, ["flat parameter of unit '2'", "before the reduction"])
