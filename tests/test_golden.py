"""Golden cases: what a plan gives does not change unless it is meant to (tests/golden)."""

from typing import Any

import pytest

from tests import golden
from tests.cases import Case

ROWS = golden.read()
PARTS = 8


def differences(rows: list[tuple[Case, dict[str, Any]]]) -> list[tuple[int, list[str]]]:
    """Places of the cases that differ, and in what."""
    found = [(n, golden.found(case), expected) for n, (case, expected) in enumerate(rows)]
    return [
        (n, [key for key in ours if ours[key] != expected[key]])
        for n, ours, expected in found
        if ours != expected
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_plans_bytes_and_bits_are_those_stored(part: int) -> None:
    assert not differences(ROWS[part::PARTS])


def test_there_are_enough_cases_of_every_kind() -> None:
    assert len(ROWS) >= 500
    shapes = {(case.world, case.hosts) for case, _ in ROWS}
    assert shapes == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
    labels = [values["plan"]["exactness"] for _, values in ROWS]
    assert all(labels.count(label) >= 40 for label in ("E0", "E1", "E2", "E3"))


def test_a_stored_hash_that_is_off_is_noticed() -> None:
    case, expected = next(row for row in ROWS if row[0].world == 2 and row[0].rule == "rowwise")
    wrong = expected | {"tables": "0" * 16}
    assert differences([(case, wrong)]) == [(0, ["tables"])]
