"""What is known about accesses: requests and distinct rows per table and batch.

Planners read it; without it they assume bounded Zipf ids. `rowmesh profile` will add more.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.tables import TableConfig

__all__ = ["Accesses", "Stats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accesses:
    """Mean accesses of one table by one rank in one batch.

    Args:
        requests: Ids looked up.
        bags: Bags with at least one id.
        growth: Distinct rows in one batch, in two batches together, in four, in eight, ...
    """

    requests: float
    bags: float
    growth: tuple[float, ...]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Accesses per table, for batches of ``batch_size`` samples on a rank."""

    batch_size: int
    tables: Mapping[str, Accesses]

    @staticmethod
    def from_batches(
        tables: Iterable[TableConfig], batches: Iterable[KeyedJaggedTensor]
    ) -> "Stats":
        """Count what ``batches`` (of one rank) ask of ``tables``; the means are kept."""
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
        found.append(float(np.mean([len(np.unique(run)) for run in runs])))
        width *= 2
    return tuple(found)


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
