"""transport.py: collectives by gloo, and among ranks that read each other's memory."""

import gc
import time
import weakref
from types import MethodType, SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.comm import collectives, deadlock_watch, same_machine
from minifsdp.comm.collectives import all_gather
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.comm.transport import send_recv, wait_for, wait_for_readers
from tests.comm.near import NEEDED, check_all, mine, near, say, wait_until_said
from tests.patience import Patience
from tests.ranks import device, on_ranks


def reads_memory(test):
    for mark in NEEDED:
        test = mark(test)
    return test


@on_ranks(1)
def test_that_the_other_rank_has_ended_is_told_where_a_message_begins():
    """gloo knows by then that the connection is closed, and says nothing of units."""

    def closed(*_):
        raise RuntimeError("Connection closed by peer")

    name = dist.group.WORLD.group_name
    group = Mock(group_name=name, recv=closed, send=closed)
    message = Message(dist.group.WORLD, 5, Kind.PARAMETERS, 4, "'a'")
    message.group = group
    for sent, received in (([torch.ones(1)], []), ([], [torch.ones(1)])):
        with pytest.raises(RuntimeError, match=r"parameters of unit 'a'.*closed by peer"):
            send_recv(sent, 1, lambda received=received: received, 1, message)


@reads_memory
@on_ranks(2)
def test_two_ranks_get_what_gloo_gives():
    for numel in (1, 6, 300_000):
        check_all(near(), numel)
    check_all(near(), dtype=torch.bfloat16)
    check_all(near(), 0)


@reads_memory
@on_ranks(4)
def test_four_ranks_get_what_gloo_gives():
    check_all(near(), 5)
    check_all(near(), 100_000)


def test_a_rank_reads_before_it_waits_to_be_read():
    """Else no rank would read at once: all would wait, and read only since they find nothing."""
    order, message = [], Mock(kind=Kind.REDUCTION)
    fetch, loan = (object.__new__(kind) for kind in (same_machine.Fetch, same_machine.Loan))
    gloo = SimpleNamespace(wait=lambda: order.append("gloo"))
    with (
        patch.multiple(same_machine.Fetch, wait=lambda _: order.append("fetch"), drop=Mock()),
        patch.object(same_machine.Loan, "wait", lambda _: order.append("loan")),
    ):
        wait_for([loan, gloo, fetch], message)()
    assert order == ["fetch", "gloo", "loan"]


@reads_memory
@on_ranks(2)
def test_blocks_go_to_their_places():
    group, blocks, chunk = near(), [2, 1], mine(3)
    full = torch.empty(6)
    all_gather(full, chunk, group, 7, blocks=blocks)()
    (a, b), (c, d) = (mine(3, of=rank).split(blocks) for rank in range(2))
    assert torch.equal(full, torch.cat([a, c, b, d]))


@reads_memory
@on_ranks(2)
def test_no_word_is_given_of_gloo():
    """Not even one that says that there is something to read."""

    def gloo(*_):
        raise AssertionError("gloo was called")

    group = near()
    before = same_machine.bytes_lent
    with patch.object(type(group), "send", gloo), patch.object(type(group), "recv", gloo):
        all_gather(torch.empty(8), mine(4), group, 7)()
    assert same_machine.bytes_lent - before == 16


@reads_memory
@on_ranks(2)
def test_a_rank_that_lends_goes_on_before_it_is_read():
    """And `wait_for_readers` tells when it may change what it has lent."""
    group, full, chunk = near(), torch.empty(8), mine(4)
    (neighbor,) = same_machine.neighbors[group].values()
    finish = all_gather(full, chunk, group, 7)
    if dist.get_rank() == 0:
        finish()
        (loan,) = neighbor.loans.values()
        assert not loan.is_copy  # else it has waited
        say("rank 0 has gone on")
        wait_for_readers()
        chunk.zero_()
        dist.barrier()
    else:
        wait_until_said("rank 0 has gone on")
        time.sleep(0.05)  # longer than it waits: it leaves a copy
        finish()
        dist.barrier()
        wait_for_readers()
    assert torch.equal(full, torch.cat([mine(4, of=0), mine(4, of=1)]))
    all_gather(torch.empty(8), mine(4), group, 8)()
    assert all(loan.line != 7 << 3 for loan in neighbor.loans.values())  # not even a copy is kept


@reads_memory
@on_ranks(2)
def test_what_is_not_of_parameters_may_change_when_it_is_finished():
    group, full, chunk = near(), torch.empty(8), mine(4)
    finish = all_gather(full, chunk, group, 7, kind=Kind.OTHER)
    if dist.get_rank() == 0:
        finish()
        chunk.zero_()  # at once
        dist.barrier()
    else:
        time.sleep(0.05)
        finish()
        dist.barrier()
        assert torch.equal(full[:4], mine(4, of=0))


@reads_memory
@on_ranks(2)
def test_a_gradient_is_not_copied_because_parameters_are_waited_for():
    """A backward's last reductions are under way when it waits for those who read parameters."""
    group, full = near(), torch.empty(8)
    (neighbor,) = same_machine.neighbors[group].values()
    finish = all_gather(full, mine(4), group, 7, kind=Kind.REDUCTION)
    if dist.get_rank() == 0:
        wait_for_readers()
        (loan,) = neighbor.loans.values()
        assert not loan.is_copy
        say("rank 0 has not waited")
    else:
        wait_until_said("rank 0 has not waited")
    finish()


@reads_memory
@on_ranks(2)
def test_what_is_lent_lives_until_it_is_read_and_no_longer():
    group, full = near(), torch.empty(8)
    copy = mine(4)  # as a unit's shard is, in mixed precision
    alive = weakref.ref(copy)
    finish = all_gather(full, copy, group, 7)
    del copy
    gc.collect()
    assert alive() is not None
    finish()
    dist.barrier()  # both have read
    del finish
    all_gather(torch.empty(8), mine(4), group, 8)()  # the next one drops the last one
    gc.collect()
    assert alive() is None
    wait_for_readers()


@reads_memory
@on_ranks(2)
def test_after_a_forward_a_program_may_change_parameters_at_once():
    """Rank 1 reads late. Rank 0 has not waited for it in the forward, but it does at its end."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = mine(8).view(1, 8)
    expected = plain(x)
    model = FSDP(plain, process_group=near(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    copy = same_machine.copy_memory

    def late(process: int, address: int, into: int, nbytes: int) -> None:
        if dist.get_rank() == 1 and nbytes > 100:
            time.sleep(0.02)
        copy(process, address, into, nbytes)

    with patch.object(same_machine, "copy_memory", late), torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), expected)
            kept = [param.clone() for param in model.parameters()]
            for param in model.parameters():
                param.zero_()
            dist.barrier()
            for param, values in zip(model.parameters(), kept, strict=True):
                param.copy_(values)
            dist.barrier()


class Refuses(TorchDispatchMode):
    """A program's own mode, which also sees what is run to receive a message."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "split" in str(function):
            raise RuntimeError("no operation of this kind, please")
        return function(*args, **(kwargs or {}))


@reads_memory
@on_ranks(2)
def test_an_error_of_this_rank_is_not_put_on_the_others():
    group = near()
    _, finish = collectives.reduce_scatter(mine(8), group, 1.0, 7)
    with pytest.raises(RuntimeError) as error, Refuses():
        finish()
    assert str(error.value) == "no operation of this kind, please"
    dist.barrier()
    same_machine.leave(group)


def test_an_error_of_gloos_is():
    work = Mock(spec=dist.Work)
    work.wait = MethodType(Mock(side_effect=RuntimeError("Connection closed by peer")), work)
    message = Mock(kind=Kind.REDUCTION, verdict="rank 1 is elsewhere")
    with pytest.raises(RuntimeError, match=r"^rank 1 is elsewhere$") as error:
        wait_for([work], message)()
    assert "Connection closed by peer" in str(error.value.__cause__)
    assert not deadlock_watch.waiting and message not in deadlock_watch.unfinished


def test_a_rank_asks_for_data_before_it_sends_its_own():
    """Else gloo's word that the other rank may begin waits behind this rank's data: on a link of
    1 Gbit/s the two directions took turns, at 500 Mbit/s each."""
    called = []

    class Group:
        def send(self, tensors, to, tag):
            called.append(("send", tensors[0].item(), to))

        def recv(self, tensors, source, tag):
            called.append(("receive", tensors[0].item(), source))

    tensors = [torch.tensor(number) for number in range(4)]
    send_recv(tensors[:2], 5, lambda: tensors[2:], 6, SimpleNamespace(group=Group(), tag=0))
    assert called == [("receive", 2, 6), ("receive", 3, 6), ("send", 0, 5), ("send", 1, 5)]


@on_ranks(2)
def test_gloos_bytes_arrive_while_the_host_computes():
    """Nobody waits for the gather; its data comes all the same, beside the computation."""
    if device().type == "cuda":
        pytest.skip("the progress of gloo's threads; on CUDA streams do it")
    full = torch.full((2000,), float("nan"))
    finish = collectives.all_gather(full, torch.ones(1000), dist.new_group(), tag=7)
    products, patience = 0, Patience(30)
    while full.isnan().any() and patience.left:
        torch.ones(50, 50) @ torch.ones(50, 50)
        products += 1
        patience.count()
    assert not full.isnan().any(), f"nothing arrived during {products} products"
    finish()
