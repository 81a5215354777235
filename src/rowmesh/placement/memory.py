"""What a plan holds on every rank: rows, their copies, and the optimiser's state."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.placement.columns import column_bounds
from rowmesh.placement.plan import Plan, TablePlan, Tier

__all__ = ["RULE_STATES", "RuleState", "bytes_per_rank", "tier_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleState:
    """What an update rule keeps of a trainable table.

    Args:
        row_bytes: For each row, in every column piece.
        element_bytes: For each element.
        adds_squares: Whether a step needs the squares of all columns of a row, so that column
            pieces send theirs to each other.
    """

    row_bytes: int = 4
    element_bytes: int = 0
    adds_squares: bool = True


RULE_STATES: Final[dict[str, RuleState]] = {
    "rowwise_adagrad": RuleState(),
    "adagrad": RuleState(row_bytes=0, element_bytes=4, adds_squares=False),
    "adam": RuleState(row_bytes=4, element_bytes=8, adds_squares=False),
    "sgd": RuleState(row_bytes=0, adds_squares=False),
}


def bytes_per_rank(
    plan: Plan, *, state_bytes_per_row: int = 4, state_bytes_per_element: int = 0
) -> list[int]:
    """Bytes of weights and optimiser state on each rank (row-wise AdaGrad: 4 a row and piece).

    Rows of a hot set are counted where they are copied, and their homes too; frozen tables have
    no state.
    """
    state = RuleState(row_bytes=state_bytes_per_row, element_bytes=state_bytes_per_element)
    totals = np.zeros(plan.mesh.hosts * plan.mesh.local, dtype=np.int64)
    for table in plan.tables:
        for tier in table.tiers:
            totals[list(tier.ranks)] += tier_bytes(table, tier, state=state)
    return [int(total) for total in totals]


def tier_bytes(table: TablePlan, tier: Tier, *, state: RuleState) -> NDArray[np.int64]:
    """Bytes of one tier on each of its ranks, in their order.

    An owner's rows are those of `Homes.num_slots`; a row of a piece of c columns takes c elements
    of the table's type, and the state of a row and of c elements if the table is trainable.
    """
    num_rows = table.num_embeddings if tier.rows == "rest" else tier.rows.count
    columns = tier.split.columns
    split_rows = tier.split.kind == "boxes" and tier.split.rows != "none"
    owners = max(1, len(tier.ranks) // columns) if split_rows else 1
    row, element = 0, table.row_bytes // table.embedding_dim
    if table.trainable:
        row, element = state.row_bytes, element + state.element_bytes
    widths = [last - first for first, last in column_bounds(table.embedding_dim, columns)]
    per_row = row + element * np.array(widths, dtype=np.int64)
    found = per_row[:, None] * _slots(num_rows, table.virtual_shards, owners)
    if tier.split.kind == "whole":
        return np.full(len(tier.ranks), found[0, 0])
    return found.reshape(-1)


def _slots(num_rows: int, num_shards: int, num_owners: int) -> NDArray[np.int64]:
    """`Homes.num_slots` of every owner."""
    owner = np.arange(num_owners, dtype=np.int64)
    whole, rest = divmod(num_rows, num_shards)
    width = np.maximum(0, -(-(num_shards - owner) // num_owners))
    return whole * width + np.maximum(0, -(-(rest - owner) // num_owners))
