"""sim/cli/values.py: what options take, and what they say to the rest."""

from argparse import ArgumentTypeError

import pytest

from minifsdp.sim.cli.values import limit, meant, number, one_of, recompute, shape, whole


@pytest.mark.parametrize(
    "kind, given, value",
    [
        (whole(9), "1", 1),
        (whole(9), "9", 9),
        (number(0, 2), "0", 0.0),
        (number(0, 2), "2e0", 2.0),
        (limit, "none", "none"),
        (limit, "12", "12"),
        (shape, "3x4", "3x4"),
        (shape, "588", "588"),
        (shape, "", ""),
        (recompute, "selective", "selective"),
        (recompute, "0.25", "0.25"),
        (one_of("a", "b"), "b", "b"),
    ],
)
def test_what_is_right_is_converted(kind, given, value):
    found = kind(given)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "kind, given",
    [
        (whole(9), "0"), (whole(9), "10"), (whole(9), "1.0"), (whole(9), ""),
        (whole(9), "9" * 9999), (number(0, 2), "-0.1"), (number(0, 2), "2.1"),
        (number(0, 2), "nan"), (number(0, 2), "inf"),
        (number(0, 2), "1,5"), (limit, "0"), (limit, "-1"), (limit, "None"), (limit, "9" * 99),
        (shape, "3x"), (shape, "0x3"), (shape, "3X4"), (shape, "-1"), (shape, "9" * 99),
        (recompute, "-1/2"), (recompute, "5/4"), (recompute, "1/0"), (recompute, "nan"),
        (one_of("a", "b"), "c"), (one_of("a", "b"), ""),
    ],
)  # fmt: skip
def test_what_is_not_is_refused_in_a_short_line(kind, given):
    with pytest.raises(ArgumentTypeError, match=r"^expected .*, got '") as refused:
        kind(given)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    "given, name",
    [
        ("tp", ""),
        ("thetas", ""),
        ("limit-3", "limit"),
        ("bacth", "batch"),
        ("BATCH", "batch"),
        ("bat", "batch"),
        ("limits", "limit"),
        ("colour", ""),
        ("list", ""),
    ],
)
def test_what_may_have_been_meant(given, name):
    assert meant(given, ["batch", "limit"]) == (f"; did you mean {name}?" if name else "")


def test_what_differs_in_its_case_alone_is_meant_first():
    assert meant("H100", ["h100-64", "h100", "h100-96"]) == "; did you mean h100?"


def test_a_name_that_goes_on_is_the_shorter_one():
    assert meant("h100-90", ["h100-64", "h100", "h100-96"]) == "; did you mean h100?"
