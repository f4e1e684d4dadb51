"""lagging.py: on a device that does nothing before it is waited for, training is what it is."""

from itertools import product

import pytest

from minifsdp import BackwardPrefetch, CPUOffload, ForwardPrefetch, ShardingStrategy
from minifsdp.comm.groups import HYBRID
from tests.lagging import DeferringStream, deferring_device
from tests.parity import BF16, BF16_SUMMED_IN_FP32, FULL, check_parity
from tests.ranks import run

OFFLOADS = {"": None, "offload": CPUOffload(True)}
SAMPLE = list(
    product(
        ("transformer", "mlp_nested", "odd", "frozen", "twice", "conv"),
        (FULL, BF16, BF16_SUMMED_IN_FP32),
        (*BackwardPrefetch, None),
        (*ForwardPrefetch, False),
        (True, 1, False, 3),
    )
)[::61]  # every setting of each kind is in it, with others each time
WORLDS = [
    *product((1, 2), ShardingStrategy.__members__),
    *((4, strategy.name) for strategy in HYBRID),
]


def test_a_stream_does_nothing_until_it_is_waited_for_and_then_everything_in_order():
    log = []
    first, second = DeferringStream(), DeferringStream()

    def work(name):
        def launch():
            log.append(f"start {name}")
            return lambda: log.append(f"end {name}")

        return launch

    a = first.submit(work("a"))
    second.wait_event(a)
    b = second.submit(work("b"))
    c = second.submit(work("c"))
    assert log == [] and not b.query()
    b.wait()
    assert log == ["start a", "end a", "start b", "end b"]
    assert a.query() and b.query() and not c.query()
    b.wait()
    c.wait()
    assert log[4:] == ["start c", "end c"]


def test_every_setting_is_in_the_sample():
    # True and 1 are different limits.
    found = [len(set(map(repr, values))) for values in zip(*SAMPLE, strict=True)]
    assert found == [6, 3, 3, 3, 4]


def check(strategy, offload, sample=SAMPLE):
    """What is read before it is there is NaN in the first step or, of what the optimizer and the
    backward leave, in the second."""
    for name, precision, backward, forward, limit in sample:
        with deferring_device():
            check_parity(
                name,
                steps=2,
                sharding_strategy=strategy,
                cpu_offload=offload,
                mixed_precision=precision,
                backward_prefetch=backward,
                forward_prefetch=forward,
                limit_all_gathers=limit,
            )


@pytest.mark.few(2)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("world_size, strategy", WORLDS)
def test_nothing_is_used_before_it_is_there(world_size, strategy, offload):
    run(check, world_size, ShardingStrategy[strategy], OFFLOADS[offload])


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_neither_is_what_comes_from_another_device(strategy):
    strategy, offload = ShardingStrategy[strategy], OFFLOADS["offload"]
    run(check, 2, strategy, offload, SAMPLE[::2], pretended_gpu=True)
