"""Whole numbers of one table that add up from chunk to chunk: lengths, repeats, reuse, growth."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rowmesh.profile.counts import PHASES, Asked, Ints, are_in
from rowmesh.stats import distinct

__all__ = ["BINS", "TableTally", "bin_names", "bin_of"]

BINS: Final = 17  # 1, 2, 3-4, 5-8, ..., above 32,768
_EDGES = 1 << np.arange(BINS - 1, dtype=np.int64)
_WIDTHS = 48  # runs of 1, 2, 4, ... batches; more than any chunk has
_LENGTHS: Final = {  # of the fields that are no single number
    "lengths": 1 + BINS,
    "repeats": BINS,
    "followed": PHASES,
    "collided": PHASES,
    "runs": _WIDTHS,
    "num_runs": _WIDTHS,
}


def bin_of(numbers: Ints) -> Ints:
    """The bin of each number from 1 on: j holds 2^(j-1) < n <= 2^j, the last all above."""
    return np.searchsorted(_EDGES, numbers).astype(np.int64)


def bin_names() -> list[str]:
    """1, 2, 3-4, 5-8, ...; as `bin_of` numbers them."""
    middle = [f"{2 ** (j - 1) + 1}-{2**j}" for j in range(2, BINS - 1)]
    return ["1", "2", *middle, f">{2 ** (BINS - 2)}"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableTally:
    """Sums over batches of one table. A batch is one rank's batch of one step.

    Args:
        requests: Ids asked for.
        bags: Bags with at least one id.
        longest: Ids in the longest bag.
        lengths: Bags by their ids: none, then the bins of `bin_of`.
        distinct: Distinct rows, batch by batch.
        repeats: Distinct rows of a step, all ranks together, by how often they come in it.
        followed: Distinct rows, batch by batch, of batches with a step before; by step mod 4.
        reused: Of these, those in the same rank's batch of the step before.
        collided: Of these, those in any rank's batch of the step before; by step mod 4.
        runs: Distinct rows of runs of 1, 2, 4, ... batches in a row.
        num_runs: And how many such runs there were.
    """

    requests: int
    bags: int
    longest: int
    lengths: Ints
    distinct: int
    repeats: Ints
    followed: Ints
    reused: int
    collided: Ints
    runs: Ints
    num_runs: Ints

    @staticmethod
    def of_steps(
        steps: Sequence[Sequence[Asked]], before: Sequence[Asked] | None = None
    ) -> "TableTally":
        """Of consecutive steps, each with a batch for every rank; the first is step 0 mod 4.

        Runs go through the steps, and in a step through its ranks, and never beyond these steps.

        Args:
            steps: The batches.
            before: Those of the step before the first, if there is one.
        """
        batches = [asked for step in steps for asked in step]
        lengths = np.concatenate([asked.lengths for asked in batches])
        histogram = np.zeros(1 + BINS, dtype=np.int64)
        histogram[0] = np.count_nonzero(lengths == 0)
        histogram[1:] = np.bincount(bin_of(lengths[lengths > 0]), minlength=BINS)
        followed, reused, collided = _follow(steps, before)
        runs, num_runs = _grow([asked.rows for asked in batches])
        return TableTally(
            requests=int(lengths.sum()),
            bags=int(np.count_nonzero(lengths)),
            longest=int(lengths.max(initial=0)),
            lengths=histogram,
            distinct=sum(len(asked.rows) for asked in batches),
            repeats=np.sum([_repeats(step) for step in steps], axis=0),
            followed=followed,
            reused=reused,
            collided=collided,
            runs=runs,
            num_runs=num_runs,
        )

    def merged(self, other: "TableTally") -> "TableTally":
        """Of the batches of both."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "longest"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return TableTally(longest=max(self.longest, other.longest), **sums)

    def to_vector(self) -> Ints:
        """All numbers, field after field."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return np.concatenate([np.atleast_1d(np.asarray(v, dtype=np.int64)) for v in values])

    @staticmethod
    def from_vector(vector: Ints) -> "TableTally":
        """The tally whose `to_vector` this is.

        Raises:
            ValueError: If it has another length.
        """
        names = [f.name for f in dataclasses.fields(TableTally)]
        ends = np.cumsum([_LENGTHS.get(name, 1) for name in names])
        if vector.shape != (ends[-1],):
            raise ValueError(f"sums of a table are {ends[-1]} numbers, not {vector.shape}")
        parts = dict(zip(names, np.split(vector, ends[:-1]), strict=True))
        made: dict[str, Any] = {
            name: part if name in _LENGTHS else int(part[0]) for name, part in parts.items()
        }
        return TableTally(**made)

    def growth(self) -> list[float]:
        """Mean distinct rows of runs of 1, 2, 4, ... batches; never fewer for more of them."""
        known = np.count_nonzero(self.num_runs)
        means = self.runs[:known] / self.num_runs[:known]
        found: list[float] = np.maximum.accumulate(means).tolist()
        return found


def _repeats(step: Sequence[Asked]) -> Ints:
    rows = np.concatenate([asked.rows for asked in step])
    _, place = np.unique(rows, return_inverse=True)
    counts = np.bincount(place, weights=np.concatenate([asked.counts for asked in step]))
    return np.bincount(bin_of(counts.astype(np.int64)), minlength=BINS).astype(np.int64)


def _follow(
    steps: Sequence[Sequence[Asked]], before: Sequence[Asked] | None
) -> tuple[Ints, int, Ints]:
    """Rows with a step before, those of them in the rank's own batch of it, and in any rank's."""
    followed, collided = (np.zeros(PHASES, dtype=np.int64) for _ in range(2))
    reused = 0
    for s, step in enumerate(steps):
        if before is not None:
            union = distinct(np.concatenate([asked.rows for asked in before]))
            for asked, own in zip(step, before, strict=True):
                followed[s % PHASES] += len(asked.rows)
                reused += int(are_in(asked.rows, own.rows).sum())
                collided[s % PHASES] += int(are_in(asked.rows, union).sum())
        before = step
    return followed, reused, collided


def _grow(rows: list[Ints]) -> tuple[Ints, Ints]:
    """Distinct rows of all whole runs of 1, 2, 4, ... batches, and how many runs."""
    sums, numbers = (np.zeros(_WIDTHS, dtype=np.int64) for _ in range(2))
    level = 0
    while rows:
        sums[level], numbers[level] = sum(map(len, rows)), len(rows)
        rows = [np.union1d(a, b) for a, b in zip(rows[0::2], rows[1::2], strict=False)]
        level += 1
    return sums, numbers
