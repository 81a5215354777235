"""Bytes of copies' gradients: summed over all ranks, or inside hosts and then among peers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.pieces import Copy, HostCopy, Traffic
from rowmesh.features import KeyedJaggedTensor
from rowmesh.topology import Topology

__all__ = ["add_host_rows", "add_host_sums", "add_sparse_sums"]


def add_sparse_sums(
    traffic: Traffic,
    copies: Sequence[Copy],
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
) -> None:
    """Gradients of touched rows to their sum owner; sums of rows any rank touched to all."""
    world, row = len(batches), 4 * copies[0].piece.width
    touched = [[copy.touched(batch) for batch in batches] for copy in copies]
    for target in range(world):
        size, union = 0, 0
        from_source = [0] * world
        for copy, rows in zip(copies, touched, strict=True):
            if target not in copy.piece.ranks:
                continue
            homes, index = copy.piece.table.homes(), copy.piece.ranks.index(target)
            size += copy.sizes()[index]
            mine = [r[homes.owners(r) == index] for r in rows]
            union += len(np.unique(np.concatenate(mine)))
            from_source = [n + len(m) for n, m in zip(from_source, mine, strict=True)]
        for source, count in enumerate(from_source):
            traffic["ids", source, target] += _set_words(count, size) * id_bytes
            traffic["hot gradients", source, target] += count * row
            sums = _set_words(union, size) * id_bytes + union * row
            traffic["hot gradients", target, source] += sums


def add_host_rows(
    traffic: Traffic,
    copy: HostCopy,
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
    topology: Topology,
) -> None:
    """Ids to the rank beside that has the rows, vectors back, gradients out."""
    for rank, batch in enumerate(batches):
        held = copy.holders(copy.touched(batch), topology)
        for local in range(topology.local):
            count, holder = int((held == local).sum()), rank - rank % topology.local + local
            traffic["ids", rank, holder] += count * id_bytes
            traffic["rows", holder, rank] += count * copy.piece.row_bytes
            if copy.piece.table.trainable:
                traffic["backward", rank, holder] += count * 4 * copy.piece.width


def add_host_sums(
    traffic: Traffic,
    copies: Sequence[HostCopy],
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
    topology: Topology,
) -> None:
    """Sums of a host to the peer on the home's host, which adds them up and tells the others."""
    hosts, local, row = topology.hosts, topology.local, 4 * copies[0].piece.width
    of_host = [
        [
            np.unique(np.concatenate([c.touched(b) for b in batches[h * local : (h + 1) * local]]))
            for h in range(hosts)
        ]
        for c in copies
    ]

    def count(parts: Sequence[NDArray[np.int64]], place: int, home: int) -> int:
        """Rows of each copy that lie with local rank ``place`` and are summed on host ``home``."""
        total = 0
        for copy, rows in zip(copies, parts, strict=True):
            mine = copy.holders(rows, topology) == place
            total += int((mine & (copy.homes(rows, topology) == home)).sum())
        return total

    for place in range(local):
        for home in range(hosts):
            size = count([copy.rows for copy in copies], place, home)
            union = count([np.unique(np.concatenate(parts)) for parts in of_host], place, home)
            target = home * local + place
            for host in range(hosts):
                source = host * local + place
                touched = count([parts[host] for parts in of_host], place, home)
                sent = _set_words(touched, size) * id_bytes + touched * row
                traffic["hot gradients", source, target] += sent
                told = _set_words(union, size) * id_bytes + union * row
                traffic["hot gradients", target, source] += told
                traffic["counts", source, target] += 16


def _set_words(count: int, size: int) -> int:
    """Which of ``size`` rows: nothing if all, else a list or a bitmap."""
    return 0 if count == size else min(count, -(-size // 32))
