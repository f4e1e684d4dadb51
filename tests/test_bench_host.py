"""bench/host.py: minifsdp's own work is the same on 8 ranks and on 1,024."""

from tests.bench.host import RANKS, results, work


def test_minifsdps_host_work_does_not_grow_with_the_ranks():
    """Counted in tensors that operators return: one that cuts a tensor for all ranks returns 1,024.
    FSDP1, which does so in each step, and FSDP2, when it wraps, show that they would be seen."""
    few, many = (work(results, ranks, units=3, rounds=1) for ranks in RANKS)
    for name in ("mini", "mini rows"):
        assert many[name] == few[name] and few[name].later > 0
    assert many["FSDP1"].later > 10 * few["FSDP1"].later
    assert many["FSDP2"].wrapping > 10 * few["FSDP2"].wrapping
