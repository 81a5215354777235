"""Rows that may be hot, in the order in which they become it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rowmesh.placement import Copies, Plan, Tier, make_hot_set
from rowmesh.placement.memory import RuleState, bytes_per_rank, hot_row_bytes, state_bytes
from rowmesh.planners.per_host import Sums, may_have_copies
from rowmesh.stats import Stats

__all__ = ["RowOrder"]

_ID = 4.0


class RowOrder:
    """The rows of a plan's tables that may be hot, in the order in which they become it.

    It does not depend on the order of the tables: ``by_name`` has their numbers in that of names.
    """

    def __init__(self, plan: Plan, stats: Stats, state: RuleState, limit: int | None) -> None:
        self.plan = plan
        owners, scores, sizes = [], [], []
        # Rows of one score, and there are many, become hot table by table, in the order of names.
        self.by_name = sorted(range(len(plan.tables)), key=lambda i: plan.tables[i].name)
        for number in self.by_name:
            table = plan.tables[number]
            heat = stats.tables[table.name].heat
            if heat is None or not may_have_copies(table):
                continue
            held = hot_row_bytes(table, state=state)
            gradient = 4.0 * table.embedding_dim * table.trainable
            saved = (table.row_bytes + gradient + _ID) / table.row_bytes
            owners.append(np.full(len(heat.ids), number))
            scores.append(heat.scores * saved)
            sizes.append(np.full(len(heat.ids), held))
        nothing: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        score = np.concatenate([*scores, *nothing])
        order = np.argsort(-score, kind="stable")
        self._owners = np.concatenate([*owners, *nothing])[order].astype(np.int64)
        self._heats = {t.name: stats.tables[t.name].heat for t in plan.tables}
        self.most = len(order)
        if limit is not None:
            room = limit - max(bytes_per_rank(plan, **state_bytes(state)))
            used = np.cumsum(np.concatenate([*sizes, *nothing])[order])
            self.most = int(np.searchsorted(used, room, side="right"))

    def counts(self, k: int) -> list[int]:
        """Hot rows of each table when there are ``k`` in all: its hottest."""
        counts: list[int] = np.bincount(self._owners[:k], minlength=len(self.plan.tables)).tolist()
        return counts

    def with_hot(self, counts: Sequence[int], sums: Sums) -> Plan:
        """The plan with so many hot rows of each table."""
        everyone = tuple(range(self.plan.mesh.topology.world))
        tables = []
        for table, count in zip(self.plan.tables, counts, strict=True):
            heat = self._heats[table.name]
            if not count or heat is None:
                tables.append(table)
                continue
            rows = make_hot_set(table.name, heat.ids[:count])
            tier = Tier(ranks=everyone, copies=Copies.WORLD, rows=rows, sums=sums)
            tables.append(replace(table, tiers=(tier, *table.tiers)))
        return replace(self.plan, tables=tuple(tables))
