"""Bytes and work of merged requests: a row crosses to a host once, and its gradient back once."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.codecs import vector_on
from rowmesh.cost.pieces import Piece, Traffic, cold_ids_of
from rowmesh.cost.rates import RowCost
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Groups, TablePlan
from rowmesh.placement.codecs import EXACT, WireForm
from rowmesh.topology import Topology

__all__ = ["add_merged", "expect_merged", "may_follow"]

_ID = 4.0
_Lines = NDArray[np.float64]
_Number = float | _Lines


def may_follow(table: TablePlan, groups: Groups) -> bool:
    """Whether gradients of rows that the next batch does not ask for may cross under its forward:
    of merged requests, but for groups, which sync, and columns, whose squares are added."""
    one_piece = table.rest.split.columns == 1 and groups.count == 1
    return table.merged and table.trainable and one_piece


def add_merged(
    traffic: Traffic,
    members: Sequence[Piece],
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
    shape: Topology,
) -> None:
    """What the merged pieces of a stack send inside a shard group of ``shape``.

    Every rank asks the owner's peer on its host for its distinct rows; the peer asks the owner for
    the distinct rows of its host.
    """
    local = shape.local
    for place in range(shape.world):
        for peer in range(place % local, shape.world, local):
            traffic["counts", place, peer] += 8
    for piece in members:
        for host in range(shape.hosts if piece.table.merged else 0):
            ranks = range(host * local, (host + 1) * local)
            asked = [np.unique(cold_ids_of(piece.table, batches[rank])[0]) for rank in ranks]
            together = np.unique(np.concatenate(asked))
            for index, owner in enumerate(piece.ranks):
                peer = host * local + owner % local
                pairs = [(r, peer, ids) for r, ids in zip(ranks, asked, strict=True)]
                for source, target, ids in (*pairs, (peer, owner, together)):
                    num_rows = int((piece.table.homes().owners(ids) == index).sum())
                    vector = piece.wire_bytes if target == owner != peer else piece.inside_bytes
                    traffic["ids", source, target] += num_rows * id_bytes
                    traffic["rows", target, source] += num_rows * vector("rows")
                    if piece.table.trainable:
                        traffic["backward", source, target] += num_rows * vector("backward")


def expect_merged(
    table: TablePlan,
    numbers: tuple[_Number, _Number, _Number],
    zeros: Callable[[], _Lines],
    topology: Topology,
    n: int,
    cost: RowCost,
    form: WireForm,
) -> tuple[_Lines, _Lines, _Lines]:
    """Base, near and owner lines of a `Part` with n owners.

    Peers of owners are taken to be spread evenly over the ranks of a host, as owners mostly are.

    Args:
        table: Merged.
        numbers: A rank's requests q and distinct rows d, and the distinct rows h of a host.
        zeros: New lines.
        topology: Of a shard group.
        n: Owners.
        cost: Of a row.
        form: For what crosses.
    """
    (q, d, host), hosts, local = numbers, topology.hosts, topology.local
    base, near, owner, trained = zeros(), zeros(), zeros(), float(table.trainable)
    passed = d * (local - 1) / local  # rows a rank asks of others, and is asked for by them
    row, back = (vector_on(e, cost.dim, form, table=table) for e in ("rows", "backward"))
    plain, grad = (vector_on(e, cost.dim, EXACT, table=table) for e in ("rows", "backward"))
    share, asked = host / n / local, (hosts - 1) * host / n
    for first, there, again, inside in (
        (0, _ID + trained * back.num_bytes, row.num_bytes, _ID + plain.num_bytes),
        (4, trained * back.num_bytes, 0.0, 0.0),
    ):
        base[first : first + 2] = passed * (inside + trained * grad.num_bytes)
        base[first + 2 : first + 4] = n * share * there, n * share * again
        near[first + 2 : first + 4] = -share * there, -share * again
        owner[first + 2 : first + 4] = asked * again, asked * there
    asker_s = row.decode_s + trained * back.encode_s
    work = cost.lookup_s + trained * cost.update_s
    passing_s = cost.id_s + cost.lookup_s + trained * cost.update_s / 2.0  # added up, not stepped
    base[8] = q * cost.id_s + d * passing_s + n * share * asker_s
    near[8] = -share * asker_s
    owner[8] = hosts * host / n * work + asked * (row.encode_s + trained * back.decode_s)
    return base, near, owner
