"""What a plan holds on every rank: rows, their copies, and the optimiser's state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError, did_you_mean
from rowmesh.placement.columns import column_bounds
from rowmesh.placement.homes import count_slots
from rowmesh.placement.hot import holders
from rowmesh.placement.plan import Copies, Exchange, HotSet, Plan, TablePlan, Tier

__all__ = [
    "RULE_STATES",
    "RuleState",
    "alike_bytes",
    "bytes_per_rank",
    "hot_bytes",
    "hot_row_bytes",
    "rule_state",
    "state_bytes",
    "tier_bytes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleState:
    """What an update rule keeps of a trainable table.

    Args:
        row_bytes: For each row, in every column piece.
        element_bytes: For each element.
        adds_squares: Whether a step needs the squares of all columns of a row, so that column
            pieces send theirs to each other.
        ahead_bytes: For each row at home that travels by itself, the rule's or not: what look-ahead
            remembers of it (`at_depth`).
    """

    row_bytes: int = 4
    element_bytes: int = 0
    adds_squares: bool = True
    ahead_bytes: int = 0

    def at_depth(self, depth: int) -> "RuleState":
        """With so many batches begun at a time: four bytes a row, if it is more than one."""
        return replace(self, ahead_bytes=4 if depth > 1 else 0)


RULE_STATES: Final[dict[str, RuleState]] = {
    "rowwise_adagrad": RuleState(),
    "momentum_scaled_rowwise_adagrad": RuleState(),
    "adagrad": RuleState(row_bytes=0, element_bytes=4, adds_squares=False),
    "adam": RuleState(row_bytes=4, element_bytes=8, adds_squares=False),
    "sgd": RuleState(row_bytes=0, adds_squares=False),
}


def rule_state(name: str) -> RuleState:
    """The state of the update rule of this name.

    Raises:
        InputError: If there is none.
    """
    if name not in RULE_STATES:
        raise InputError(f"unknown update rule {name!r}{did_you_mean(name, RULE_STATES)}")
    return RULE_STATES[name]


def state_bytes(state: RuleState) -> dict[str, int]:
    """The arguments of `bytes_per_rank` for an update rule."""
    return {
        "state_bytes_per_row": state.row_bytes,
        "state_bytes_per_element": state.element_bytes,
    }


def bytes_per_rank(
    plan: Plan, *, state_bytes_per_row: int = 4, state_bytes_per_element: int = 0
) -> list[int]:
    """Bytes of weights and optimiser state on each rank (row-wise AdaGrad: 4 a row and piece).

    Rows of a hot set are counted where they are copied, and their homes too; frozen tables have
    no state. At depths above 1 what look-ahead remembers of rows is counted, buffers are not.
    """
    rule = RuleState(row_bytes=state_bytes_per_row, element_bytes=state_bytes_per_element)
    state = rule.at_depth(plan.depth)
    totals = [0] * (plan.mesh.hosts * plan.mesh.local)
    for table in plan.tables:
        for tier in table.tiers:
            if isinstance(tier.rows, HotSet):
                held = hot_bytes(table, tier, tier.rows.count, plan.mesh.local, state=state)
            else:
                held = tier_bytes(table, tier, state=state)
            groups, holders_of = plan.groups(table), [tier.ranks]
            if tier.copies is Copies.GROUP and groups.count > 1:  # else all ranks are listed
                holders_of = [groups.move(tier.ranks, group) for group in range(groups.count)]
            for ranks in holders_of:
                for rank, num_bytes in zip(ranks, held, strict=True):
                    totals[rank] += num_bytes
    return totals


def hot_row_bytes(table: TablePlan, *, state: RuleState) -> int:
    """Bytes of one copy of a hot row, with its state."""
    if not table.trainable:
        return table.row_bytes
    of_elements = state.element_bytes * table.embedding_dim
    return table.row_bytes + state.row_bytes * table.rest.split.columns + of_elements


def hot_bytes(
    table: TablePlan, tier: Tier, count: int, local: int, *, state: RuleState
) -> list[int]:
    """Bytes of the copies of ``count`` hot rows on each of a tier's ranks, in their order.

    A copy has all columns, and the state of a row once for every column piece of the rest.
    """
    row = hot_row_bytes(table, state=state)
    if tier.copies is Copies.WORLD:
        return [row * count] * len(tier.ranks)
    held = np.bincount(holders(tier, count, local), minlength=local).tolist()
    return [row * held[rank % local] for rank in tier.ranks]


def tier_bytes(table: TablePlan, tier: Tier, *, state: RuleState) -> list[int]:
    """Bytes of one tier on each of its ranks, in their order.

    An owner's rows are those of `Homes.num_slots`; a row of a piece of c columns takes c elements
    of the table's type, and the state of a row and of c elements if the table is trainable, with
    look-ahead's number of it if it travels by itself.
    """
    found: list[int] = alike_bytes([table], tier, state=state)[0].tolist()
    return found


def alike_bytes(tables: Sequence[TablePlan], tier: Tier, *, state: RuleState) -> NDArray[np.int64]:
    """`tier_bytes` of many tables that differ in names and rows only: ``[tables, ranks]``."""
    first = tables[0]
    num_rows = [t.num_embeddings if tier.rows == "rest" else tier.rows.count for t in tables]
    columns = tier.split.columns
    split_rows = tier.split.kind == "boxes" and tier.split.rows != "none"
    owners = max(1, len(tier.ranks) // columns) if split_rows else 1
    row, element = 0, first.row_bytes // first.embedding_dim
    if first.trainable:
        row, element = state.row_bytes, element + state.element_bytes
        if first.exchange is Exchange.ROWS and tier.copies is Copies.GROUP:
            row += state.ahead_bytes
    slots = count_slots(num_rows, num_shards=first.virtual_shards, num_owners=owners)
    bounds = column_bounds(first.embedding_dim, columns)
    widths = np.array([row + element * (last - start) for start, last in bounds])
    found = (widths[None, :, None] * slots[:, None, :]).reshape(len(tables), -1)
    # Copies list more ranks than one copy takes: each host or rank has all of it.
    return found[:, np.arange(len(tier.ranks)) % found.shape[1]]
