"""Bytes of copies' gradients: summed over all ranks, or inside hosts and then among peers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.pieces import Copy, HostCopy, Traffic, set_words
from rowmesh.features import KeyedJaggedTensor
from rowmesh.stats import distinct
from rowmesh.topology import Topology

__all__ = ["add_host_rows", "add_host_sums", "add_sparse_sums"]


def add_sparse_sums(
    traffic: Traffic,
    copies: Sequence[Copy],
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
) -> None:
    """Gradients of touched rows to their sum owner; sums of rows any rank touched to all."""
    world, row = len(batches), copies[0].piece.wire_bytes("hot gradients")
    sizes = sum((copy.sizes() for copy in copies), np.zeros(world, dtype=np.int64))
    counts = np.zeros((world, world), dtype=np.int64)  # [source, target]
    unions = np.zeros(world, dtype=np.int64)
    for copy in copies:
        touched = [copy.touched(batch) for batch in batches]
        for source, rows in enumerate(touched):
            counts[source] += np.bincount(copy.adders(rows), minlength=world)
        anyone = distinct(np.concatenate(touched))
        unions += np.bincount(copy.adders(anyone), minlength=world)
    for target, (size, union) in enumerate(zip(sizes.tolist(), unions.tolist(), strict=True)):
        for source, count in enumerate(counts[:, target].tolist()):
            traffic["ids", source, target] += set_words(count, size) * id_bytes
            traffic["hot gradients", source, target] += count * row
            sums = set_words(union, size) * id_bytes + union * row
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
            traffic["rows", holder, rank] += count * copy.piece.inside_bytes("rows")
            if copy.piece.table.trainable:
                traffic["backward", rank, holder] += count * copy.piece.inside_bytes("backward")


def add_host_sums(
    traffic: Traffic,
    copies: Sequence[HostCopy],
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
    topology: Topology,
) -> None:
    """Sums of a host to the peer on the home's host, which adds them up and tells the others."""
    hosts, local = topology.hosts, topology.local
    row = copies[0].piece.wire_bytes("hot gradients")
    of_host = [
        [
            distinct(np.concatenate([c.touched(b) for b in batches[h * local : (h + 1) * local]]))
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
            union = count([distinct(np.concatenate(parts)) for parts in of_host], place, home)
            target = home * local + place
            for host in range(hosts):
                source = host * local + place
                touched = count([parts[host] for parts in of_host], place, home)
                sent = set_words(touched, size) * id_bytes + touched * row
                traffic["hot gradients", source, target] += sent
                told = set_words(union, size) * id_bytes + union * row
                traffic["hot gradients", target, source] += told
                traffic["counts", source, target] += 16
