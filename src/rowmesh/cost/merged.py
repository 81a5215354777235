"""Bytes of merged requests: a row crosses to a host once, and its gradient back once."""

from collections.abc import Sequence

import numpy as np

from rowmesh.cost.pieces import Piece, Traffic, cold_ids_of
from rowmesh.features import KeyedJaggedTensor
from rowmesh.topology import Topology

__all__ = ["add_merged"]


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
