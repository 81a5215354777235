"""Expected bytes and work of rows with one copy per host."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.codecs import vector_on
from rowmesh.cost.load import LINES, Load
from rowmesh.cost.rates import Rates, RowCost
from rowmesh.placement import TablePlan, Tier
from rowmesh.placement.codecs import EXACT, WireForm
from rowmesh.placement.hot import holders
from rowmesh.stats import Accesses
from rowmesh.topology import Topology

__all__ = ["expect_host_copies"]

_ID = 4.0


def expect_host_copies(
    table: TablePlan,
    tier: Tier,
    accesses: Accesses,
    count: int,
    *,
    topology: Topology,
    rates: Rates,
    form: WireForm = EXACT,
) -> Load:
    """What ``count`` rows of a table with copies per host add, whose accesses these are.

    With d distinct rows in a rank's batch, U_h and U those of a host's and of all ranks', s and g
    the bytes of a row and its gradient, and a local rank that holds share f of the rows: every
    rank sends each holder beside it f d (id + g) and gets f d s. The holder sends the peers that
    add up f U_h (H - 1) / H (g + id), and its own sums f U / H (g + id) to H - 1 peers; a set of
    ids is at most a bit for every row. Work: id q at every rank, (lookup + update) L f d at a
    holder, and update f (U_h + U).
    """
    hosts, local = topology.hosts, topology.local
    use = _Use(
        requests=accesses.requests,
        distinct=min(float(count), accesses.distinct),
        beside=min(float(count), accesses.union(local)),
        union=min(float(count), accesses.union(topology.world)),
        bits=count / 32.0,
    )
    held = np.bincount(holders(tier, max(count, 1), local), minlength=local) / max(count, 1)
    values = np.zeros((LINES, local))
    for first, last in table.columns():
        values += _piece(table, rates.row_cost(last - first), held, hosts, use, form)
    return Load(np.tile(values, hosts), frozenset({"rows", "host copies"} if count else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Use:
    """q, d, U_h, U, and words of a bitmap of all rows."""

    requests: float
    distinct: float
    beside: float
    union: float
    bits: float


def _piece(
    table: TablePlan,
    cost: RowCost,
    held: NDArray[np.float64],
    hosts: int,
    use: _Use,
    form: WireForm,
) -> NDArray[np.float64]:
    """Lines of a load, of each local rank."""
    local, trained = len(held), float(table.trainable)
    vector = vector_on("rows", cost.dim, form, table=table)
    back, part = (vector_on(edge, cost.dim, form) for edge in ("backward", "hot gradients"))
    row, gradient = vector.num_bytes, trained * back.num_bytes
    values = np.zeros((LINES, local))
    near, served = use.distinct * (1.0 - held), use.distinct * held * (local - 1)
    values[0] = near * (_ID + gradient) + served * row
    values[1] = near * row + served * (_ID + gradient)
    values[4], values[5] = near * gradient, served * gradient
    words = trained * (min(use.beside, use.bits) + min(use.union, use.bits))
    sums = words * _ID + trained * (use.beside + use.union) * part.num_bytes
    values[2] = values[3] = values[6] = values[7] = held * (hosts - 1) / hosts * sums
    values[8] = use.requests * cost.id_s + local * held * use.distinct * cost.lookup_s
    updates = local * use.distinct + use.beside + use.union
    values[8] += trained * held * updates * cost.update_s
    values[8] += near * (vector.decode_s + trained * back.encode_s)
    values[8] += served * (vector.encode_s + trained * back.decode_s)
    if hosts > 1:
        coded = use.beside * (part.encode_s + part.decode_s)
        coded += use.union * (part.encode_s / hosts + part.decode_s)
        values[8] += trained * held * coded
    return values
