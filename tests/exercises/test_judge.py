"""tutorials/exercises/judge.py: what is said where nothing more is known of an exercise."""

from itertools import count

import pytest
import torch

from tutorials.exercises.catalog import Check
from tutorials.exercises.judge import verdict
from tutorials.exercises.observe import Seen
from tutorials.exercises.sandbox import Report

ALMOST = torch.tensor([1.5]), torch.nextafter(torch.tensor([1.5]), torch.tensor([2.0]))


@pytest.mark.parametrize(
    ("want", "got", "says"),
    [
        (2, 2.0, "it is of type float, and should be of type int"),
        ({"loss": ALMOST[0]}, {"loss": ALMOST[1]}, ""),  # of the same type, and printed alike
    ],
)
def test_a_type_is_named_where_that_is_the_difference(want, got, says):
    check = Check(count, 1, 1.0, lambda what, want, got: None)
    reports = [Report([[Seen("a value", value)]], "", False) for value in (want, got)]
    state, message = verdict(check, *reports)
    assert state == "wrong" and "a value" in message
    assert says in message and ("of type" in message) == bool(says)


@pytest.mark.parametrize(
    ("want", "got", "says"),
    [
        (0.315773, 0.3157730001, "(they differ by 1e-10)"),
        (["name"] * 99 + ["head"], ["name"] * 99, "at [99]: head, and nothing"),
    ],
)
def test_what_is_printed_alike_says_where_it_differs(want, got, says):
    check = Check(count, 1, 1.0, lambda what, want, got: None)
    reports = [Report([[Seen("a value", value)]], "", False) for value in (want, got)]
    assert says in verdict(check, *reports).message
