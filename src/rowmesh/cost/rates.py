"""`Rates`: how fast a cluster is: its links, its work on rows, its dense layers."""

import dataclasses
import itertools
import sys
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from rowmesh.errors import InputError, check_range

__all__ = ["DenseCost", "Rates", "RowCost"]


def _check_seconds(costs: object) -> None:
    for name in (f.name for f in dataclasses.fields(cast(Any, costs))):
        value = getattr(costs, name)
        if name.endswith("_s") and not name.endswith("per_s") and not 0.0 <= value < float("inf"):
            raise InputError(f"{name} is {value}, but must be from 0 and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """Seconds a rank computes for ids and rows of one embedding dim.

    Of an id, forward and backward are one number: a frozen table, which has no backward, is charged
    for its ids as if it were trained.

    Args:
        dim: Columns.
        id_s: For each id of a `rows` exchange, at the rank that asks: find the distinct ones,
            read and pool, and in backward add its gradient to its row's.
        lookup_s: For each row that a rank is asked for in forward.
        update_s: For each gradient of a row that a rank receives: add it, and update the row.
        bag_id_s: For each id of a `pooled` exchange: route it, read and pool, add its gradient.
        bag_update_s: For each row that a `pooled` exchange updates.
    """

    dim: int
    id_s: float
    lookup_s: float
    update_s: float
    bag_id_s: float
    bag_update_s: float

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise InputError(f"dim is {self.dim}, but must be at least 1")
        _check_seconds(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseCost:
    """Seconds of a step of the dense layers of one rank, all ranks at once, without messages.

    Args:
        flops: Of matrix products in forward and backward of the batch.
        parameters: Elements that the optimiser updates.
        forward_s, backward_s, step_s: Of forward, backward, and the optimiser's step.
        tail_s: The part of backward after the embeddings' gradients are known.
    """

    flops: float
    parameters: float
    forward_s: float
    backward_s: float
    step_s: float
    tail_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "parameters"):
            check_range(name, getattr(self, name), 0.0, sys.float_info.max)
        _check_seconds(self)

    @property
    def total_s(self) -> float:
        """Forward, backward and step."""
        return self.forward_s + self.backward_s + self.step_s

    def scaled(self, *, flops: float, parameters: float) -> "DenseCost":
        """The same machine on other layers: time of products by flops, of the step by size."""
        products = flops / self.flops if self.flops else 0.0
        sizes = parameters / self.parameters if self.parameters else 0.0
        return DenseCost(
            flops=flops,
            parameters=parameters,
            forward_s=products * self.forward_s,
            backward_s=products * self.backward_s,
            step_s=sizes * self.step_s,
            tail_s=products * self.tail_s,
        )


# Of one core of a shared x86 machine, from steps of 26 tables on one rank; rounded.
_TWO_CORES: Final = (
    RowCost(dim=16, id_s=5e-8, lookup_s=5e-8, update_s=2.7e-7, bag_id_s=1e-7, bag_update_s=2.6e-7),
    RowCost(
        dim=128, id_s=8e-8, lookup_s=1.4e-7, update_s=5.5e-7, bag_id_s=1.8e-7, bag_update_s=4.8e-7
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How fast a cluster is. The defaults are a host with one 25 Gbit/s card and CPU ranks.

    Args:
        host_bytes_per_s: Between ranks of a host: what one of them sends, all sending at once.
        cross_bytes_per_s: Of a host's network card, in each direction; its ranks share it.
        host_latency_s, cross_latency_s: Of one small message inside a host, and across.
        fixed_s: Of a step whose batch is nearly empty, on one rank.
        rows: Cost of rows, by rising dim; between two dims, and beyond, straight lines.
        dense: Of the layers that were timed, if any were.

    Raises:
        InputError: If a rate is not positive, a time is negative, or the dims do not rise.
    """

    host_bytes_per_s: float = 2e9
    cross_bytes_per_s: float = 3e9
    host_latency_s: float = 5e-5
    cross_latency_s: float = 5e-5
    fixed_s: float = 1e-3
    rows: tuple[RowCost, ...] = _TWO_CORES
    dense: DenseCost | None = None

    def __post_init__(self) -> None:
        for name in ("host_bytes_per_s", "cross_bytes_per_s"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise InputError(f"{name} is {value}, but must be positive and finite")
        _check_seconds(self)
        dims = [cost.dim for cost in self.rows]
        if not dims or any(a >= b for a, b in itertools.pairwise(dims)):
            raise InputError(f"rows has dims {dims}, but needs at least one, each above the last")

    def row_cost(self, dim: int) -> RowCost:
        """Cost of rows of ``dim`` columns, on the line through the two nearest known dims.

        One known dim gives the same for all. No cost falls below that of half the smallest
        known dim, nor below zero.
        """
        if len(self.rows) == 1:
            return replace(self.rows[0], dim=dim)
        above = next((i for i, c in enumerate(self.rows) if c.dim >= dim), len(self.rows) - 1)
        low, high = self.rows[max(above, 1) - 1], self.rows[max(above, 1)]
        place = (max(dim, self.rows[0].dim / 2) - low.dim) / (high.dim - low.dim)
        names = [f.name for f in dataclasses.fields(RowCost) if f.name != "dim"]
        values = {n: (1 - place) * getattr(low, n) + place * getattr(high, n) for n in names}
        return RowCost(dim=dim, **{name: max(0.0, value) for name, value in values.items()})
