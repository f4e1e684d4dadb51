"""claims.py: what others have measured comes out, and the tables are not stale."""

import pytest

from tests.claims import CLAIMS, README, approaches, claims, readme_with, t5_variations


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_claims_hold_and_are_in_the_table():
    rows = [claim() for claim in CLAIMS]
    assert not [row for row in rows if not row.holds]
    assert README.read_text() == readme_with(claims=claims(rows))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_tables_are_not_stale():
    text = readme_with(approaches=approaches(), t5_variations=t5_variations())
    assert README.read_text() == text
