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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.concept}: {m.mistake}")
def test_a_mutant_changes_one_place(mutant):
    if reason := rewritten(mutant.concept):
        pytest.skip(reason)
    source = Path(ROOT, "minifsdp", f"{mutant.concept}.py").read_text()
    assert source.count(mutant.original) == 1 and mutant.original != mutant.replacement
    assert Path(ROOT, its_tests(mutant.noticed_by or mutant.concept)).exists()
    compile(source.replace(mutant.original, mutant.replacement), mutant.concept, "exec")


@pytest.mark.parametrize("concept", CONCEPTS)
def test_every_concept_has_its_test_and_at_least_three_mutants(concept):
    assert Path(ROOT, its_tests(concept)).exists()
    assert Counter(mutant.concept for mutant in MUTANTS)[concept] >= 3
