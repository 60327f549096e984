"""The planted bugs of `tools.mutations` fit the code, and their tests exist."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tools.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]


def test_each_mutation_changes_one_place_and_has_tests():
    wrong = []
    for one in MUTATIONS:
        count = (ROOT / one.file).read_text().count(one.before)
        if count != 1 or one.before == one.after:
            wrong.append(f"{one.name}: its text is {count} times in {one.file}")
        wrong += [f"{one.name}: no {path}" for path in one.tests if not (ROOT / path).exists()]
    assert not wrong, "\n".join(wrong)


def test_mutations_are_three_in_each_package():
    assert set(Counter(one.package for one in MUTATIONS).values()) == {3}
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS) >= 30
