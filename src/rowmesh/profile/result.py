"""`Profile`: what a pass over data found out about the rows of every table."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError, did_you_mean
from rowmesh.profile.chunks import TableSummary
from rowmesh.profile.counts import PHASES, TableCounts
from rowmesh.profile.figures import (
    SHARES,
    cover,
    extend_growth,
    find_collisions,
    find_steady,
    make_heat,
)
from rowmesh.profile.sketch import SKETCH_ERROR
from rowmesh.stats import Accesses, Stats
from rowmesh.tables import TableConfig

__all__ = ["COPIES", "Profile", "TableProfile"]

COPIES: Final = (0, 1_000, 10_000, 100_000)  # hottest rows with a copy on every rank


@dataclass(frozen=True, kw_only=True, eq=False)
class TableProfile:
    """What is known of one table. A batch is one rank's batch of one step.

    Args:
        name, num_embeddings, feature_names: Of the table.
        summary: Counts, sums and hashes.
        num_batches: Batches of steps 0, 1, 2, 3 mod 4.
        marks: Batches from the beginning, and the distinct rows of them all.
        further: Distinct rows of one more step's batches, added up over ranks; 0 if there was none.
        unseen: Of these, the rows not counted before: more than that cannot be new.
    """

    name: str
    num_embeddings: int
    feature_names: tuple[str, ...]
    summary: TableSummary
    num_batches: tuple[int, int, int, int]
    marks: tuple[tuple[int, float], ...]
    further: int
    unseen: int

    @property
    def counts(self) -> TableCounts:
        """Of single rows."""
        return self.summary.counts

    @property
    def presence(self) -> NDArray[np.float64]:
        """Of each of ``counts.rows``: the probability that a rank's batch contains it."""
        return self.counts.presence / sum(self.num_batches)

    @property
    def growth(self) -> tuple[float, ...]:
        """Distinct rows of 1, 2, 4, ... batches together."""
        return tuple(extend_growth(self.summary.tally.growth(), self.marks))

    @property
    def accesses(self) -> Accesses:
        """Means of a batch and the heat of single rows, for planners."""
        tally, total = self.summary.tally, sum(self.num_batches)
        p0, p1, p2, p3 = self.num_batches
        return Accesses(
            requests=tally.requests / total,
            bags=tally.bags / total,
            growth=self.growth,
            heat=make_heat(self.counts, p0 + p2, p1 + p3),
        )

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """Every figure of the table, as plain numbers; None where nothing can be said."""
        counts, tally, total = self.counts, self.summary.tally, sum(self.num_batches)
        seen, (steady, steady_requests) = self.summary.seen, find_steady(counts, total)
        sizes = {"seen": seen, "all": float(self.num_embeddings)}
        followed = int(tally.followed.sum())
        return {
            "rows": self.num_embeddings,
            "seen_rows": seen,
            "seen_rows_error": SKETCH_ERROR if counts.error else 0.0,
            "counted_rows": len(counts.rows),
            "count_error": counts.error,
            "requests_error": counts.requests_error,
            "requests": tally.requests / total,
            "distinct": tally.distinct / total,
            "growth": list(self.growth),
            "pooling_mean": _share(tally.requests, int(tally.lengths.sum())),
            "pooling_max": tally.longest,
            "pooling_histogram": tally.lengths.tolist(),
            "coverage": {
                of: cover(counts.requests, [x * n for x in SHARES], total=tally.requests)
                for of, n in sizes.items()
            },
            "steady_rows": steady,
            "steady_share": steady / seen if seen else None,
            "steady_requests_share": _share(steady_requests, tally.requests),
            "unseen_share": _share(self.unseen, self.further),
            "reuse_share": _share(tally.reused, followed),
            "collision_share": _share(int(tally.collided.sum()), followed),
            "repeat_histogram": [_share(n, int(tally.repeats.sum())) for n in tally.repeats],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """What a pass over data found out; `rowmesh.profile.profile_source` makes it.

    Args:
        tables: In the order they were given.
        world: Ranks.
        num_steps: Steps.
        num_samples: Of all batches.
        batch_size: Samples of rank 0's first batch.
        rows_kept: Rows of a table that were counted one by one, at most.
        chunk_steps: Steps of a chunk.
    """

    tables: tuple[TableProfile, ...]
    world: int
    num_steps: int
    num_samples: int
    batch_size: int
    rows_kept: int
    chunk_steps: int

    @property
    def title(self) -> str:
        """How much was counted, in a few words."""
        ranks = f"{self.world} ranks" if self.world > 1 else "1 rank"
        return f"{self.num_steps} steps of {ranks}, {self.batch_size} samples each"

    def table(self, name: str) -> TableProfile:
        """The table of that name.

        Raises:
            InputError: If there is none.
        """
        known = {table.name: table for table in self.tables}
        if name not in known:
            raise InputError(f"the profile has no table {name!r}{did_you_mean(name, known)}")
        return known[name]

    def stats(
        self, tables: Iterable[TableConfig] | None = None, *, batch_size: int | None = None
    ) -> Stats:
        """Accesses of a rank's batch, with the heat of single rows, for planners.

        Args:
            tables: Those to plan; default all. Others that the profile has are left out.
            batch_size: Samples of a rank that the plan is for, if it is to be checked.

        Raises:
            InputError: If a table is unknown or has other rows, or the batch size is another:
                accesses do not grow in a line with the batch, so nothing is scaled.
        """
        if batch_size is not None and batch_size != self.batch_size:
            raise InputError(
                f"the profile is of {self.batch_size} samples a rank and batch, but this is for "
                f"{batch_size}: make it with rowmesh profile --ranks N for the N ranks that will "
                f"train, or leave it out"
            )
        chosen = self.tables if tables is None else [self._matching(table) for table in tables]
        mean = self.num_samples / (self.world * self.num_steps)
        return Stats(batch_size=round(mean), tables={t.name: t.accesses for t in chosen})

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """Every figure of all tables together, and under ``tables`` of each, as plain numbers."""
        counts = [table.counts for table in self.tables]
        tallies = [table.summary.tally for table in self.tables]
        requests, total = sum(t.requests for t in tallies), self.world * self.num_steps
        seen = sum(table.summary.seen for table in self.tables)
        steady = [find_steady(c, total) for c in counts]
        rows = np.concatenate([c.requests for c in counts])
        sizes = {"seen": seen, "all": float(sum(t.num_embeddings for t in self.tables))}
        followed = np.sum([t.followed for t in tallies], axis=0)
        collided = np.sum([t.collided for t in tallies], axis=0)
        copies = find_collisions(
            counts,
            COPIES,
            followed=int(followed[PHASES - 1]),
            collided=int(collided[PHASES - 1]),
        )
        return {
            "ranks": self.world,
            "steps": self.num_steps,
            "batch_size": self.batch_size,
            "rows_kept": self.rows_kept,
            "seen_rows": seen,
            "requests": requests / total,
            "shares": list(SHARES),
            "coverage": {
                of: cover(rows, [x * n for x in SHARES], total=requests) for of, n in sizes.items()
            },
            "steady_share": sum(n for n, _ in steady) / seen if seen else None,
            "steady_requests_share": _share(sum(n for _, n in steady), requests),
            "unseen_share": self._sum_share("unseen", "further"),
            "reuse_share": _share(sum(t.reused for t in tallies), int(followed.sum())),
            "collision_share": _share(int(collided.sum()), int(followed.sum())),
            "collisions_with_copies": [{"copies": n, "share": share} for n, share in copies],
            "tables": {table.name: table.figures for table in self.tables},
        }

    def curve(self, table: TableProfile | None = None) -> tuple[Sequence[float], Sequence[float]]:
        """Shares of the rows, hottest first, and of the requests that go to them; 160 points.

        Args:
            table: Of one table, or of all together.
        """
        chosen = self.tables if table is None else (table,)
        requests = np.concatenate([t.counts.requests for t in chosen])
        total = sum(t.summary.tally.requests for t in chosen)
        size = sum(t.num_embeddings for t in chosen)
        numbers = np.unique(np.geomspace(1, size, 160).astype(np.int64)).tolist()
        return [n / size for n in numbers], cover(requests, numbers, total=total)

    def _matching(self, table: TableConfig) -> TableProfile:
        found = self.table(table.name)
        if found.num_embeddings != table.num_embeddings:
            raise InputError(
                f"table {table.name!r} has {table.num_embeddings} rows, but the profile is of "
                f"{found.num_embeddings}: profile this data, or leave the profile out"
            )
        return found

    def _sum_share(self, part: str, whole: str) -> float | None:
        part_sum, whole_sum = (sum(getattr(t, n) for t in self.tables) for n in (part, whole))
        return _share(part_sum, whole_sum)


def _share(part: int, whole: int) -> float | None:
    return int(part) / int(whole) if whole else None
