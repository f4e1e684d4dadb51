"""unit_state.py: each transition, and those that there are not."""

import pytest

from minifsdp.core.unit_state import ShardedState, TrainingState, UnitState

pytestmark = pytest.mark.direct
STEP = ("run_forward", "start_backward", "complete_grad", "end_backward")


def after(*transitions):
    state = UnitState()
    for transition in transitions:
        arguments = (7,) if transition == "start_backward" else ()
        getattr(state, transition)(*arguments)
    return state


def test_a_unit_is_sharded_again_after_its_use_and_also_without_one():
    assert after().sharded is ShardedState.SHARDED
    assert after("start_unshard").sharded is ShardedState.UNSHARDING
    assert after("start_unshard", "finish_unshard").sharded is ShardedState.UNSHARDED
    for used in (("start_unshard", "finish_unshard"), ("start_unshard",)):
        assert after(*used, "reshard").sharded is ShardedState.SHARDED
        assert after(*used, "reshard", "start_unshard").sharded is ShardedState.UNSHARDING


@pytest.mark.parametrize(
    "transitions",
    [
        ("start_unshard", "start_unshard"),
        ("start_unshard", "finish_unshard", "start_unshard"),
        ("finish_unshard",),
        ("start_unshard", "finish_unshard", "finish_unshard"),
        ("reshard",),
        ("start_unshard", "reshard", "reshard"),
        ("start_backward", "start_backward"),
    ],
    ids=" ".join,
)
def test_what_would_lose_or_double_a_gather_or_a_backward_is_an_error(transitions):
    after(*transitions[:-1])
    with pytest.raises(AssertionError):
        after(*transitions)


def test_a_training_step():
    expected = [
        TrainingState.IDLE,
        TrainingState.FORWARD,
        TrainingState.PRE_BACKWARD,
        TrainingState.POST_BACKWARD,
        TrainingState.FORWARD,  # another graph may go through the unit
    ]
    assert [after(*STEP[:n]).training for n in range(len(STEP) + 1)] == expected
    for n in range(len(STEP) + 1):
        assert after(*STEP[:n], "start_step").training is TrainingState.IDLE
    assert after(*STEP[:2]).graph_task == 7


def test_a_recomputation_in_a_backward_is_no_new_forward():
    assert after(*STEP[:2], "run_forward").training is TrainingState.PRE_BACKWARD


def test_a_unit_that_has_not_run_does_not_wait_for_a_backward():
    assert after("end_backward").training is TrainingState.IDLE


def test_a_gradient_may_come_without_a_backward_that_needs_parameters():
    assert after("run_forward", "complete_grad").training is TrainingState.POST_BACKWARD
