"""root_settings.py: the arguments that decide how a step runs."""

import pytest

from minifsdp import BackwardPrefetch, ForwardPrefetch, NoLimit, SynchronizeAfterFree
from minifsdp.wrapping.root_settings import make_limiter, make_prefetcher


@pytest.mark.direct
def test_what_the_argument_means():
    assert isinstance(make_limiter(False), NoLimit)
    assert make_limiter(True).limit == 2 and make_limiter(1).limit == 1
    mine = SynchronizeAfterFree()
    assert make_limiter(mine) is mine


@pytest.mark.direct
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_admits_nothing_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit_all_gathers={limit}: at least 1 unit"):
        make_limiter(limit)


@pytest.mark.direct
@pytest.mark.parametrize("limit", [None, "2", 2.5, NoLimit])
def test_a_limit_of_another_kind_is_refused(limit):
    with pytest.raises(TypeError, match=r"limit_all_gathers=.*: expected True .*, False .*, a num"):
        make_limiter(limit)


@pytest.mark.direct
@pytest.mark.parametrize("forward", [None, True, False, ForwardPrefetch.FORWARD_POST])
def test_only_none_is_decided_by_the_device(forward):
    prefetcher = make_prefetcher(None, forward)
    given = prefetcher.forward
    for runs_ahead in (True, False, True):
        prefetcher.adapt_to(host_runs_ahead=runs_ahead)
        decided = None if runs_ahead else ForwardPrefetch.FORWARD_PRE
        assert prefetcher.forward is (decided if forward is None else given)


@pytest.mark.direct
@pytest.mark.parametrize("backward", [None, *BackwardPrefetch])
def test_true_is_forward_pre_and_false_is_none(backward):
    assert make_prefetcher(backward, True).forward is ForwardPrefetch.FORWARD_PRE
    assert make_prefetcher(backward, False).forward is None
    assert make_prefetcher(backward, True).backward is backward
