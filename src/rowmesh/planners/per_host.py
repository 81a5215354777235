"""Three tiers: a row on every rank, on every host, or with its owner alone (FlexShard).

Every row takes the tier with the least time + price x memory, and the price of memory is bisected
until the plan fits a budget. Time is bytes over calibrated rates, of one rank in a step, for a row
of s bytes with gradients of g, in share p of a rank's batches and asked for u times in one (p with
dedup), P_h = 1 - (1 - p)^L, P_any = 1 - (1 - p)^W::

                  inside a host                      across hosts
    owner         u (s + g + id) (L - 1) / W         u (s + g + id) (W - L) / W
    per host      p (s + g + id) (L - 1) / L         (P_h + P_any) (g + id) (H - 1) / H / L
    everywhere    2 (g + 4) (L - 1) / L              2 (g + 4) (H - 1) / H / L        dense sums
                  (p + P_any) (g + id) (L - 1) / W   (p + P_any) (g + id) (W - L) / W    sparse

Ids of rows with copies are always deduplicated, so theirs are p whatever the table says. Gradients
(the g above) may travel under the backward of the dense layers: a share of them can be taken for
hidden, up to all, when only what the forward waits for counts.

With shard groups, "owner" and "per host" are of one group: W, H, L and P_any of its shape. What
replicas tell each other of these rows is not in the formulas, only in the time of the whole plan.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost import Rates
from rowmesh.placement import Copies, Exchange, Plan, Split, TablePlan, Tier, make_hot_set
from rowmesh.placement.memory import RuleState, hot_row_bytes
from rowmesh.stats import Heat, Stats
from rowmesh.topology import Topology

__all__ = ["EVERYWHERE", "OWNER", "PER_HOST", "RowTiers", "Sums", "has_peers", "may_have_copies"]

Sums = Literal["sparse", "dense", "bucket"]
Floats = NDArray[np.float64]
OWNER, PER_HOST, EVERYWHERE = 0, 1, 2
_ID = 4.0
_HALVINGS: Final = 50


def may_have_copies(table: TablePlan) -> bool:
    """Whether rows of the table can be copied apart from others."""
    return table.exchange is Exchange.ROWS and table.rest.copies is not Copies.WORLD


def has_peers(plan: Plan, table: TablePlan) -> bool:
    """Whether copies per host make sense: groups of several whole hosts of several ranks each, and
    sums that are made in hosts first."""
    groups, local = plan.groups(table), plan.mesh.local
    is_whole = groups.count == 1 or (groups.layout == "contiguous" and groups.size % local == 0)
    return is_whole and local > 1 and groups.size > local and plan.tree == "host-first"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one table that may have copies: seconds and bytes ``[3, rows]`` of each tier."""

    number: int
    heat: Heat
    seconds: Floats
    held: Floats

    def choose(self, price: float) -> NDArray[np.int64]:
        """The tier of each row."""
        found: NDArray[np.int64] = np.argmin(self.seconds + price * self.held, axis=0)
        return found


class RowTiers:
    """The tiers of a plan's rows, for any price of memory.

    Args:
        plan: Without hot rows.
        stats: With the accesses of single rows.
        rates: Of the cluster.
        state: Of the update rule.
        sums: Of rows on every rank.
        per_host: Whether rows may have copies per host.
        hidden: Share of the time of gradients that does not count.
    """

    def __init__(
        self,
        plan: Plan,
        stats: Stats,
        *,
        rates: Rates,
        state: RuleState,
        sums: Sums = "sparse",
        per_host: bool = True,
        hidden: float = 0.0,
    ) -> None:
        self.plan, self._sums, self._local = plan, sums, plan.mesh.local
        self.rows = []
        # By name: the same bits of sums in any order of tables.
        by_name = sorted(enumerate(plan.tables), key=lambda pair: pair[1].name)
        for number, table in by_name:
            heat = stats.tables[table.name].heat
            if heat is not None and may_have_copies(table):
                topology = plan.mesh.topology
                shape = plan.groups(table).shape(topology)
                forward, backward = _seconds(table, heat, topology, shape, rates, sums)
                seconds = forward + (1.0 - hidden) * backward
                if not per_host or not has_peers(plan, table):
                    seconds[PER_HOST] = np.inf
                held = _held(table, state, self._local) * np.ones((1, len(heat.ids)))
                self.rows.append(_Rows(number, heat, seconds, held))

    @property
    def dearest(self) -> float:
        """A price at which nothing is copied."""
        saved = [
            float(((r.seconds[OWNER] - r.seconds[1:]) / r.held[1:]).max())
            for r in self.rows
            if len(r.heat.ids)
        ]
        return 2.0 * max([0.0, *(s for s in saved if np.isfinite(s))]) + 1e-300

    def bytes_at(self, price: float) -> float:
        """Bytes of copies on a rank, if they spread evenly over those of a host."""
        total = 0.0
        for rows in self.rows:
            total += float(np.choose(rows.choose(price), rows.held).sum())
        return total

    def seconds_at(self, price: float) -> float:
        """Of a step, by the formulas above, for the rows that may have copies."""
        return sum(float(np.choose(rows.choose(price), rows.seconds).sum()) for rows in self.rows)

    def price_within(self, num_bytes: float) -> float:
        """The least price, nearly, whose copies take at most so many bytes of a rank."""
        if self.bytes_at(0.0) <= num_bytes:
            return 0.0
        high = self.dearest
        low = high * 1e-12
        for _ in range(_HALVINGS):
            middle = float(np.sqrt(low * high))
            low, high = (low, middle) if self.bytes_at(middle) <= num_bytes else (middle, high)
        return high

    def at(self, price: float) -> Plan:
        """The plan with every row in its tier."""
        tables, world = list(self.plan.tables), self.plan.mesh.topology.world
        for rows in self.rows:
            chosen, table = rows.choose(price), tables[rows.number]
            tiers = [
                _tier(table.name, kind, rows.heat.ids[chosen == kind], self._sums, world)
                for kind in (EVERYWHERE, PER_HOST)
                if (chosen == kind).any()
            ]
            tables[rows.number] = replace(table, tiers=(*tiers, *table.tiers))
        return replace(self.plan, tables=tuple(tables))


def _tier(name: str, kind: int, ids: NDArray[np.int64], sums: Sums, world: int) -> Tier:
    rows, everyone = make_hot_set(name, ids), tuple(range(world))
    if kind == EVERYWHERE:
        return Tier(ranks=everyone, copies=Copies.WORLD, rows=rows, sums=sums)
    split = Split(kind="boxes", rows="host")
    return Tier(ranks=everyone, copies=Copies.HOST, rows=rows, split=split)


def _mean_by_score(heat: Heat, values: Floats) -> Floats:
    """The mean of ``values`` over all rows with a row's score.

    Scores come from other batches than means, so a row that was lucky once is not believed. Rows of
    one score differ by a millionth in the order of heat, so that some of them may fit a budget.
    """
    _, group = np.unique(heat.scores, return_inverse=True)
    means = np.bincount(group, weights=values) / np.maximum(np.bincount(group), 1)
    found: Floats = means[group] * (1.0 - 1e-6 * np.arange(len(group)) / max(len(group), 1))
    return found


def _held(table: TablePlan, state: RuleState, local: int) -> Floats:
    """Bytes of a row's copies on a rank, in each tier."""
    row = hot_row_bytes(table, state=state)
    return np.array([[0.0], [row / local], [float(row)]])


def _seconds(
    table: TablePlan, heat: Heat, topology: Topology, shape: Topology, rates: Rates, sums: Sums
) -> tuple[Floats, Floats]:
    """Seconds of a step that each row takes in each tier: of its forward, and of gradients.

    ``shape`` is that of one shard group.
    """
    world = topology.world
    p = _mean_by_score(heat, heat.presence)
    u = p if table.dedup else _mean_by_score(heat, heat.requests)
    gradient = 4.0 * table.embedding_dim * table.trainable
    summed = (gradient + _ID) if table.trainable else 0.0
    line = 2.0 * (gradient + 4.0) * table.trainable
    nothing = np.zeros(len(p))
    any_of_host, any_of_all = 1.0 - (1.0 - p) ** shape.local, 1.0 - (1.0 - p) ** world
    any_of_group = 1.0 - (1.0 - p) ** shape.world
    near, far = _links(shape)
    beside, across = _peer_links(shape)
    fetched = table.row_bytes + _ID
    inside, away = u * near, u * far  # what a rank fetches of a row with its owner alone
    if table.merged:
        inside, away = u * beside, any_of_host * across
    forward = [
        [inside * fetched, p * fetched * beside, nothing],
        [away * fetched, nothing, nothing],
    ]
    everywhere = [nothing + line * share for share in _peer_links(topology)]
    if sums == "sparse":
        everywhere = [(p + any_of_all) * summed * share for share in _links(topology)]
    backward = [
        [inside * gradient, p * gradient * beside, everywhere[0]],
        [away * gradient, (any_of_host + any_of_group) * summed * across, everywhere[1]],
    ]
    speeds = np.array([rates.host_bytes_per_s, rates.cross_bytes_per_s / topology.local])[
        :, None, None
    ]
    first, second = ((np.array(part) / speeds).sum(0) for part in (forward, backward))
    return first, second


def _links(mesh: Topology) -> tuple[float, float]:
    """Of the ranks of a mesh, the share inside a host and across."""
    return (mesh.local - 1) / mesh.world, (mesh.world - mesh.local) / mesh.world


def _peer_links(mesh: Topology) -> tuple[float, float]:
    """Of the ranks of a host the share beside one, and of hosts the share away, for each rank."""
    return (mesh.local - 1) / mesh.local, (mesh.hosts - 1) / mesh.hosts / mesh.local
