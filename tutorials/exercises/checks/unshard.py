"""Checks of unshard.py: one unit alone, a virtual GPU, and two ranks."""

from collections.abc import Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import of_training
from tutorials.exercises.observe import at_most


def _start(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "in-place operation" in got.get("message", ""):
        return (
            "write to unit.unsharded.data and not to flat_param: that requires a gradient, and to "
            "autograd a gather is no change"
        )
    if isinstance(got, dict) and "not sharded" in what:
        return (
            "a unit that is not sharded has no group to gather among (source.group is None): copy "
            "what the source gives"
        )
    if "source has all" in what:
        return "the source says who gathers, not the unit: copy its tensor if source.group is None"
    if isinstance(got, dict) and "raised" in got:
        return (
            "is the memory allocated, is the source prepared before it is asked, and is what it "
            "sends sent"
        )
    if "state" in what:
        return "unit.state.start_unshard() says that the all-gather is about to start"
    if "passed" in what:
        return "unshard() starts the all-gather and returns: keep the event, and wait for it later"
    if "collectives" in what:
        return "one all-gather is started for a unit whose source has a group, and none otherwise"
    if "belongs" in what:
        return "allocate it in launch(), which runs on the unshard stream"
    if "races" in what and "bfloat16" in what:
        return (
            "the source casts the shard where it is asked for it: ask in launch(), which runs on "
            "the unshard stream, as the all-gather does that reads the copy"
        )
    if "races" in what:
        return "memory is used by two streams without a wait between: is it allocated in launch()"
    if "seconds" in what:
        return "the all-gather is not started ahead of the computation, so nothing hides it"
    if "bfloat16" in what:
        return "unit.source gives what is sent, in the dtype of unit.unsharded"
    return None


@check("unshard.1", because=_start)
def one_unit_alone() -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from minifsdp.core.unshard import unshard, wait_for_unshard
    from tests.lone_unit import lone_unit

    bf16 = MixedPrecision(torch.bfloat16)
    for rank, ranks in ((0, 2), (1, 2), (2, 3)):
        for words, settings in (
            ("", {}),
            (", in bfloat16", {"precision": bf16}),
            (", offloaded", {"offload": True}),
            (", offloaded, in bfloat16", {"precision": bf16, "offload": True}),
        ):
            with lone_unit(rank, ranks, **settings) as lone:
                unshard(lone.unit, lone.streams)
                name = f"rank {rank} of {ranks}{words}"
                yield f"state of the unit after unshard(), {name}", lone.unit.state.sharded
                event = lone.unit.unshard_event
                yield f"passed at once, {name}", event is None or event.query()
                wait_for_unshard(lone.unit)
                yield f"collectives, {name}", lone.unit.shard_group.called
                yield f"what was gathered, {name}", lone.unit.unsharded.data
    for words, settings in (("in bfloat16", {"precision": bf16}), ("offloaded", {"offload": True})):
        with lone_unit(ranks=1, **settings) as lone:
            unshard(lone.unit, lone.streams)
            wait_for_unshard(lone.unit)
            yield f"what was gathered, not sharded, {words}", lone.unit.unsharded.data


@check("unshard.1", because=_start)
def the_source_says_who_gathers() -> Iterator[Any]:
    from minifsdp.core.unshard import OwnShard, unshard, wait_for_unshard
    from tests.lone_unit import lone_unit

    class Everything(OwnShard):
        """A source that has kept what all ranks have."""

        def tensor(self, unit: Any, streams: Any) -> torch.Tensor:
            return torch.ones(unit.layout.padded_numel)

    with lone_unit() as lone:
        lone.unit.source = Everything(None)
        unshard(lone.unit, lone.streams)
        wait_for_unshard(lone.unit)
        yield "collectives of a sharded unit whose source has all", lone.unit.shard_group.called
        yield "what was gathered of a source that has all", lone.unit.unsharded.data


@check("unshard.1", because=_start)
def on_a_gpu() -> Iterator[Any]:
    from minifsdp import CPUOffload, MixedPrecision
    from minifsdp.sim.figures.report import ALL_GATHER
    from minifsdp.sim.tape import Op
    from tutorials.exercises.virtual import train

    settings: dict[str, dict[str, Any]] = {
        "without offload": {},
        "with offload": {"cpu_offload": CPUOffload(True)},
        "in bfloat16": {"mixed_precision": MixedPrecision(torch.bfloat16)},
    }
    for words, chosen in settings.items():
        gpu = train(**chosen)
        gathers = [op for op in gpu.tape if isinstance(op, Op) and op.name == ALL_GATHER]
        owners = {buffer.owner for op in gathers for buffer in op.writes}
        yield f"stream that the memory of a gather belongs to, {words}", sorted(owners)
        yield f"races in a training step {words}", [str(race) for race in gpu.races()][:1]
        yield at_most(f"seconds of a training step {words}", gpu.report()["step"], slack=0.02)


def _in_training(what: str, want: Any, got: Any) -> str | None:
    raised = isinstance(got, dict) and "raised" in got
    return _start(what, want, got) if raised else of_training(what, want, got)


@check("unshard.1", ranks=2, because=_in_training)
def two_ranks_train() -> Iterator[Any]:
    from minifsdp import ShardingStrategy
    from tutorials.exercises import parallel

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        yield from parallel.train(sharding_strategy=strategy)


def _wait(what: str, want: Any, got: Any) -> str | None:
    if "event is kept" in what:
        return "forget the event when it was waited for: it would be waited for once more"
    if "state" in what:
        return "after the wait an UNSHARDING unit is UNSHARDED; units in other states stay"
    if "host" in what or "seconds" in what:
        return "let the compute stream wait, and not the host: event.wait(), not synchronize()"
    if "races" in what or "values" in what:
        return "the layers compute before the all-gather has written: nothing waits for its event"
    return None


@check("unshard.2", because=_wait)
def values_are_there_after_the_wait() -> Iterator[Any]:
    from minifsdp.core.unshard import unshard, wait_for_unshard
    from tests.lone_unit import lone_unit

    with lone_unit() as lone:
        wait_for_unshard(lone.unit)
        yield "state of a unit that was not gathered", lone.unit.state.sharded
        unshard(lone.unit, lone.streams)
        wait_for_unshard(lone.unit)
        yield "values after the wait", lone.unit.unsharded.data
        yield "state after the wait", lone.unit.state.sharded
        yield "event is kept", lone.unit.unshard_event is not None
        wait_for_unshard(lone.unit)
        yield "state after a second wait", lone.unit.state.sharded


@check("unshard.2", because=_wait)
def the_device_waits_and_not_the_host() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    gpu = train(limit_all_gathers=False)
    yield "races in a training step", [str(race) for race in gpu.races()][:1]
    yield at_most("seconds in which the host waits", gpu.report()["other host stalls"])
    yield at_most("seconds of a training step", gpu.report()["step"], slack=0.02)
