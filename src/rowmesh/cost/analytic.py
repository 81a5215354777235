"""`predict`: the ledger of one training step, from the plan and the batches alone.

Written from the formulas of docs/plan.md, one table and one rank at a time, and deliberately
without the runtime's routes: that the two agree to the byte is a test of both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, Exchange, Plan, TablePlan, hot_ids
from rowmesh.placement.columns import num_blocks
from rowmesh.topology import Topology

__all__ = ["predict"]

Batches = Sequence[KeyedJaggedTensor | Mapping[str, KeyedJaggedTensor]]
_Traffic = Counter[tuple[str, int, int]]  # (edge, source, target) -> bytes


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
    traffic: _Traffic = Counter()
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


def _by_rank(plan: Plan, traffic: _Traffic) -> list[dict[str, dict[str, int]]]:
    topology = plan.mesh.topology
    found: list[dict[str, dict[str, int]]] = [{} for _ in range(topology.world)]
    for (edge, source, target), num_bytes in sorted(traffic.items()):
        if num_bytes and source != target:
            links = found[source].setdefault(edge, {})
            link = topology.link(source, target).value
            links[link] = links.get(link, 0) + num_bytes
    return found


@dataclass(frozen=True, slots=True)
class _Piece:
    """Columns of a table and the ranks that hold them; equal in `stack`, they travel together."""

    table: TablePlan
    width: int
    ranks: tuple[int, ...]

    @property
    def stack(self) -> tuple[object, ...]:
        table = self.table
        pooled = table.exchange is Exchange.POOLED and not _is_copied(table)
        widened = table.data_type != "fp32" and pooled
        form = (table.data_type, table.trainable, widened, table.is_relayed)
        return self.width, table.embedding_dim, *form

    @property
    def row_bytes(self) -> int:
        return self.width * self.table.row_bytes // self.table.embedding_dim


def _is_copied(table: TablePlan) -> bool:
    return table.rest.copies is Copies.WORLD


def _pieces(table: TablePlan) -> list[_Piece]:
    columns, ranks = table.columns(), table.rest.ranks
    n = len(ranks) // len(columns)
    return [
        _Piece(table, last - first, ranks[c * n : (c + 1) * n])
        for c, (first, last) in enumerate(columns)
    ]


def _collection(
    traffic: _Traffic,
    plan: Plan,
    tables: Sequence[TablePlan],
    batches: Sequence[KeyedJaggedTensor],
) -> None:
    ranks, topology = range(len(batches)), plan.mesh.topology
    pieces = [piece for table in tables for piece in _pieces(table)]
    stacks = {piece.stack: [p for p in pieces if p.stack == piece.stack] for piece in pieces}
    wide = any(_most_slots(members, topology) >= 1 << 31 for members in stacks.values())
    id_bytes = 8 if wide else 4
    _to_all(traffic, "status", ranks, 8)
    _to_all(traffic, "counts", ranks, 8 * (1 + 4 * len(stacks)))
    for piece in pieces:
        for rank in () if _is_copied(piece.table) else ranks:
            if piece.table.is_relayed:
                _relayed_piece(traffic, piece, batches[rank], rank, id_bytes, topology.local)
            else:
                _home_piece(traffic, piece, batches[rank], rank, id_bytes)
    for members in stacks.values():
        if members[0].table.is_relayed:
            for host in {topology.host(rank) for piece in members for rank in piece.ranks}:
                beside = [r for r in ranks if topology.host(r) == host]
                _to_all(traffic, "counts", beside, 8 * topology.hosts)
        copies = [c for piece in members for c in _copies(piece) if c.sums == "sparse"]
        if copies and members[0].table.trainable:
            _sparse_sums(traffic, copies, batches, id_bytes)
            _to_all(traffic, "counts", ranks, 8)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows of a piece that every rank holds: all of them, or a hot set."""

    piece: _Piece
    rows: NDArray[np.int64] | None
    sums: str

    def touched(self, batch: KeyedJaggedTensor) -> NDArray[np.int64]:
        ids = np.unique(_ids(self.piece.table, batch)[0])
        return ids if self.rows is None else np.intersect1d(ids, self.rows)

    def sizes(self) -> list[int]:
        """Rows that each of the piece's ranks adds up."""
        homes = self.piece.table.homes()
        if self.rows is None:
            return [homes.num_slots(i) for i in range(homes.num_owners)]
        counts: list[int] = np.bincount(
            homes.owners(self.rows), minlength=homes.num_owners
        ).tolist()
        return counts


def _copies(piece: _Piece) -> list[_Copy]:
    table = piece.table
    if _is_copied(table):
        return [_Copy(piece, None, table.rest.sums)]
    where = f"table {table.name!r}"
    return [_Copy(piece, hot_ids(rows, where=where), tier.sums) for tier, rows in table.hot]


def _to_all(traffic: _Traffic, edge: str, ranks: Sequence[int], num_bytes: int) -> None:
    for source in ranks:
        for target in ranks:
            traffic[edge, source, target] += num_bytes


def _most_slots(pieces: Sequence[_Piece], topology: Topology) -> int:
    """Slots that one rank can be asked for: its own, or as a relay those of its host."""
    slots = [0] * topology.world
    for piece in pieces:
        if not _is_copied(piece.table):
            homes = piece.table.homes()
            for owner, rank in enumerate(piece.ranks):
                slots[rank] += homes.num_slots(owner)
    size = topology.local if pieces[0].table.is_relayed else 1
    return max(sum(slots[r : r + size]) for r in range(0, len(slots), size))


def _ids(table: TablePlan, batch: KeyedJaggedTensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of all the table's features, and a number for the bag of each."""
    ids: list[NDArray[np.int64]] = []
    bags: list[NDArray[np.int64]] = []
    for feature in table.feature_names:
        jagged = batch[feature]
        ids.append(jagged.values().cpu().numpy().astype(np.int64))
        sample = np.repeat(np.arange(batch.stride()), jagged.lengths().cpu().numpy())
        bags.append(sample + len(bags) * batch.stride())
    return np.concatenate(ids), np.concatenate(bags)


def _cold_ids(
    table: TablePlan, batch: KeyedJaggedTensor
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`_ids` without those of hot rows."""
    ids, bags = _ids(table, batch)
    for _, rows in table.hot:
        cold = ~np.isin(ids, hot_ids(rows, where=f"table {table.name!r}"))
        ids, bags = ids[cold], bags[cold]
    return ids, bags


def _home_piece(
    traffic: _Traffic, piece: _Piece, batch: KeyedJaggedTensor, rank: int, id_bytes: int
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
    traffic: _Traffic,
    piece: _Piece,
    batch: KeyedJaggedTensor,
    rank: int,
    id_bytes: int,
    local: int,
) -> None:
    """Bags between ``rank`` and its peer on the owners' host, its distinct rows beyond that."""
    table = piece.table
    ids, bags = _ids(table, batch)
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
    traffic: _Traffic, table: TablePlan, batches: Sequence[KeyedJaggedTensor]
) -> None:
    """One float a column block, of every touched row, to the owners of its other columns."""
    touched = np.unique(np.concatenate([_cold_ids(table, batch)[0] for batch in batches]))
    owners, pieces = table.homes().owners(touched), _pieces(table)
    block = table.embedding_dim // num_blocks(table.embedding_dim)
    for index in range(table.homes().num_owners):
        num_rows = int((owners == index).sum())
        for mine in pieces:
            for theirs in pieces:
                edge = ("column squares", mine.ranks[index], theirs.ranks[index])
                traffic[edge] += num_rows * 4 * (mine.width // block)


def _sparse_sums(
    traffic: _Traffic,
    copies: Sequence[_Copy],
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


def _set_words(count: int, size: int) -> int:
    """Which of ``size`` rows: nothing if all, else a list or a bitmap."""
    return 0 if count == size else min(count, -(-size // 32))


def _buckets(traffic: _Traffic, plan: Plan, world: int) -> None:
    """Dense gradients, and of copies with dense sums a line of gradient and flag a row."""
    lines = {"dense": 0, "bucket": 0}
    for table in plan.tables:
        for piece in _pieces(table) if table.trainable else ():
            for copy in _copies(piece):
                if copy.sums in lines:
                    lines[copy.sums] += sum(copy.sizes()) * (piece.width + 1)
    elements = list(plan.dense)
    if elements:
        elements[-1] += lines.pop("bucket")
    for size in elements:
        _bucket(traffic, "dense", size, world, plan.span)
    _bucket(traffic, "hot gradients", sum(lines.values()), world, plan.span)


def _bucket(traffic: _Traffic, edge: str, elements: int, world: int, span: int) -> None:
    """Groups of ``span`` ranks add up a chunk each; so do, of that chunk, peers of the groups."""
    for first in range(0, world, span):
        _ring(traffic, edge, elements, range(first, first + span))
    for place, size in enumerate(_chunks(elements, span)):
        _ring(traffic, edge, size, range(place, world, span))


def _ring(traffic: _Traffic, edge: str, elements: int, ranks: Sequence[int]) -> None:
    """A chunk to every rank, which adds it up and sends the sum to all."""
    chunks = _chunks(elements, len(ranks))
    for i, source in enumerate(ranks):
        for j, target in enumerate(ranks):
            traffic[edge, source, target] += 4 * (chunks[i] + chunks[j])


def _chunks(elements: int, count: int) -> list[int]:
    size = -(-elements // count)
    return [max(0, min(size, elements - size * i)) for i in range(count)]
