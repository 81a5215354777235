"""What is known about accesses: requests and distinct rows per table and batch, and hot rows.

Planners read it; without it they assume bounded Zipf ids.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.tables import TableConfig

__all__ = ["Accesses", "Heat", "Stats", "distinct"]

Floats = NDArray[np.float64]


def distinct(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every id once, in ascending order: ``np.unique(ids)``, several times as fast.

    numpy hashes ids before it sorts them; of the few thousand of a batch, that is most of the time.
    """
    ids = np.sort(ids)
    is_first = np.ones(len(ids), dtype=bool)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    return ids[is_first]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heat:
    """The rows of a table that were asked for, or the hottest of them, hottest first.

    The rows are ordered by what some batches ask for, and their means are taken from others: rows
    that lead an order by chance would seem hotter than they are.

    Args:
        ids: Distinct rows.
        scores: What they are ordered by: the share of batches that contain the row.
        requests: Mean requests of a rank's batch.
        presence: Share of other batches that contain the row.
    """

    ids: NDArray[np.int64]
    scores: Floats
    requests: Floats
    presence: Floats

    def without(self, chosen: slice | NDArray[np.bool_]) -> "Heat":
        """The other rows."""
        keep = np.ones(len(self.ids), dtype=bool)
        keep[chosen] = False
        return Heat(
            ids=self.ids[keep],
            scores=self.scores[keep],
            requests=self.requests[keep],
            presence=self.presence[keep],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Accesses:
    """Mean accesses of one table by one rank in one batch.

    Args:
        requests: Ids looked up.
        bags: Bags with at least one id.
        growth: Distinct rows in one batch, in two batches together, in four, in eight, ...
        heat: Of single rows, if known.
    """

    requests: float
    bags: float
    growth: tuple[float, ...]
    heat: Heat | None = field(default=None, compare=False, repr=False)

    @property
    def distinct(self) -> float:
        """Distinct rows of one batch."""
        return self.growth[0]

    def union(self, num_batches: int) -> float:
        """Distinct rows of so many batches together: what any of so many ranks touches.

        Straight lines through the known points on doubly logarithmic paper; beyond the last
        point the last line goes on.
        """
        i = min(int(math.log2(num_batches)), len(self.growth) - 2)
        if i < 0 or self.growth[i] <= 0.0:  # one point only: as if batches shared no row
            return num_batches * self.growth[0]
        slope = math.log2(self.growth[i + 1] / self.growth[i])
        return self.growth[i] * math.pow(num_batches / 2**i, slope)

    def part(self, rows: NDArray[np.int64] | int) -> tuple["Accesses", "Accesses"]:
        """Accesses of some rows, and of all others.

        Of rows in share p of the batches, sum(1 - (1 - p)^n) are in n batches together. Bags
        count in both parts.

        Args:
            rows: Their ids, ascending; or how many of the hottest.

        Raises:
            InputError: If nothing is known of single rows.
        """
        if self.heat is None:
            raise InputError(
                "the statistics do not know single rows: count batches, or run rowmesh profile"
            )
        chosen = slice(rows) if isinstance(rows, int) else np.isin(self.heat.ids, rows)
        touched = self.heat.presence[chosen]
        growth = []
        for total in self.growth:
            growth.append(min(total, float(touched.sum())))
            touched = touched * (2.0 - touched)  # 1 - (1 - t)^2: in twice as many batches
        requests = min(self.requests, float(self.heat.requests[chosen].sum()))
        hot = replace(self, requests=requests, growth=tuple(growth), heat=None)
        left = self.heat.without(chosen)
        rest = [total - own for total, own in zip(self.growth, growth, strict=True)]
        rest = np.maximum.accumulate(rest).tolist()  # more batches do not hold fewer rows
        cold = replace(self, requests=self.requests - requests, growth=tuple(rest), heat=left)
        return hot, cold


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Accesses per table, for batches of ``batch_size`` samples on a rank."""

    batch_size: int
    tables: Mapping[str, Accesses]

    def without_rows_of(self, names: Iterable[str]) -> "Stats":
        """The same, but nothing is known of single rows of these tables; of others it is kept."""
        known = self.tables
        cold = {name: replace(known[name], heat=None) for name in names if name in known}
        return replace(self, tables={**self.tables, **cold}) if cold else self

    @staticmethod
    def from_batches(
        tables: Iterable[TableConfig], batches: Iterable[KeyedJaggedTensor]
    ) -> "Stats":
        """Count what ``batches`` (of one rank) ask of ``tables``; means, and single rows, are kept.

        Rows are ordered by every other batch, and their means taken from those between.
        """
        tables, batches = list(tables), list(batches)
        if not batches:
            raise InputError("statistics need at least one batch")
        found = {}
        for table in tables:
            jagged = [[batch[f] for f in table.feature_names] for batch in batches]
            ids = [np.concatenate([j.values().cpu().numpy() for j in js]) for js in jagged]
            bags = [sum(int((j.lengths() > 0).sum()) for j in js) for js in jagged]
            found[table.name] = Accesses(
                requests=float(np.mean([len(i) for i in ids])),
                bags=float(np.mean(bags)),
                growth=_growth(ids),
                heat=count_heat(ids),
            )
        sizes = [batch.stride() for batch in batches]
        return Stats(batch_size=round(sum(sizes) / len(sizes)), tables=found)

    @staticmethod
    def assume(
        tables: Iterable[TableConfig],
        *,
        batch_size: int,
        pooling_factors: Mapping[str, float] | None = None,
        alpha: float = 1.05,
    ) -> "Stats":
        """Expected accesses if ids were bounded Zipf(alpha), independent of each other.

        Row of popularity k has probability p_k = k^-alpha / sum; a batch of n requests touches
        sum_k 1 - (1 - p_k)^n rows. Ranks beyond 1,000 are binned.
        """
        factors = pooling_factors or {}
        found = {}
        for table in tables:
            pooling = factors.get(table.name, 1.0)
            requests = batch_size * pooling * len(table.feature_names)
            found[table.name] = Accesses(
                requests=requests,
                bags=float(batch_size * len(table.feature_names)) * min(1.0, pooling),
                growth=_zipf_growth(table.num_embeddings, requests, alpha),
            )
        return Stats(batch_size=batch_size, tables=found)


def _growth(ids: list[NDArray[np.int64]]) -> tuple[float, ...]:
    """Mean number of distinct ids in runs of 1, 2, 4, ... batches."""
    found, width = [], 1
    while width <= len(ids):
        runs = [np.concatenate(ids[i : i + width]) for i in range(0, len(ids) - width + 1, width)]
        found.append(float(np.mean([len(distinct(run)) for run in runs])))
        width *= 2
    # A last odd batch is in no longer run, so its rows may be missing there.
    return tuple(np.maximum.accumulate(found).tolist())


def count_heat(ids: list[NDArray[np.int64]]) -> Heat:
    """The heat of the rows in every other batch; of one batch alone, by itself."""
    first, second = (ids[0::2], ids[1::2]) if len(ids) > 1 else (ids, ids)
    rows, found, _ = _count(first)
    others, presence, requests = _count(second)
    order = np.lexsort((rows, -found))
    rows, scores = rows[order], found[order]
    means = np.zeros((2, len(rows)))
    known = np.isin(rows, others)
    means[:, known] = np.stack([requests, presence])[:, np.searchsorted(others, rows[known])]
    return Heat(ids=rows, scores=scores, requests=means[0], presence=means[1])


def _count(ids: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Distinct rows, the share of the batches that contain each, and its requests in a batch."""
    each = [np.unique(i, return_counts=True) for i in ids]
    rows, place = np.unique(np.concatenate([r for r, _ in each]), return_inverse=True)
    counts = np.concatenate([c for _, c in each])
    presence = np.bincount(place, minlength=len(rows)) / len(ids)
    requests = np.bincount(place, weights=counts, minlength=len(rows)) / len(ids)
    return rows, presence, requests


@functools.lru_cache(maxsize=4096)
def _zipf_growth(num_rows: int, requests: float, alpha: float) -> tuple[float, ...]:
    """Expected distinct rows of 1, 2, 4, ... 4,096 batches; ranks beyond 1,000 are binned."""
    ranks = np.arange(1, min(num_rows, 1_000) + 1, dtype=np.float64)
    counts = np.ones_like(ranks)
    if num_rows > 1_000:
        edges = np.unique(np.geomspace(1_001, num_rows + 1, 500).astype(np.int64))
        counts = np.concatenate([counts, np.diff(edges).astype(np.float64)])
        ranks = np.concatenate([ranks, (edges[:-1] + edges[1:] - 1) / 2.0])
    weight = ranks**-alpha
    miss = np.log1p(-np.minimum(weight / (weight * counts).sum(), 1 - 1e-12))
    touched, found = -np.expm1(requests * miss), []
    for _ in range(13):
        found.append(float(counts @ touched))
        touched *= 2.0 - touched  # 1 - (1 - t)^2: in twice as many batches
    return tuple(found)
