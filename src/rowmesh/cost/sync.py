"""Expected bytes and work of keeping the replicas of a table together.

`rowmesh.cost.replicas` counts the same exactly, from batches.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.load import LINES, Load, no_load, spread
from rowmesh.cost.rates import Rates, RowCost
from rowmesh.placement import Copies, Sync, TablePlan, hot_ids
from rowmesh.placement.groups import Groups
from rowmesh.placement.hot import holders
from rowmesh.placement.memory import RULE_STATES, RuleState
from rowmesh.stats import Accesses
from rowmesh.topology import Topology

__all__ = ["expect_table_sync"]

_ID = 4.0
_ROWWISE = RULE_STATES["rowwise_adagrad"]
_RATES = Rates()
Floats = NDArray[np.float64]


def expect_table_sync(
    table: TablePlan,
    accesses: Accesses,
    *,
    topology: Topology,
    groups: Groups,
    sync: Sync,
    state: RuleState = _ROWWISE,
    rates: Rates = _RATES,
    num_hot: int = 0,
) -> Load:
    """What replicas of one table add to every rank's bytes and work, mean over steps.

    Of S rows at a place let n be those that a group touched, U(N) / owners, and u those that any
    group did, U(W) / owners, of k steps U(k N) and U(k W); b the bytes of a row that travel, and
    set(n) = id min(n, S / 32). A rank sends, and gets, of each column piece:
    M = 2: n b + set(n); M > 2: (M - 1) / M (n b + set(n) + u b + set(u));
    dense: 2 (M - 1) / M K b, K = S less the homes of hot rows.
    It is spread evenly over its M - 1 replicas, wherever they are. b is 4 x columns with mode
    ``gradients``; 4 with ``moments-first`` if the rule adds squares; and every k-th step, divided
    by k, the bytes of weights, with mode ``weights`` of state too.

    Work: a lookup for each row sent, an update for each that is added up, and for each sum that
    comes back an update of ``gradients``, else a lookup. ``num_hot`` rows more may be hot on every
    rank than the plan of the table says; the accesses are then of the others.
    """
    if groups.count == 1 or not table.trainable:
        return no_load(topology.world)
    inside, rounds = np.zeros((LINES, groups.size)), 0.0
    use = _Use.of(table, accesses, groups, topology, num_hot)
    for piece, (first, last) in enumerate(table.columns()):
        cost, rounds = rates.row_cost(last - first), 0.0
        for flow in _flows(table, cost, sync, state, rates):
            inside += _lines(use, piece, flow, groups)
            rounds += (2.0 if groups.count == 2 or flow.is_dense else 4.0) / flow.period
    total, near = spread(Load(inside, rounds=rounds), groups), _share_near(groups, topology)
    total.values[:2] *= near
    total.values[2:4] *= 1.0 - near
    return total


@functools.lru_cache(maxsize=64)
def _share_near(groups: Groups, topology: Topology) -> Floats:
    """Of every rank, the share of its other replicas that is on its host."""
    ranks = np.arange(groups.world)
    places = ranks % groups.size if groups.layout == "contiguous" else ranks // groups.count
    pairs = places * topology.hosts + ranks // topology.local  # replicas on one host have the same
    return np.asarray((np.bincount(pairs)[pairs] - 1) / (groups.count - 1))


@dataclass(frozen=True, slots=True)
class _Flow:
    """What travels of a row: so many bytes, every period-th step."""

    row_bytes: float
    period: int
    is_dense: bool
    lookup_s: float
    add_s: float
    told_s: float


def _flows(
    table: TablePlan, cost: RowCost, sync: Sync, state: RuleState, rates: Rates
) -> list[_Flow]:
    if sync.mode == "gradients":
        return [_Flow(4.0 * cost.dim, 1, False, cost.lookup_s, cost.update_s, cost.update_s)]
    row, flows = cost.dim * table.row_bytes / table.embedding_dim, list[_Flow]()
    if sync.mode == "weights":
        row += state.row_bytes + state.element_bytes * cost.dim
    elif state.adds_squares:
        one = rates.row_cost(1)
        flows.append(_Flow(4.0, 1, False, one.lookup_s, one.update_s, one.lookup_s))
    dense = sync.form == "dense"
    return [*flows, _Flow(row, sync.period, dense, cost.lookup_s, cost.update_s, cost.lookup_s)]


@dataclass(frozen=True, slots=True)
class _Use:
    """Rows of every place of a group, ``[places]`` of each column piece.

    Args:
        num_rows: Of the table.
        num_hot: Rows of it that are hot.
        cold: Accesses of the others.
        owns: ``[pieces, places]``: 1 / owners for an owner, else 0.
        copies: Of each tier with copies per host its accesses, its rows, and the share of them
            that each place holds.
    """

    num_rows: int
    num_hot: int
    cold: Accesses
    owns: Floats
    copies: list[tuple[Accesses, int, Floats]]

    @staticmethod
    def of(
        table: TablePlan, accesses: Accesses, groups: Groups, topology: Topology, num_hot: int
    ) -> "_Use":
        local, copies = topology.local, []
        for tier, rows in table.hot:
            hot, accesses = accesses.part(hot_ids(rows, where=f"table {table.name!r}"))
            num_hot += rows.count
            if tier.copies is Copies.HOST:
                held = np.bincount(holders(tier, rows.count, local), minlength=local) / rows.count
                copies.append((hot, rows.count, np.tile(held, groups.size // local)))
        places = np.array([groups.place(rank) for rank in table.rest.ranks])
        places = places.reshape(table.rest.split.columns, -1)
        owns = np.zeros((len(places), groups.size))
        for piece, mine in enumerate(places):
            owns[piece, mine] = 1.0 / len(mine)
        return _Use(table.num_embeddings, num_hot, accesses, owns, copies)

    def slots(self, piece: int) -> Floats:
        """S."""
        found: Floats = self.num_rows * self.owns[piece]
        for _, count, held in self.copies:
            found = found + count * held
        return found

    def kept(self, piece: int) -> Floats:
        """K."""
        return np.asarray(self.slots(piece) - self.num_hot * self.owns[piece])

    def touched(self, piece: int, num_batches: int) -> Floats:
        """Rows that so many batches touch."""
        most = float(self.num_rows - self.num_hot)
        found = min(most, self.cold.union(num_batches)) * self.owns[piece]
        for hot, count, held in self.copies:
            found = found + min(float(count), hot.union(num_batches)) * held
        return np.asarray(found)


def _lines(use: _Use, piece: int, flow: _Flow, groups: Groups) -> Floats:
    """Lines of a load, of each place, as if all replicas were on one host and on others."""
    away, values = (groups.count - 1) / groups.count, np.zeros((LINES, groups.size))
    if flow.is_dense:
        rows = use.kept(piece) * away
        sent, work = 2.0 * rows * flow.row_bytes, 4.0 * rows * flow.lookup_s
    else:
        slots = use.slots(piece)
        mine = use.touched(piece, groups.size * flow.period)
        sent = mine * flow.row_bytes + _set_bytes(mine, slots)
        work = mine * (flow.lookup_s + flow.add_s)
        if groups.count > 2:
            union = use.touched(piece, groups.world * flow.period)
            sent = away * (sent + union * flow.row_bytes + _set_bytes(union, slots))
            told = union * (flow.lookup_s / groups.count + away * flow.told_s)
            work = away * work + told
    values[:4], values[8] = sent / flow.period, work / flow.period
    return values


def _set_bytes(rows: Floats, slots: Floats) -> Floats:
    """Which of the rows: a list or a bitmap, or nothing if all are meant."""
    return np.asarray(_ID * np.where(rows < slots, np.minimum(rows, slots / 32.0), 0.0))
