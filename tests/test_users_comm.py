"""users_comm.py, and the controls of FSDPModule that choose from it, against torch's own."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchsModule
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from minifsdp import FSDPModule, fully_shard, share_comm_ctx
from minifsdp.comm import collectives
from minifsdp.core.collectives import torch_all_gather, torch_reduce_scatter
from minifsdp.core.unit_state import ShardedState
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.no_sync import NoSync
from minifsdp.users_comm import UsersComm
from tests.parity import mesh
from tests.ranks import device, on_ranks
from tests.test_fsdp_module import build, same, sharded, whole

BATCHES = 3  # of a step; the gradients of all are added


class Recorded:
    """What torch's AllGather and ReduceScatter ask of a function; it writes down its calls."""

    def __init__(self, function):
        self.function, self.calls, self.allocated = function, [], 0

    def allocate(self, size, *, dtype, device):
        self.allocated += 1
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        self.calls.append((output_tensor.numel(), input_tensor.numel(), op))
        kwargs = {"group": group, "async_op": async_op} | ({} if op is None else {"op": op})
        return self.function(output_tensor, input_tensor, **kwargs)


def all_gather():
    return Recorded(torch_all_gather)


def reduce_scatter():
    return Recorded(torch_reduce_scatter)


def double(mean):
    mean.mul_(2)


def only_last(method, on=lambda model: model, **settings):
    """Says False for all batches of a step but the last one."""

    def before(model, number):
        getattr(on(model), method)(number == BATCHES - 1, **settings)

    return before


def once(**calls):
    """Calls methods of a block, before the first batch of the first step."""
    done = set()

    def before(model, number):
        if model not in done:
            done.add(model)
            for name, argument in calls.items():
                getattr(model[2], name)(argument)

    return before


def train(model, before, late, steps=3):
    """Of what a program does before each batch, or ``late``, between its forward and its backward;
    the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for step in range(steps):
        for number in range(BATCHES):
            torch.manual_seed(100 * step + 10 * number + dist.get_rank())
            if not late:
                before(model, number)
            loss = model(torch.randn(4, 3, device=device())).pow(2).mean()
            if late:
                before(model, number)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


CONTROLS = {
    "nothing": lambda: lambda model, number: None,
    "sync of a block": lambda: only_last("set_requires_gradient_sync", lambda model: model[2]),
    "sync of the root alone": lambda: only_last("set_requires_gradient_sync", recurse=False),
    "sync of all": lambda: only_last("set_requires_gradient_sync"),
    "kept after the backward": lambda: only_last("set_reshard_after_backward"),
    "divided by 4": lambda: once(set_gradient_divide_factor=4.0),
    "divided by 1, by the old name": lambda: once(set_reduce_scatter_divide_factor=1.0),
    "a hook": lambda: once(set_all_reduce_hook=double),
    "a hook, and divided by 8": lambda: once(
        set_all_reduce_hook=double, set_gradient_divide_factor=8.0
    ),
    "own gather": lambda: once(set_custom_all_gather=all_gather()),
    "own reduction": lambda: once(set_custom_reduce_scatter=reduce_scatter()),
    "own both, divided by 4": lambda: once(
        set_custom_all_gather=all_gather(),
        set_custom_reduce_scatter=reduce_scatter(),
        set_gradient_divide_factor=4.0,
    ),
    "sums": lambda: once(set_force_sum_reduction_for_comms=True),
    "gathered in the backward": lambda: once(set_unshard_in_backward=True),
}
IN_HYBRID = {
    "nothing": CONTROLS["nothing"],
    "all-reduce of a block": lambda: only_last("set_requires_all_reduce", lambda model: model[2]),
    "all-reduce of the root alone": lambda: only_last("set_requires_all_reduce", recurse=False),
    "all-reduce of all": lambda: only_last("set_requires_all_reduce"),
    "sync of all": CONTROLS["sync of all"],
    "divided by 8": lambda: once(set_gradient_divide_factor=8.0),
    "a hook": CONTROLS["a hook"],
    "own both, divided by 4": CONTROLS["own both, divided by 4"],
}


def against_torchs(control, late, **settings):
    theirs = sharded(torchs_fully_shard, **settings)
    for module in theirs.modules():
        if isinstance(module, TorchsModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has nothing else for factors
    expected = train(theirs, control(), late)
    ours = sharded(**settings)
    assert train(ours, control(), late) == expected
    assert same(whole(ours), whole(theirs))
    return ours


@pytest.mark.few(8)
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("native", [False, True], ids=["", "native"])
@pytest.mark.parametrize("name", CONTROLS)
@on_ranks(2)
def test_bit_equal_to_torchs(name, native, late):
    with patch.object(collectives, "NATIVE", native):
        against_torchs(CONTROLS[name], late)


@pytest.mark.few(4)
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("native", [False, True], ids=["", "native"])
@pytest.mark.parametrize("name", IN_HYBRID)
@on_ranks(4)
def test_bit_equal_to_torchs_in_two_groups_of_two(name, native, late):
    with patch.object(collectives, "NATIVE", native):
        against_torchs(IN_HYBRID[name], late, mesh=mesh(replicas=2))


def backward(model, seed=0):
    torch.manual_seed(seed + dist.get_rank())
    model(torch.randn(4, 3, device=device())).pow(2).mean().backward()


@on_ranks(2)
def test_a_programs_functions_are_called_with_its_unit_alone():
    model, gather, reduce = sharded(), all_gather(), reduce_scatter()
    model[2].set_custom_all_gather(gather)
    model[2].set_custom_reduce_scatter(reduce)
    backward(model)
    unit = model[2]._unit
    full, shard = unit.unsharded.data.numel(), unit.padded_shard.numel()
    assert gather.calls == [(full, shard, None)] * 2  # in the forward and in the backward
    assert reduce.calls == [(shard, full, dist.ReduceOp.SUM)]
    assert (gather.allocated, reduce.allocated) == (2, 2)


@on_ranks(2)
def test_a_programs_functions_are_given_one_tensor_of_a_unit_of_one_parameter():
    def gradient(**functions):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(3, 4, bias=False).to(device()))
        for name, function in functions.items():
            getattr(model, name)(function)
        backward(model)
        return model.weight.grad.to_local()

    own = {"set_custom_all_gather": all_gather(), "set_custom_reduce_scatter": reduce_scatter()}
    assert torch.equal(gradient(**own), gradient())


@on_ranks(2)
def test_units_that_are_kept_are_gathered_once_for_each_step_of_an_optimizer():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gathers = []
    for _ in range(3):
        for number in range(BATCHES):
            model.set_reshard_after_backward(number == BATCHES - 1)
            before = model._hooks.engine.stats.all_gathers
            backward(model)
            gathers.append(model._hooks.engine.stats.all_gathers - before)
            units = [module._unit for module in model.modules() if isinstance(module, FSDPModule)]
            states = {unit.state.sharded for unit in units}
            kept = number < BATCHES - 1
            assert states == {ShardedState.UNSHARDED if kept else ShardedState.SHARDED}
        optimizer.step()
        optimizer.zero_grad()
    assert gathers == [7, 0, 0] * 3  # the root's is kept from forward to backward in any case


@on_ranks(2)
def test_a_unit_that_is_kept_follows_a_changed_shard():
    model = sharded()
    model.set_reshard_after_backward(False)
    backward(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    expected = build()
    with torch.no_grad():
        for param in expected.parameters():
            param.add_(1.0)
    x = torch.ones(2, 3, device=device())
    assert torch.equal(model(x), expected(x))


def hybrid():
    return sharded(mesh=mesh(replicas=2))


@on_ranks(4)
def test_a_part_of_the_gradient_is_not_taken_for_all_of_it():
    model = hybrid()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_all_reduce(False)
    backward(model)
    with pytest.raises(RuntimeError, match="an optimizer is about to step while gradients"):
        optimizer.step()
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="Run the backwards without any reduction first"):
        backward(model)
    optimizer.zero_grad()  # drops what waits
    model.set_requires_gradient_sync(True)
    backward(model, 7)
    fresh = hybrid()
    backward(fresh, 7)
    pairs = zip(model.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)


@on_ranks(4)
def test_a_backward_that_fails_leaves_no_part_behind():
    model, fresh = hybrid(), hybrid()
    model.set_requires_all_reduce(False)

    def fail(grad):
        raise RuntimeError("as if out of memory")

    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, device=device(), requires_grad=True)
    handle = x.register_hook(fail)
    with pytest.raises(RuntimeError, match="as if out of memory"):
        model(x).pow(2).mean().backward()
    handle.remove()
    for each in (model, fresh):
        each.set_requires_all_reduce(True)
        backward(each, 7)
    pairs = zip(model.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


@on_ranks(4)
def test_a_parameter_that_no_part_has_used_gets_no_gradient():
    model = fully_shard(HalfUsed().to(device()), mesh=mesh(replicas=2))
    for last in (False, True):
        model.set_requires_all_reduce(last)
        model(torch.ones(2, 4, device=device())).sum().backward()
    assert model.unused.weight.grad is None and model.used.weight.grad is not None


@on_ranks(4)
def test_nothing_travels_between_the_groups_before_the_all_reduce():
    with patch.object(collectives, "NATIVE", True):
        model = hybrid()
        model.set_requires_all_reduce(False)
        with patch.object(dist, "all_reduce") as travels:
            backward(model)
            backward(model)
        assert travels.call_count == 0
        model.set_requires_all_reduce(True)
        with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as travels:
            backward(model)
        assert travels.call_count == 4  # one for each unit


@on_ranks(2)
def test_reductions_have_a_group_of_their_own():
    with patch.object(collectives, "NATIVE", True):
        model = sharded()
        expected = sharded()
        backward(expected)
        model.set_separate_reduce_scatter_group()
        units = [module._unit for module in model.modules() if isinstance(module, FSDPModule)]
        (own,) = {unit.users_comm.reduce_group for unit in units}
        assert own is not None and own is not units[0].shard_group
        used = []

        def recorded(*tensors, group, **how):
            used.append(group)
            return torch_reduce_scatter(*tensors, group=group, **how)

        with patch("minifsdp.users_comm.torch_reduce_scatter", recorded):
            backward(model)
        assert used == [own] * 4
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)
        model.set_separate_reduce_scatter_group(False)
        assert all(unit.users_comm == UsersComm() for unit in units)


@on_ranks(2)
def test_ranks_that_leave_out_different_numbers_of_units_are_told():
    model = sharded()
    for block in model[1 : 2 + dist.get_rank()]:
        block.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match=r"inside for 1 of 4 units.*inside for 2 of 4 units"):
        backward(model)


@on_ranks(2)
def test_ranks_that_leave_out_different_units_are_told():
    model = sharded()
    model[1 + dist.get_rank()].set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="or for different units"):
        backward(model)


@on_ranks(2)
def test_ranks_that_choose_differently_are_told():
    model = sharded()
    if dist.get_rank() == 0:
        model[1].set_gradient_divide_factor(4)
    with pytest.raises(ValueError, match=r"gradients divided by 4\.0"):
        backward(model)


class Unused(nn.Linear):
    """Its bias has no gradient."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


@on_ranks(2)
def test_a_function_may_be_done_when_it_returns():
    def at_once(function):
        return lambda *args, async_op, **kwargs: function(*args, **kwargs)

    expected, model = sharded(), sharded()
    model[2].set_custom_all_gather(Recorded(at_once(torch_all_gather)))
    model[2].set_custom_reduce_scatter(Recorded(at_once(torch_reduce_scatter)))
    before = only_last("set_requires_gradient_sync")
    assert train(model, before, False) == train(expected, before, False)


@pytest.mark.parametrize("shard", [fully_shard, torchs_fully_shard])
@on_ranks(2)
def test_what_no_rank_has_used_has_no_gradient_whatever_a_hook_does(shard):
    model = nn.Sequential(Unused(4, 4), Unused(4, 4), Unused(4, 4)).to(device())
    for layer in (model[0], model[1], model):  # the reduction of the first ends last
        shard(layer).set_all_reduce_hook(lambda grad: grad.add_(1))
    model(torch.ones(1, 4, device=device())).sum().backward()
    for layer in model:
        assert layer.bias.grad is None and layer.weight.grad is not None


@on_ranks(2)
def test_what_is_wrong_is_told():
    model = sharded()
    with pytest.raises(ValueError, match="expected a number above 0"):
        model.set_gradient_divide_factor(0)
    for method in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(TypeError, match="has to be callable, and to have a method allocate"):
            method(torch_all_gather)
    with pytest.raises(NotImplementedError, match="stream"):
        model.set_all_reduce_hook(double, stream=1)

    def within(module, args):
        model.set_requires_all_reduce(True)

    handle = model[1].register_forward_pre_hook(within)
    with pytest.raises(RuntimeError, match="set_requires_all_reduce was called in a forward"):
        backward(model)
    handle.remove()
    backward(model)


@on_ranks(1)
def test_one_rank_divides_too():
    model = fully_shard(nn.Linear(2, 1, bias=False).to(device()))
    model.set_gradient_divide_factor(4)
    model(torch.full((1, 2), 8.0, device=device())).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((1, 2), 2.0, device=device()))


@on_ranks(1)
def test_an_event_of_the_optimizer_is_waited_for_once():
    model = fully_shard(nn.Linear(2, 1).to(device()))
    engine: FeaturedEngine = model._hooks.engine

    class Event:
        pass

    class Streams:
        device = torch.device("cuda", 0)
        compute = type("Compute", (), {"record_event": staticmethod(lambda: "all that is queued")})

    event = Event()
    event.query = event.synchronize = None
    with patch.object(engine, "streams", Streams):
        assert engine.written() == "all that is queued"
        model.set_post_optim_event(event)
        assert engine.written().event is event
        assert engine.written() == "all that is queued"


@on_ranks(2)
def test_roots_may_have_their_streams_in_common():
    both, expected = [sharded(), sharded()], [sharded(), sharded()]
    share_comm_ctx(both)
    assert both[0]._hooks.engine.streams is not expected[0]._hooks.engine.streams
    for models in (both, expected):
        x = torch.full((2, 3), 1.0 + dist.get_rank(), device=device())
        (models[0](x).sum() + models[1](x).pow(2).sum()).backward()
    streams = {id(model._hooks.engine.streams) for model in both}
    streams |= {id(model._hooks.engine.gradients.streams) for model in both}
    streams |= {id(model._hooks.engine.parameters.streams) for model in both}
    assert len(streams) == 1
    for ours, plain in zip(both, expected, strict=True):
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs)
    with pytest.raises(ValueError):
        share_comm_ctx([nn.Linear(1, 1)])
    with pytest.raises(RuntimeError, match="share_comm_ctx was called on unit '1'"):
        share_comm_ctx([both[0][1]])


@on_ranks(1)
def test_what_nobody_has_asked_for_is_not_there():
    model = fully_shard(nn.Linear(2, 1).to(device()))
    backward_stages = [type(stage).__name__ for stage in model._unit.stages]
    assert "Scale" not in backward_stages and "UsersHook" not in backward_stages
    assert model._hooks.engine.layer(NoSync).unreduced == set()
