"""sim/calibration/fit.py: two constants from samples."""

import pytest

from minifsdp.sim.calibration.fit import Sample, fit

A, B = 2e-3, 5e-9
EXACT = [Sample(n, size, n * A + size * B) for n, size in ((1, 1e3), (1, 1e6), (3, 1e7), (2, 1e4))]


def test_it_finds_what_samples_were_made_of():
    assert fit(EXACT) == pytest.approx((A, B))


def test_short_samples_count_as_much_as_long_ones():
    """One of a second and one of a microsecond, both 10 % off in the same direction."""
    rows = [Sample(1, 0, 1.1e-6), Sample(0, 1, 1.1), Sample(1, 0, 0.9e-6), Sample(0, 1, 0.9)]
    a, b = fit(rows)
    assert a / 1e-6 == pytest.approx(b / 1.0) == pytest.approx(0.99, abs=0.02)


def test_neither_is_below_zero():
    """Larger ones are faster, which a sum of two positive parts cannot be."""
    a, b = fit([Sample(1, 1, 2.0), Sample(1, 2, 1.0), Sample(1, 3, 0.5)])
    assert (a > 0 and b == 0) or (a == 0 and b > 0)
    a, b = fit([Sample(1, 1, 1.0), Sample(2, 1, 0.5)])
    assert a == 0 and b > 0


def test_what_cannot_be_told_apart_is_given_to_one():
    a, b = fit([Sample(1, 2, 4.0), Sample(2, 4, 8.0)])
    assert (a, b) in ((4.0, 0.0), (0.0, 2.0))


def test_a_constant_without_samples_of_it_is_zero():
    assert fit([Sample(2, 0, 3.0)]) == (1.5, 0.0)
    assert fit([Sample(0, 2, 3.0)]) == (0.0, 1.5)


@pytest.mark.parametrize("rows", [[], [Sample(1, 1, 0.0)], [Sample(0, 0, 1.0)]])
def test_samples_of_nothing_are_refused(rows):
    with pytest.raises(ValueError, match="constants need samples that take some time"):
        fit(rows)
