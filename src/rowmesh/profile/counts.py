"""Counts of single rows of one table: they can be added up, and never take more than a bound."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowmesh.stats import distinct

__all__ = ["PHASES", "Asked", "Ints", "TableCounts", "are_in"]

Ints = NDArray[np.int64]
PHASES: Final = 4  # batches are told apart by step mod 4
_ODD, _REQUESTS, _AGAIN, _WIDTH = 2, 4, 6, 7  # see TableCounts.numbers


class Asked(NamedTuple):
    """What one batch asks of one table.

    Args:
        rows: Distinct rows, ascending.
        counts: Requests for each.
        lengths: Ids in each bag.
    """

    rows: Ints
    counts: Ints
    lengths: Ints


def are_in(rows: Ints, others: Ints) -> NDArray[np.bool_]:
    """Which of ``rows`` are among ``others``, ascending."""
    if not len(others):
        return np.zeros(len(rows), dtype=bool)
    place = np.minimum(np.searchsorted(others, rows), len(others) - 1)
    found: NDArray[np.bool_] = others[place] == rows
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableCounts:
    """Rows of one table, and how often each was asked for.

    A row's line of ``numbers``::

        0 to 3   batches that contain it, of steps 0, 1, 2, 3 mod 4
        4, 5     requests for it, of even and of odd steps
        6        of the batches in column 3, those whose step before has it on any rank

    Exact while ``error`` is 0. Otherwise the hottest are kept: a kept row is in at most ``error``
    more batches than counted, a row not kept in at most ``error``; and the same of requests and
    ``requests_error``.

    Args:
        rows: Ascending.
        numbers: ``[rows, 7]``.
        error: In batches.
        requests_error: In requests.
    """

    rows: Ints
    numbers: Ints
    error: int = 0
    requests_error: int = 0

    @staticmethod
    def nothing() -> "TableCounts":
        """Of no batch."""
        return TableCounts(
            rows=np.empty(0, dtype=np.int64), numbers=np.empty((0, _WIDTH), dtype=np.int64)
        )

    @staticmethod
    def of_steps(steps: Sequence[Sequence[Asked]]) -> "TableCounts":
        """Of consecutive steps, each with a batch for every rank; the first is step 0 mod 4."""
        batches = [asked for step in steps for asked in step]
        if not batches:
            return TableCounts.nothing()
        sizes = [len(asked.rows) for asked in batches]
        phases = [s % PHASES for s, step in enumerate(steps) for _ in step]
        phase = np.repeat(np.asarray(phases, dtype=np.int64), sizes)
        counts = np.concatenate([asked.counts for asked in batches])
        rows, place = np.unique(
            np.concatenate([asked.rows for asked in batches]), return_inverse=True
        )
        numbers = np.zeros((len(rows), _WIDTH), dtype=np.int64)
        found = np.bincount(place * PHASES + phase, minlength=PHASES * len(rows))
        numbers[:, :_REQUESTS] = found.reshape(len(rows), PHASES)
        # bincount adds weights in float64, which is exact up to 2^53
        found = np.bincount(place * 2 + phase % 2, weights=counts, minlength=2 * len(rows))
        numbers[:, _REQUESTS:_AGAIN] = found.reshape(len(rows), 2)
        numbers[:, _AGAIN] = np.bincount(place[_repeated(steps)], minlength=len(rows))
        return TableCounts(rows=rows, numbers=numbers)

    @property
    def presence(self) -> Ints:
        """Batches that contain each row."""
        return self._sum(0, 1, 2, 3)

    @property
    def requests(self) -> Ints:
        """Requests for each row."""
        return self._sum(4, 5)

    @property
    def first_pairs(self) -> Ints:
        """Batches of steps 0 and 1 mod 4 that contain each row."""
        return self._sum(0, 1)

    @property
    def later(self) -> Ints:
        """Batches of steps 3 mod 4 that contain each row."""
        return self._sum(3)

    @property
    def again(self) -> Ints:
        """Of these, those whose step before has the row on any rank."""
        return self._sum(_AGAIN)

    def halves(self, parity: int) -> tuple[Ints, Ints]:
        """Batches of even (0) or odd (1) steps that contain each row, and their requests."""
        return self._sum(parity, parity + _ODD), self._sum(_REQUESTS + parity)

    def merged(self, other: "TableCounts") -> "TableCounts":
        """Counts of the batches of both; errors add up, since both may have dropped a row."""
        new = other.rows[~are_in(other.rows, self.rows)]
        mine = np.arange(len(self.rows)) + np.searchsorted(new, self.rows)
        rows = np.empty(len(self.rows) + len(new), dtype=np.int64)
        rows[mine] = self.rows
        rows[np.arange(len(new)) + np.searchsorted(self.rows, new)] = new
        numbers = np.zeros((len(rows), _WIDTH), dtype=np.int64)
        numbers[mine] = self.numbers
        numbers[np.searchsorted(rows, other.rows)] += other.numbers
        return TableCounts(
            rows=rows,
            numbers=numbers,
            error=self.error + other.error,
            requests_error=self.requests_error + other.requests_error,
        )

    def pruned(self, bound: int) -> "TableCounts":
        """The same, or if there are more than ``bound`` rows, three quarters as many.

        The rows in fewest batches go, of equal ones the larger id; ``error`` grows by the largest
        number of batches that a dropped row is in, ``requests_error`` likewise.
        """
        if len(self.rows) <= bound:
            return self
        presence = self.presence
        order = np.argsort(-presence, kind="stable")
        kept, gone = np.sort(order[: bound * 3 // 4]), order[bound * 3 // 4 :]
        return replace(
            self,
            rows=self.rows[kept],
            numbers=self.numbers[kept],
            error=self.error + int(presence[gone[0]]),
            requests_error=self.requests_error + int(self.requests[gone].max()),
        )

    def _sum(self, *columns: int) -> Ints:
        found: Ints = self.numbers[:, list(columns)].sum(axis=1)
        return found


def _repeated(steps: Sequence[Sequence[Asked]]) -> NDArray[np.bool_]:
    """Of every row of every batch: is this step 3 mod 4, and has the step before the row?"""
    found = []
    for s, step in enumerate(steps):
        if s % PHASES == PHASES - 1:
            before = distinct(np.concatenate([asked.rows for asked in steps[s - 1]]))
            found += [are_in(asked.rows, before) for asked in step]
        else:
            found += [np.zeros(len(asked.rows), dtype=bool) for asked in step]
    return np.concatenate(found)
