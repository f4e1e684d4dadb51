"""claims.py: what others have measured comes out, and the table is not stale."""

import pytest

from tests.claims import CLAIMS, README, readme_with


@pytest.mark.slow
def test_all_claims_hold_and_are_in_the_table():
    rows = [claim() for claim in CLAIMS]
    assert not [row for row in rows if not row.holds]
    assert README.read_text() == readme_with(rows)
