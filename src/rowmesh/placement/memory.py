"""What a plan holds on every rank: rows, their copies, and the optimiser's state."""

from dataclasses import dataclass
from typing import Final

from rowmesh.placement.columns import column_bounds
from rowmesh.placement.homes import Homes
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
    totals = [0] * (plan.mesh.hosts * plan.mesh.local)
    for table in plan.tables:
        for tier in table.tiers:
            for rank, held in zip(tier.ranks, tier_bytes(table, tier, state=state), strict=True):
                totals[rank] += held
    return totals


def tier_bytes(table: TablePlan, tier: Tier, *, state: RuleState) -> list[int]:
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
    homes = Homes(num_rows, table.virtual_shards, owners)
    slots = [homes.num_slots(owner) for owner in range(owners)]
    bounds = column_bounds(table.embedding_dim, columns)
    found = [(row + element * (last - first)) * n for first, last in bounds for n in slots]
    # Copies list more ranks than one copy takes: each host or rank has all of it.
    return [found[i % len(found)] for i in range(len(tier.ranks))]
