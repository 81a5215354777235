"""What of a forward's messages travels ahead of it, where batches are begun before forwards, and
what of a backward's gradients follows its step."""

import math
from collections.abc import Mapping

import numpy as np

from rowmesh.cost.load import LINES, Load
from rowmesh.cost.merged import may_follow
from rowmesh.placement import Exchange, Plan, TablePlan, hot_ids
from rowmesh.stats import Accesses

__all__ = ["early_load", "early_part", "early_share", "follow_share", "late_share"]


def late_share(
    accesses: Accesses, num_batches: int, *, of: int = 1, num_rows: float = math.inf
) -> float:
    """The share of a batch's distinct rows that are in any of ``num_batches`` others too.

    (U(k) + U(n) - U(n + k)) / U(k), U(n) being the distinct rows of n batches together, of the
    ``num_rows`` there are; k is 1, or the number of batches whose distinct rows are asked for
    together.
    """
    if not num_batches or accesses.distinct <= 0.0:
        return 0.0
    asked, others, all_of_them = (
        min(accesses.union(count), num_rows) for count in (of, num_batches, num_batches + of)
    )
    return min(1.0, max(0.0, (asked + others - all_of_them) / asked))


def early_share(plan: Plan, table: TablePlan, cold: Accesses, *, num_hot: int = 0) -> float:
    """The share of a table's messages in forward that no unfinished step holds up.

    Rows that the batches of d - 1 steps on all ranks of a group touch are late; so is all that
    owners pool, and in shard groups all rows before a step that syncs.

    Args:
        plan: With its depth d.
        table: Of the plan.
        cold: Accesses of its rows that have no copies.
        num_hot: Rows that have some.
    """
    if plan.depth == 1 or table.exchange is Exchange.POOLED:
        return 0.0
    groups, steps = plan.groups(table), plan.depth - 1
    early = 1.0
    if table.trainable:
        together = plan.mesh.local if table.merged else 1
        rows = max(1, table.num_embeddings - num_hot)
        early -= late_share(cold, steps * groups.size, of=together, num_rows=rows)
        if groups.count > 1:
            period = 1 if plan.sync.mode == "gradients" else plan.sync.period
            early *= max(0.0, 1.0 - steps / period)
    if not table.dedup and cold.requests:
        early *= cold.distinct / cold.requests
    return early


def follow_share(plan: Plan, table: TablePlan, cold: Accesses, *, num_hot: int = 0) -> float:
    """The share of a table's gradients across hosts that may follow their step.

    Of merged requests, rows that the next batch of no rank asks for.

    Args:
        plan: With its depth.
        table: Of the plan.
        cold: Accesses of its rows that have no copies.
        num_hot: Rows that have some.
    """
    groups = plan.groups(table)
    if plan.depth == 1 or not may_follow(table, groups):
        return 0.0
    rows = max(1, table.num_embeddings - num_hot)
    return 1.0 - late_share(cold, groups.size, of=plan.mesh.local, num_rows=rows)


def early_part(plan: Plan, loads: Mapping[str, Load], accesses: Mapping[str, Accesses]) -> Load:
    """The part of ``loads``, of the plan's tables by name, that `early_load` tells."""
    total = np.zeros((LINES, plan.mesh.topology.world))
    # By name: the same bits in any order of tables.
    tables = sorted(plan.tables, key=lambda table: table.name)
    for table in tables if plan.depth > 1 else ():
        cold = accesses[table.name]
        for _, rows in table.hot:
            _, cold = cold.part(hot_ids(rows, where=f"table {table.name!r}"))
        num_hot = sum(rows.count for _, rows in table.hot)
        total += early_load(loads[table.name], plan, table, cold, num_hot=num_hot).values
    return Load(total)


def early_load(
    load: Load, plan: Plan, table: TablePlan, cold: Accesses, *, num_hot: int = 0
) -> Load:
    """Of a table's load, the bytes in forward that travel ahead and, where a `Load` has gradients,
    those that follow: of these as many cross as rows do the other way."""
    values = np.zeros_like(load.values)
    forward = load.values[:4] - load.values[4:8]
    values[:4] = early_share(plan, table, cold, num_hot=num_hot) * forward
    returned = np.minimum(load.values[6:8], forward[3:1:-1])
    values[6:8] = follow_share(plan, table, cold, num_hot=num_hot) * returned
    return Load(values)
