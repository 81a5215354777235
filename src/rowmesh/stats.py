"""What is known about accesses: requests and distinct rows per table and batch.

Planners read it; without it they assume bounded Zipf ids. `rowmesh profile` will add more.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rowmesh.features import KeyedJaggedTensor
from rowmesh.tables import TableConfig

__all__ = ["Accesses", "Stats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accesses:
    """Mean accesses of one table by one rank in one batch.

    Args:
        requests: Ids looked up.
        bags: Bags with at least one id.
        distinct: Distinct rows.
    """

    requests: float
    bags: float
    distinct: float


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
        tables = list(tables)
        seen: dict[str, list[tuple[int, int, int]]] = {t.name: [] for t in tables}
        sizes = []
        for batch in batches:
            sizes.append(batch.stride())
            features = batch.to_dict()
            for table in tables:
                jagged = [features[f] for f in table.feature_names]
                ids = np.concatenate([j.values().numpy() for j in jagged])
                bags = sum(int((j.lengths() > 0).sum()) for j in jagged)
                seen[table.name].append((len(ids), bags, len(np.unique(ids))))
        return Stats(
            batch_size=round(sum(sizes) / max(len(sizes), 1)),
            tables={
                name: Accesses(**dict(zip(Accesses.__slots__, map(float, means), strict=True)))
                for name, rows in seen.items()
                for means in [np.mean(rows, axis=0)]
            },
        )

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
        sum_k 1 - (1 - p_k)^n rows. Ranks beyond 10,000 are binned.
        """
        factors = pooling_factors or {}
        found = {}
        for table in tables:
            pooling = factors.get(table.name, 1.0) * len(table.feature_names)
            requests = batch_size * pooling
            found[table.name] = Accesses(
                requests=requests,
                bags=float(batch_size * len(table.feature_names)) * min(1.0, pooling),
                distinct=_zipf_distinct(table.num_embeddings, requests, alpha),
            )
        return Stats(batch_size=batch_size, tables=found)


def _zipf_distinct(num_rows: int, requests: float, alpha: float) -> float:
    """Expected distinct rows; ranks are binned geometrically beyond the first 10,000."""
    exact = np.arange(1, min(num_rows, 10_000) + 1, dtype=np.float64)
    edges = np.unique(np.geomspace(10_001, num_rows + 1, 2_000).astype(np.int64))
    if num_rows <= 10_000 or len(edges) < 2:
        ranks, counts = exact, np.ones_like(exact)
    else:
        counts = np.concatenate([np.ones_like(exact), np.diff(edges).astype(np.float64)])
        ranks = np.concatenate([exact, (edges[:-1] + edges[1:] - 1) / 2.0])
    weight = ranks**-alpha
    p = weight / (weight * counts).sum()
    return float((counts * -np.expm1(requests * np.log1p(-np.minimum(p, 1 - 1e-12)))).sum())
