"""Rows that exact look-ahead would have to fetch late: those that the running step updates."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, Plan, TablePlan
from rowmesh.placement.hot import hot_ids

__all__ = ["count_collisions", "share_of_collisions"]


def share_of_collisions(plan: Plan, steps: Sequence[Sequence[KeyedJaggedTensor]]) -> float | None:
    """Of the distinct rows without a copy that a rank asks for, those in the step before it.

    ``sum |F(r, i+1) & U(i)| / sum |F(r, i+1)|``, with ``F(r, i)`` the rows that rank r has to
    fetch in step i, and ``U(i)`` those that any rank asks for in it, over all tables, ranks and
    pairs of consecutive steps.

    Args:
        plan: Whose hot rows, and tables on every rank, are read where they are needed.
        steps: Consecutive ones; for each a batch of every rank.

    Returns:
        None if nothing is fetched.
    """
    late, fetched = count_collisions(plan, steps)
    return late / fetched if fetched else None


def count_collisions(plan: Plan, steps: Sequence[Sequence[KeyedJaggedTensor]]) -> tuple[int, int]:
    """The two sums of `share_of_collisions`: late rows, and rows to fetch."""
    late = fetched = 0
    for table in plan.tables:
        if table.rest.copies is Copies.WORLD:
            continue
        asked = [[_cold_rows(table, batch) for batch in step] for step in steps]
        for before, after in itertools.pairwise(asked):
            updated = np.unique(np.concatenate(before))
            fetched += sum(len(rows) for rows in after)
            late += sum(int(np.isin(rows, updated).sum()) for rows in after)
    return late, fetched


def _cold_rows(table: TablePlan, batch: KeyedJaggedTensor) -> NDArray[np.int64]:
    rows = np.unique(np.concatenate([batch[f].values().numpy() for f in table.feature_names]))
    for _, hot in table.hot:
        rows = np.setdiff1d(rows, hot_ids(hot, where=f"table {table.name!r}"), assume_unique=True)
    return rows
