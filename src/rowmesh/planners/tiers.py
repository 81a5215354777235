"""Hot rows: which rows of all tables are copied to every rank or host, by the time of a step.

Of rows on every rank (P2RES) those are taken first whose u (s + g + id) / s is largest, u the
share of a rank's batches that contain the row, s its bytes and g its gradient's: what a copy saves
on the wire for each byte of memory. Their number k is the one whose step is shortest, 0 and all
included. Where hosts have several ranks, cuts into three tiers at several prices of memory
(FlexShard, `rowmesh.planners.per_host`) are tried, too.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rowmesh.cost import (
    DenseCost,
    Load,
    Rates,
    bucket_sizes,
    expect_dense,
    expect_hot,
    expect_table,
    expect_table_sync,
    plan_time,
    step_time,
)
from rowmesh.cost.buckets import sum_elements
from rowmesh.cost.early import early_load
from rowmesh.cost.load import no_load
from rowmesh.errors import InputError, PlanError
from rowmesh.placement import (
    Copies,
    Exchange,
    HotChoice,
    Plan,
    Split,
    TablePlan,
    Tier,
    hot_ids,
)
from rowmesh.placement.codecs import wire_form
from rowmesh.placement.memory import RULE_STATES, RuleState, bytes_per_rank, state_bytes
from rowmesh.planners.order import RowOrder
from rowmesh.planners.per_host import RowTiers, Sums, has_peers, may_have_copies
from rowmesh.planners.placing import LEAST_GAIN
from rowmesh.stats import Stats

__all__ = ["NO_DENSE", "HotRows", "choose_tiers", "parse_tiers"]

_SUMS: Final[tuple[Sums, ...]] = ("sparse", "dense", "bucket")
_POINTS = 16  # values of k that are tried first, and again around the best of them
_PRICES = 7  # of memory that are tried
_CHEAPEST = 1e-6  # of them, relative to the one at which nothing is copied
NO_DENSE: Final = DenseCost(flops=0.0, parameters=0.0, forward_s=0.0, backward_s=0.0, step_s=0.0)


def parse_tiers(text: str) -> int | None:
    """``off`` is 0, ``auto`` is None, ``hot:K`` is K.

    Raises:
        InputError: If it is neither.
    """
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    word, _, number = text.partition(":")
    if word == "hot" and number.isdecimal():
        return int(number)
    raise InputError(f"tiers {text!r}: say auto, off, or hot:K with K the number of hot rows")


@dataclass(frozen=True, slots=True)
class _Try:
    """k hot rows under one way to add up their gradients, or everything copied (k is None).

    With ``tiers``, those at a price of memory instead.
    """

    base: Plan
    k: int | None
    sums: Sums
    step_s: float
    tiers: Plan | None = None


class HotRows:
    """Chooses the hot rows of a plan.

    Args:
        plans: Without hot rows; the best of them with its hot rows is chosen.
        stats: With the accesses of single rows.
        rates: Of the cluster.
        cost: Of the dense layers.
        state: Of the update rule.
        limit: Bytes a rank may hold, if known.
        per_host: Whether rows may have copies per host, too.
        everything: Whether all tables may be copied whole.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        stats: Stats,
        *,
        rates: Rates,
        cost: DenseCost = NO_DENSE,
        state: RuleState,
        limit: int | None = None,
        per_host: bool = True,
        everything: bool = True,
    ) -> None:
        self._per_host, self._may_copy_all = per_host, everything
        self._stats, self._rates, self._cost = stats, rates, cost
        self._state, self._limit = state, limit
        self._orders = [RowOrder(plan, stats, state, limit) for plan in plans]
        self._loads: dict[object, tuple[Load, ...]] = {}  # of tables, and of their sync

    def choose(self, k: int | None) -> Plan:
        """The plan with ``k`` hot rows, or with the number that makes a step shortest.

        Raises:
            PlanError: If so many rows were not asked for, or do not fit.
        """
        cold = min(
            (self._time(order, 0, "sparse") for order in self._orders), key=lambda t: t.step_s
        )
        if k is not None:
            return self._finish(self._best_of(k), cold)
        tried = [t for order in self._orders for t in self._sweep(order)]
        if self._may_copy_all:
            tried += self._everything(cold.base)
        tried += [t for order in self._orders for t in self._three_tiers(order.plan)]
        best = min(tried, key=lambda t: t.step_s, default=cold)
        is_idle = not any(accesses.requests for accesses in self._stats.tables.values())
        if is_idle or best.step_s > cold.step_s * (1.0 - LEAST_GAIN):
            return self._finish(cold, cold, best)
        return self._finish(best, cold)

    @property
    def most(self) -> int:
        """Rows that may be hot: asked for in the counted batches, and within the memory."""
        return max(order.most for order in self._orders)

    def replicate(self) -> Plan:
        """The plan with every table on every rank.

        Raises:
            PlanError: If that does not fit the memory.
        """
        cold = self._time(self._orders[0], 0, "sparse")
        tried = self._everything(cold.base)
        if not tried:
            raise PlanError("all tables on every rank do not fit the memory of a rank")
        return self._finish(min(tried, key=lambda t: t.step_s), cold)

    def _best_of(self, k: int) -> _Try:
        fits = [order for order in self._orders if order.most >= k]
        tables = [table for order in self._orders for table in order.plan.tables]
        heats = {name: accesses.heat for name, accesses in self._stats.tables.items()}
        if not fits and not any(may_have_copies(t) and heats[t.name] is not None for t in tables):
            raise PlanError(
                f"{k:,} hot rows are wanted, but no table can have any: those that owners pool, "
                f"that every rank has whole, or that are pinned to ranks or a host, cannot; leave "
                f"split and exchange at auto"
            )
        if not fits:
            raise PlanError(
                f"{k:,} hot rows are wanted, but only {self.most:,} were asked for in the counted "
                f"batches and fit the memory: count more batches, or ask for fewer"
            )
        tried = [self._time(order, k, sums) for order in fits for sums in _SUMS]
        return min(tried, key=lambda t: t.step_s)

    def _sweep(self, order: RowOrder) -> list[_Try]:
        """k from few to all candidates, then finer around the best."""
        if not order.most:
            return []
        grid = np.unique(np.geomspace(min(16, order.most), order.most, _POINTS).astype(int))
        tried = [self._time(order, int(k), sums) for k in grid for sums in _SUMS]
        best = min(tried, key=lambda t: t.step_s)
        at = int(np.searchsorted(grid, best.k or 0))
        low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
        finer = np.setdiff1d(np.linspace(low, high, _POINTS // 2).astype(int), grid)
        return tried + [self._time(order, int(k), best.sums) for k in finer]

    def _time(self, order: RowOrder, k: int, sums: Sums) -> _Try:
        """The time of a step, from the loads of tables that were seen before where possible."""
        plan, lines = order.plan, 0
        total = sync = early = no_load(plan.mesh.topology.world)
        counts = order.counts(k)
        for number in order.by_name:
            table, count = plan.tables[number], counts[number]
            key = (id(plan), number, count, sums if count else "")
            if key not in self._loads:
                self._loads[key] = self._load(plan, table, count, sums)
            total += self._loads[key][0]
            sync += self._loads[key][1]
            early += self._loads[key][2]
            if sums == "bucket":
                lines += sum_elements(table, count)
        sizes = bucket_sizes(plan)
        sizes = (*sizes[:-1], (sizes[-1] if sizes else 0) + lines)
        time = step_time(
            total,
            expect_dense(
                sum(sizes), topology=plan.mesh.topology, tree=plan.tree, form=wire_form(plan)
            ),
            topology=plan.mesh.topology,
            rates=self._rates,
            cost=self._cost,
            buckets=sizes,
            riding=lines,
            sync=sync,
            early=early if plan.depth > 1 else None,
        )
        return _Try(plan, k, sums, time.total_s)

    def _load(self, plan: Plan, table: TablePlan, count: int, sums: Sums) -> tuple[Load, ...]:
        """Of a table with so many hot rows: all but the sync, the sync, what travels ahead."""
        topology, accesses = plan.mesh.topology, self._stats.tables[table.name]
        form = wire_form(plan)
        total, groups, rates = no_load(topology.world), plan.groups(table), self._rates
        if count:
            hot, accesses = accesses.part(count)
            total += expect_hot(
                table,
                hot,
                count,
                sums,
                topology=topology,
                rates=rates,
                tree=plan.tree,
                groups=groups,
                form=form,
            )
        cold = expect_table(
            table,
            accesses,
            topology=topology,
            state=self._state,
            rates=rates,
            tree=plan.tree,
            groups=groups,
            steps_apart=plan.sync.mode != "gradients",
            form=form,
        )
        sync = expect_table_sync(
            table,
            accesses,
            topology=topology,
            groups=groups,
            sync=plan.sync,
            state=self._state,
            rates=rates,
            num_hot=count,
        )
        early = early_load(cold, plan, table, accesses, num_hot=count)
        return total + cold, sync, early

    def _everything(self, plan: Plan) -> list[_Try]:
        """Every table on every rank, if it fits."""
        found = []
        for sums in _SUMS:
            copied = _copy_all(plan, sums)
            held = max(bytes_per_rank(copied, **state_bytes(self._state)))
            if self._limit is None or held <= self._limit:
                found.append(_Try(copied, None, sums, self._step_s(copied)))
        return found

    def _step_s(self, plan: Plan) -> float:
        """The time of a step of a plan as it is."""
        time = plan_time(
            plan, self._stats.tables, rates=self._rates, cost=self._cost, state=self._state
        )
        return time.total_s

    def _three_tiers(self, plan: Plan) -> list[_Try]:
        """Cuts at prices of memory, from none copied to all that fits."""
        if not self._per_host or not any(has_peers(plan, table) for table in plan.tables):
            return []
        held = max(bytes_per_rank(plan, **state_bytes(self._state)))
        found = []
        for sums, hidden in itertools.product(("sparse", "bucket"), (0.0, 1.0)):
            cut = RowTiers(
                plan,
                self._stats,
                rates=self._rates,
                state=self._state,
                sums=sums,  # type: ignore[arg-type]
                hidden=hidden,
            )
            high = cut.dearest
            low = high * _CHEAPEST
            if self._limit is not None:
                low = max(low, cut.price_within(self._limit - held))
            for price in np.geomspace(high, low, _PRICES)[1:]:
                tiers = cut.at(float(price))
                if self._limit is None or (
                    max(bytes_per_rank(tiers, **state_bytes(self._state))) <= self._limit
                ):
                    found.append(_Try(plan, 0, "sparse", self._step_s(tiers), tiers))
        return found

    def _finish(self, chosen: _Try, cold: _Try, best: _Try | None = None) -> Plan:
        plan, k = chosen.base, chosen.k
        asked = math.fsum(self._stats.tables[t.name].requests for t in plan.tables)
        host_rows = 0
        if chosen.tiers is not None:
            plan = chosen.tiers
            rows, host_rows = (_num_hot(plan, copies) for copies in (Copies.WORLD, Copies.HOST))
            covered = math.fsum(
                self._stats.tables[t.name].part(hot_ids(hot, where=t.name))[0].requests
                for t in plan.tables
                for _, hot in t.hot
            )
        elif k is None:
            rows, covered = sum(t.num_embeddings for t in plan.tables), asked
        else:
            order = next(o for o in self._orders if o.plan is plan)
            counts = order.counts(k)
            covered = math.fsum(
                self._stats.tables[table.name].part(count)[0].requests
                for table, count in zip(plan.tables, counts, strict=True)
                if count
            )
            rows, plan = k, order.with_hot(counts, chosen.sums)
        bytes_of = state_bytes(self._state)
        held = np.array(bytes_per_rank(plan, **bytes_of)) - bytes_per_rank(cold.base, **bytes_of)
        choice = HotChoice(
            rows=rows,
            host_rows=host_rows,
            num_bytes=max(0, int(held.max())),
            coverage=covered / max(asked, 1e-300),
            step_s=chosen.step_s,
            step_s_cold=cold.step_s,
            best_rows=0 if best is None or best is cold else _num_rows(best),
            best_step_s=0.0 if best is None else best.step_s,
        )
        return replace(plan, hot=choice).validate()


def choose_tiers(
    plan: Plan,
    stats: Stats,
    *,
    tiers: str = "auto",
    rates: Rates | None = None,
    cost: DenseCost | None = None,
    sparse: str = "rowwise_adagrad",
    limit: int | None = None,
) -> Plan:
    """``plan`` with other hot rows, those that ``stats`` asks for; all else stays.

    Args:
        plan: Its hot rows do not count.
        stats: With the accesses of single rows.
        tiers: auto, or hot:K; fewer than K where so many were not asked for, or do not fit.
        rates: Of the cluster.
        cost: Of the dense layers.
        sparse: Name of the update rule.
        limit: Bytes a rank may hold, if known.
    """
    state, rates = RULE_STATES[sparse], rates or Rates()
    hot = HotRows(
        [plan.without_hot_rows()],
        stats,
        rates=rates,
        cost=cost or NO_DENSE,
        state=state,
        limit=limit,
        everything=False,
    )
    count = parse_tiers(tiers)
    return hot.choose(None if count is None else min(count, hot.most))


def _copy_all(plan: Plan, sums: Sums) -> Plan:
    everyone = tuple(range(plan.mesh.topology.world))
    tier = Tier(ranks=everyone, copies=Copies.WORLD, split=Split(), sums=sums)
    tables = [replace(t, tiers=(tier,), exchange=Exchange.ROWS, merged=False) for t in plan.tables]
    return replace(plan, tables=tuple(tables))


def _num_hot(plan: Plan, copies: Copies) -> int:
    return sum(hot.count for t in plan.tables for tier, hot in t.hot if tier.copies is copies)


def _num_rows(tried: _Try) -> int:
    if tried.tiers is not None:
        return sum(hot.count for t in tried.tiers.tables for _, hot in t.hot)
    return sum(t.num_embeddings for t in tried.base.tables) if tried.k is None else tried.k
