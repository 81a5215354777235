"""`predict`: the ledger of one training step, from the plan and the batches alone.

Written from the formulas of docs/plan.md, one table and one rank at a time, and deliberately
without the runtime's routes: that the two agree to the byte is a test of both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.pieces import (
    Piece,
    Traffic,
    copies_of,
    host_copies_of,
    ids_of,
    is_copied,
    pieces_of,
)
from rowmesh.cost.sums import add_host_rows, add_host_sums, add_sparse_sums
from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, Exchange, Plan, TablePlan, hot_ids
from rowmesh.placement.columns import num_blocks
from rowmesh.topology import Topology

__all__ = ["predict"]

Batches = Sequence[KeyedJaggedTensor | Mapping[str, KeyedJaggedTensor]]


def predict(
    plan: Plan, batches: Batches, *, adds_squares: bool = True
) -> list[dict[str, dict[str, int]]]:
    """Bytes every rank sends in one training step: ``[rank][edge][link]``.

    Args:
        plan: A validated plan.
        batches: Per rank, the features of the model's collection, or of each by its path.
        adds_squares: Whether the update rule does, as row-wise AdaGrad; else columns that are
            split tell each other nothing.

    Returns:
        The same numbers as each rank's ledger shows after the step, edges of zero left out.
    """
    world = plan.mesh.hosts * plan.mesh.local
    if len(batches) != world:
        raise InputError(f"the plan has {world} ranks, but {len(batches)} batches were given")
    traffic: Traffic = Counter()
    for path in dict.fromkeys(t.collection for t in plan.tables):
        tables = [t for t in plan.tables if t.collection == path]
        mine = [b if isinstance(b, KeyedJaggedTensor) else b[path] for b in batches]
        _collection(traffic, plan, tables, mine)
        for table in tables if adds_squares else ():
            if table.trainable and table.rest.split.columns > 1:
                _column_squares(traffic, table, mine)
    if world > 1:
        _buckets(traffic, plan, world)
    return _by_rank(plan, traffic)


def _by_rank(plan: Plan, traffic: Traffic) -> list[dict[str, dict[str, int]]]:
    topology = plan.mesh.topology
    found: list[dict[str, dict[str, int]]] = [{} for _ in range(topology.world)]
    for (edge, source, target), num_bytes in sorted(traffic.items()):
        if num_bytes and source != target:
            links = found[source].setdefault(edge, {})
            link = topology.link(source, target).value
            links[link] = links.get(link, 0) + num_bytes
    return found


def _collection(
    traffic: Traffic,
    plan: Plan,
    tables: Sequence[TablePlan],
    batches: Sequence[KeyedJaggedTensor],
) -> None:
    ranks, topology = range(len(batches)), plan.mesh.topology
    apart = any(tier.copies is Copies.HOST for table in tables for tier in table.tiers)
    pieces = [replace(piece, apart=apart) for table in tables for piece in pieces_of(table)]
    stacks = {piece.stack: [p for p in pieces if p.stack == piece.stack] for piece in pieces}
    wide = any(_most_slots(members, topology) >= 1 << 31 for members in stacks.values())
    id_bytes = 8 if wide else 4
    _to_all(traffic, "status", ranks, 8)
    _to_all(traffic, "counts", ranks, 8 * (1 + 4 * len(stacks)))
    for piece in pieces:
        for rank in () if is_copied(piece.table) else ranks:
            if piece.table.is_relayed:
                _relayed_piece(traffic, piece, batches[rank], rank, id_bytes, topology.local)
            else:
                _home_piece(traffic, piece, batches[rank], rank, id_bytes)
    for members in stacks.values():
        if members[0].table.is_relayed:
            for host in {topology.host(rank) for piece in members for rank in piece.ranks}:
                beside = [r for r in ranks if topology.host(r) == host]
                _to_all(traffic, "counts", beside, 8 * topology.hosts)
        per_host = [c for piece in members for c in host_copies_of(piece)]
        for copy in per_host:
            add_host_rows(traffic, copy, batches, id_bytes, topology)
        if per_host and members[0].table.trainable:
            add_host_sums(traffic, per_host, batches, id_bytes, topology)
        copies = [c for piece in members for c in copies_of(piece) if c.sums == "sparse"]
        if copies and members[0].table.trainable:
            add_sparse_sums(traffic, copies, batches, id_bytes)
            _to_all(traffic, "counts", ranks, 8)


def _to_all(traffic: Traffic, edge: str, ranks: Sequence[int], num_bytes: int) -> None:
    for source in ranks:
        for target in ranks:
            traffic[edge, source, target] += num_bytes


def _most_slots(pieces: Sequence[Piece], topology: Topology) -> int:
    """Slots that one rank can be asked for: its own, or as a relay those of its host."""
    slots = [0] * topology.world
    for piece in pieces:
        if not is_copied(piece.table):
            homes = piece.table.homes()
            for owner, rank in enumerate(piece.ranks):
                slots[rank] += homes.num_slots(owner)
            for copy in host_copies_of(piece):
                held = copy.holders(copy.rows, topology)
                for rank in range(topology.world):
                    slots[rank] += int((held == rank % topology.local).sum())
    size = topology.local if pieces[0].table.is_relayed else 1
    return max(sum(slots[r : r + size]) for r in range(0, len(slots), size))


def _cold_ids(
    table: TablePlan, batch: KeyedJaggedTensor
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`ids_of` without those of hot rows."""
    ids, bags = ids_of(table, batch)
    for _, rows in table.hot:
        cold = ~np.isin(ids, hot_ids(rows, where=f"table {table.name!r}"))
        ids, bags = ids[cold], bags[cold]
    return ids, bags


def _home_piece(
    traffic: Traffic, piece: Piece, batch: KeyedJaggedTensor, rank: int, id_bytes: int
) -> None:
    """Ids out, vectors back, gradients out, between ``rank`` and the owners of one piece."""
    table = piece.table
    ids, bags = _cold_ids(table, batch)
    pooled = table.exchange is Exchange.POOLED
    if not pooled and table.dedup:
        ids = np.unique(ids)
    owners = table.homes().owners(ids)
    vector_bytes = 4 * piece.width if pooled else piece.row_bytes
    for index, owner in enumerate(piece.ranks):
        chosen = owners == index
        num_ids = int(chosen.sum())
        num_vectors = len(np.unique(bags[chosen])) if pooled else num_ids
        traffic["ids", rank, owner] += num_ids * id_bytes
        if pooled and table.weighted:
            traffic["sample weights", rank, owner] += num_ids * 4
        traffic[table.exchange.value, owner, rank] += num_vectors * vector_bytes
        if table.trainable:
            traffic["backward", rank, owner] += num_vectors * 4 * piece.width


def _relayed_piece(
    traffic: Traffic,
    piece: Piece,
    batch: KeyedJaggedTensor,
    rank: int,
    id_bytes: int,
    local: int,
) -> None:
    """Bags between ``rank`` and its peer on the owners' host, its distinct rows beyond that."""
    table = piece.table
    ids, bags = ids_of(table, batch)
    relay = piece.ranks[0] - piece.ranks[0] % local + rank % local
    num_bags = len(np.unique(bags))
    traffic["ids", rank, relay] += len(ids) * id_bytes
    if table.weighted:
        traffic["sample weights", rank, relay] += len(ids) * 4
    traffic["pooled", relay, rank] += num_bags * 4 * piece.width
    distinct = np.unique(ids)
    owners = table.homes().owners(distinct)
    for index, owner in enumerate(piece.ranks):
        num_rows = int((owners == index).sum())
        traffic["ids", relay, owner] += num_rows * id_bytes
        traffic["rows", owner, relay] += num_rows * piece.row_bytes
        if table.trainable:
            traffic["backward", relay, owner] += num_rows * 4 * piece.width
    if table.trainable:
        traffic["backward", rank, relay] += num_bags * 4 * piece.width


def _column_squares(
    traffic: Traffic, table: TablePlan, batches: Sequence[KeyedJaggedTensor]
) -> None:
    """One float a column block, of every touched row, to the owners of its other columns."""
    touched = np.unique(np.concatenate([_cold_ids(table, batch)[0] for batch in batches]))
    owners, pieces = table.homes().owners(touched), pieces_of(table)
    block = table.embedding_dim // num_blocks(table.embedding_dim)
    for index in range(table.homes().num_owners):
        num_rows = int((owners == index).sum())
        for mine in pieces:
            for theirs in pieces:
                edge = ("column squares", mine.ranks[index], theirs.ranks[index])
                traffic[edge] += num_rows * 4 * (mine.width // block)


def _buckets(traffic: Traffic, plan: Plan, world: int) -> None:
    """Dense gradients, and of copies with dense sums a line of gradient and flag a row."""
    lines = {"dense": 0, "bucket": 0}
    for table in plan.tables:
        for piece in pieces_of(table) if table.trainable else ():
            for copy in copies_of(piece):
                if copy.sums in lines:
                    lines[copy.sums] += sum(copy.sizes()) * (piece.width + 1)
    elements = list(plan.dense)
    if elements:
        elements[-1] += lines.pop("bucket")
    for size in elements:
        _bucket(traffic, "dense", size, world, plan.span)
    _bucket(traffic, "hot gradients", sum(lines.values()), world, plan.span)


def _bucket(traffic: Traffic, edge: str, elements: int, world: int, span: int) -> None:
    """Groups of ``span`` ranks add up a chunk each; so do, of that chunk, peers of the groups."""
    for first in range(0, world, span):
        _ring(traffic, edge, elements, range(first, first + span))
    for place, size in enumerate(_chunks(elements, span)):
        _ring(traffic, edge, size, range(place, world, span))


def _ring(traffic: Traffic, edge: str, elements: int, ranks: Sequence[int]) -> None:
    """A chunk to every rank, which adds it up and sends the sum to all."""
    chunks = _chunks(elements, len(ranks))
    for i, source in enumerate(ranks):
        for j, target in enumerate(ranks):
            traffic[edge, source, target] += 4 * (chunks[i] + chunks[j])


def _chunks(elements: int, count: int) -> list[int]:
    size = -(-elements // count)
    return [max(0, min(size, elements - size * i)) for i in range(count)]
