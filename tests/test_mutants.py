"""mutants.py: the list of mistakes must not rot. Whether tests notice them: `make mutants`."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, its_tests, rewritten

CONCEPTS = sorted(
    path.relative_to(ROOT / "minifsdp").with_suffix("").as_posix()
    for path in Path(ROOT, "minifsdp").rglob("*.py")
    if path.stem not in ("__init__", "api", "tape")
)


@pytest.mark.parametrize("concept", sorted({mutant.concept for mutant in MUTANTS}))
def test_each_mutant_changes_one_place(concept):
    if reason := rewritten(concept):
        pytest.skip(reason)
    source = Path(ROOT, "minifsdp", f"{concept}.py").read_text()
    for mutant in (mutant for mutant in MUTANTS if mutant.concept == concept):
        assert source.count(mutant.original) == 1, mutant
        assert mutant.original != mutant.replacement, mutant
        assert its_tests(mutant.noticed_by or concept), mutant
        compile(source.replace(mutant.original, mutant.replacement), mutant.mistake, "exec")


@pytest.mark.parametrize("concept", CONCEPTS)
def test_every_concept_has_its_test_and_at_least_three_mutants(concept):
    assert its_tests(concept)
    assert Counter(mutant.concept for mutant in MUTANTS)[concept] >= 3
