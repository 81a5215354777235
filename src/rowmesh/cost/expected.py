"""Expected bytes of one table under one setting, from statistics: what planners compare."""

from dataclasses import dataclass

from rowmesh.placement import Copies, Exchange, TablePlan
from rowmesh.stats import Accesses

__all__ = ["Expected", "expect_dense", "expect_table"]

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Expected:
    """Mean bytes a rank sends in a step because of one table, all links together."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both directions."""
        return self.forward + self.backward


def expect_dense(elements: int, *, world: int) -> float:
    """Bytes a rank sends for dense buckets of so many elements in all: 2 (W - 1) / W of them."""
    return 8.0 * elements * (world - 1) / world


def expect_table(table: TablePlan, accesses: Accesses, *, world: int) -> Expected:
    """Expected bytes per rank and step; d distinct rows, b bags, q requests of one rank.

    With n owners among W ranks, away = (W - 1) / W, s and g the bytes of a row and a gradient:
    rows: away * d * (s + id) forward, away * d * g backward (q for d without dedup);
    pooled: p = b n (1 - (1 - 1/n)^(q/b)) partial sums, away * (p g + q id) forward (and 4 q for
    sample weights), away * p g backward;
    copies: away * d * id forward, away * (d g + U (g + id)) backward, U the rows any rank
    touches, ids at most a bit for every row of the table.
    """
    away = (world - 1) / world
    gradient, row = 4 * table.embedding_dim, table.row_bytes
    d, b, q = accesses.distinct, accesses.bags, accesses.requests
    scale = 1.0 if table.trainable else 0.0
    if table.rest.copies is Copies.WORLD:
        union = min(float(table.num_embeddings), accesses.union(world))
        known = min(union, table.num_embeddings / 32)  # a set travels as a list or a bitmap
        sums = d * gradient + union * gradient + known * _ID_BYTES
        asked = min(d, table.num_embeddings / 32)
        return Expected(scale * away * asked * _ID_BYTES, scale * away * sums)
    if table.exchange is Exchange.POOLED:
        n = len(table.rest.ranks)
        partial = b * n * (1 - (1 - 1 / n) ** (q / b)) if b else 0.0
        weight = 4 if table.weighted else 0
        forward = away * (partial * gradient + q * (_ID_BYTES + weight))
        return Expected(forward, scale * away * partial * gradient)
    asked = d if table.dedup else q
    return Expected(away * asked * (row + _ID_BYTES), scale * away * asked * gradient)
