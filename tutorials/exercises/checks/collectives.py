"""Checks of collectives.py: real messages between two and three processes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.patience import Patience
from tutorials.exercises.catalog import check
from tutorials.exercises.judge import equal, ratio


def _tensor(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank has: other values on each, of very different sizes, so that the order of
    additions shows in the last bits."""
    generator = torch.Generator().manual_seed(torch.initial_seed() + 100 * rank)
    size = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * size).to(dtype)


def _called(got: Any) -> str | None:
    """Of an error: what has been mistaken about send_recv()."""
    said = got.get("message", "") if isinstance(got, dict) else ""
    if "not callable" in said:
        return "places of send_recv() is a function, which returns the tensors to receive"
    if "has no attribute 'wait'" in said:
        return "send_recv() returns a list, and wait_for() gets one list of all works"
    return None


def _gather(what: str, want: Any, got: Any) -> str | None:
    if said := _called(got):
        return said
    if "one machine" in what:
        return (
            "on one machine places of send_recv() is called when it is waited for, after your "
            "loop: a lambda finds the loop's last values then; partial() keeps its own"
        )
    if "returns" in what:
        return "it should start the exchange and return; the returned function waits for it"
    if "sends before" in what:
        return "it sends only when it is waited for, so nothing travels while the rank computes"
    if "elements among" in what:
        return (
            "the ranks' parts are not of equal length here: the first has one element more "
            "(tensor_split), so receive into what belongs to the rank that sends"
        )
    if "kinds" in what:
        return "a message of another kind was taken for it: use the tag of Message, not the unit's"
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        return None
    chunks, found = want.chunk(dist_size(what)), got.chunk(dist_size(what))
    if any(f.isnan().any() for f in found):
        missing = [str(i) for i, f in enumerate(found) if f.isnan().any()]
        return f"nothing was written where the chunk of rank {', '.join(missing)} belongs"
    if sorted(c.tolist() for c in chunks) == sorted(f.tolist() for f in found):
        return "all chunks are there, in another order than that of the ranks"
    return None


def dist_size(what: str) -> int:
    """The number of ranks that is in the words of an observation."""
    return int(what.split(" ranks")[0].split()[-1])


def _slowly() -> None:
    """The last rank comes late, so that whoever does not wait reads what is not there yet."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.1)


def _late(call: Callable[[], Any]) -> tuple[bool, Any]:
    """Make a call that the last rank makes only when it has returned on rank 0.

    Returns:
        Whether it has, and what it has returned.
    """
    store = dist.distributed_c10d._get_default_store()
    returned = True
    if dist.get_rank() == dist.get_world_size() - 1:
        patience = Patience(2)
        while not (returned := store.check(["returned"])) and patience.left:
            time.sleep(0.002)
            patience.count()
    result = call()
    if dist.get_rank() == 0:
        store.set("returned", "yes")
    return returned, result


def _sends_at_once(call: Callable[[], Any], what: str) -> Iterator[Any]:
    """Whether the last rank gets what it waits for before the others have finished: they do so only
    when it tells them, through the store."""
    store = dist.distributed_c10d._get_default_store()
    finish, arrived = call(), True
    if dist.get_rank() == dist.get_world_size() - 1:
        finish()
        store.set(what, "arrived")
    else:
        patience = Patience(2)
        while not (arrived := store.check([what])) and patience.left:
            time.sleep(0.002)
            patience.count()
        finish()
    yield f"sends before it is waited for, {what}", arrived


@contextmanager
def _received_late(function: Callable[..., Any], numel: int) -> Iterator[None]:
    """Let send_recv() call ``places`` when it is waited for, as between ranks on one machine: these
    read each other's memory, which the grader does not allow its processes."""
    from minifsdp.comm.transport import send_recv

    def late(sent: Any, to: int, places: Any, source: int, message: Any) -> list[Any]:
        arrived = torch.empty(numel)
        works = send_recv(sent, to, lambda: [arrived], source, message)
        fill = SimpleNamespace(wait=lambda: next(iter(places())).copy_(arrived))
        return [*works, fill]

    with patch.dict(function.__globals__, send_recv=late):
        yield


def _all_gathers() -> Iterator[Any]:
    from minifsdp.comm.collectives import all_gather
    from minifsdp.comm.message_tags import Kind

    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    for numel, dtype in ((3, torch.float32), (1, torch.bfloat16), (0, torch.float32)):
        full = torch.full((size * numel,), torch.nan, dtype=dtype)
        _slowly()
        finish = all_gather(full, _tensor(rank, numel, dtype), group, tag=1)
        finish()
        yield f"full, {size} ranks, chunks of {numel} of {dtype}", full
    pair = [torch.full((size * 2,), torch.nan) for _ in range(2)]
    finishes = [all_gather(full, _tensor(rank + i, 2), group, tag=i) for i, full in enumerate(pair)]
    for finish in finishes[::-1]:  # the second one is waited for first
        finish()
    yield f"two at once, {size} ranks, the first", pair[0]
    yield f"two at once, {size} ranks, the second", pair[1]
    full = torch.empty(2 * size)
    returned, finish = _late(lambda: all_gather(full, _tensor(rank, 2), group, tag=3))
    yield f"returns before all of {size} ranks have come", returned
    finish()
    yield f"full after a late rank, {size} ranks", full
    full = torch.empty(2 * size)
    yield from _sends_at_once(
        lambda: all_gather(full, _tensor(rank, 2), group, tag=4), f"{size} ranks"
    )
    # The same unit's parameters and gradient, which ranks start in different orders.
    fulls = {kind: torch.empty(size) for kind in (Kind.PARAMETERS, Kind.GRADIENT)}
    kinds = list(fulls) if rank else list(fulls)[::-1]
    chunks = {kind: torch.full((1,), 10.0 * kind + rank) for kind in kinds}
    finishes = [all_gather(fulls[k], chunks[k], group, tag=5, kind=k) for k in kinds]
    for finish in finishes:
        finish()
    yield f"two kinds of one unit at once, {size} ranks", list(fulls.values())
    uneven = torch.full((size + 1,), torch.nan)  # the first rank has one element more
    chunk = _tensor(rank, 2)[: uneven.tensor_split(size)[rank].numel()]
    all_gather(uneven, chunk, group, tag=1)()
    dist.barrier()  # a rank that gloo has ended is noticed here
    yield f"{size + 1} elements among {size} ranks", uneven
    if size > 2:
        full = torch.full((size * 3,), torch.nan)
        with _received_late(all_gather, 3):
            all_gather(full, _tensor(rank, 3), group, tag=6)()
        yield f"full, {size} ranks on one machine", full


@check("collectives.1", ranks=2, because=_gather)
def all_gather_of_two() -> Iterator[Any]:
    yield from _all_gathers()


@check("collectives.1", ranks=3, because=_gather)
def all_gather_of_three() -> Iterator[Any]:
    yield from _all_gathers()


def _sum(what: str, want: Any, got: Any) -> str | None:
    if said := _called(got):
        return said
    if "one machine" in what:
        return _gather(what, want, got)
    if "returns" in what:
        return "it should start the exchange and return; the returned function waits and adds up"
    if "memory of its own" in what:
        return "it is a view of flat, so that the whole gradient stays in memory: make a new tensor"
    if "fp16" in what and isinstance(got, torch.Tensor) and got.isinf().any():
        return "scale each addend before it is added: the sum overflows where the mean does not"
    factor = ratio(want, got)
    if factor is not None:
        return f"it is exactly {factor:g} x too large: is each rank's part scaled, and once only"
    if isinstance(got, torch.Tensor) and got.shape == want.shape and not equal(want, got):
        close = torch.allclose(want.float(), got.float(), rtol=1e-3, atol=1e-4)
        if close:
            return (
                "only the last bits differ: the order is rank - 1, rank - 2, ..., and the own part "
                "last, each scaled before it is added"
            )
        return "these are not the sums of this rank's chunk: who gets which chunk"
    return None


def _reduce_scatters() -> Iterator[Any]:
    from minifsdp.comm.collectives import reduce_scatter

    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    for numel, dtype in ((5, torch.float32), (4, torch.bfloat16), (0, torch.float32)):
        _slowly()
        total, finish = reduce_scatter(_tensor(rank, size * numel, dtype), group, 1 / size, tag=1)
        finish()
        yield f"mean of {numel} elements of {dtype} over {size} ranks", total
    total, finish = reduce_scatter(_tensor(rank, size + 1), group, 1 / size, tag=1)
    finish()
    yield f"mean of this rank's part of {size + 1} elements among {size} ranks", total
    large = torch.full((2 * size,), 60000.0, dtype=torch.float16)
    total, finish = reduce_scatter(large, group, 1 / size, tag=1)
    finish()
    yield f"mean of large fp16 numbers over {size} ranks", total
    total, finish = reduce_scatter(_tensor(rank, size), group, 1.0, tag=2)
    finish()
    yield f"sum over {size} ranks, scale 1", total
    flat = _tensor(rank, 2 * size)
    returned, (total, finish) = _late(lambda: reduce_scatter(flat, group, 0.5, tag=3))
    yield f"returns before all of {size} ranks have come", returned
    finish()
    yield f"half of the sum after a late rank, {size} ranks", total
    alone = total.untyped_storage().nbytes() <= total.nbytes
    yield f"the sum has memory of its own, {size} ranks", alone
    if size > 2:
        with _received_late(reduce_scatter, 2):
            total, finish = reduce_scatter(_tensor(rank, 2 * size), group, 1.0, tag=4)
            finish()
        yield f"sum over {size} ranks on one machine", total


@check("collectives.2", ranks=2, because=_sum)
def reduce_scatter_of_two() -> Iterator[Any]:
    yield from _reduce_scatters()


@check("collectives.2", ranks=4, because=_sum)
def reduce_scatter_of_four() -> Iterator[Any]:
    yield from _reduce_scatters()


def _halves(what: str, want: Any, got: Any) -> str | None:
    if "returns" in what:
        return "a half is started, and its finish is yielded: who asks for it calls that"
    if "halves" in what:
        return "on a CPU there are two: yield the finish of each, one after the other"
    return _sum(what, want, got)


@check("collectives.3", ranks=3, because=_halves)
def all_reduce_of_three() -> Iterator[Any]:
    from minifsdp.comm.collectives import all_reduce

    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    for numel, scale in ((6, 1 / size), (6, 1.0), (7, 1.0)):
        flat = _tensor(rank, numel)
        count = 0
        _slowly()
        for finish in all_reduce(flat, group, scale, tag=1):
            finish()
            count += 1
        yield f"number of halves, {size} ranks", count
        yield f"scale {scale:.2f}, {numel} elements, {size} ranks", flat
    halves = iter(all_reduce(_tensor(rank, 6), group, 1.0, tag=2))
    returned, finish = _late(lambda: next(halves))
    yield f"the first half returns before all of {size} ranks have come", returned
    finish()
    for finish in halves:
        finish()
