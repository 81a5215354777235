"""Pieces of tables, their copies, and what a batch asks of them: what `predict` counts with."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, Exchange, TablePlan, Tier, hot_ids
from rowmesh.placement.codecs import EXACT, WireForm
from rowmesh.placement.groups import Groups
from rowmesh.placement.hot import holders
from rowmesh.stats import distinct
from rowmesh.topology import Topology

__all__ = [
    "Copy",
    "HostCopy",
    "Piece",
    "Traffic",
    "cold_ids_of",
    "copies_of",
    "host_copies_of",
    "ids_of",
    "is_copied",
    "pieces_of",
    "set_words",
]

Traffic = Counter[tuple[str, int, int]]  # (edge, source, target) -> bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns of a table and who holds them; equal in `stack`, they travel together.

    ``ranks`` are places in a shard group, which are ranks where there is one group.
    """

    table: TablePlan
    groups: Groups
    width: int
    ranks: tuple[int, ...]
    apart: bool = False  # bags that owners pool have stacks of their own
    merges: bool = False  # some table of the collection is merged: copied ones travel with it
    form: WireForm = EXACT

    @property
    def stack(self) -> tuple[object, ...]:
        table = self.table
        pooled = table.exchange is Exchange.POOLED and not is_copied(table)
        widened = table.data_type != "fp32" and pooled
        form = (table.data_type, table.trainable, widened, table.is_relayed, self.apart and pooled)
        merged = table.merged or (self.merges and is_copied(table))
        return self.groups.size, self.width, table.embedding_dim, *form, merged

    @property
    def row_bytes(self) -> int:
        return self.width * self.table.row_bytes // self.table.embedding_dim

    def inside_bytes(self, edge: str) -> int:
        """As `wire_bytes`, between ranks of a host: merged tables have no codecs there."""
        return self._bytes(edge, EXACT if self.table.merged else self.form)

    def wire_bytes(self, edge: str) -> int:
        """Of a vector on an edge; rows of 16-bit tables travel as they are."""
        return self._bytes(edge, self.form)

    def _bytes(self, edge: str, form: WireForm) -> int:
        if edge == "rows" and self.table.data_type != "fp32":
            return self.row_bytes
        return form.vector_bytes(edge, self.width)


def is_copied(table: TablePlan) -> bool:
    return table.rest.copies is Copies.WORLD


def pieces_of(table: TablePlan, groups: Groups) -> list[Piece]:
    columns, places = table.columns(), tuple(map(groups.place, table.rest.ranks))
    n = len(places) // len(columns)
    return [
        Piece(table, groups, last - first, places[c * n : (c + 1) * n])
        for c, (first, last) in enumerate(columns)
    ]


def ids_of(
    table: TablePlan, batch: KeyedJaggedTensor
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of all the table's features, and a number for the bag of each."""
    ids: list[NDArray[np.int64]] = []
    bags: list[NDArray[np.int64]] = []
    for feature in table.feature_names:
        jagged = batch[feature]
        ids.append(jagged.values().cpu().numpy().astype(np.int64))
        sample = np.repeat(np.arange(batch.stride()), jagged.lengths().cpu().numpy())
        bags.append(sample + len(bags) * batch.stride())
    return np.concatenate(ids), np.concatenate(bags)


def cold_ids_of(
    table: TablePlan, batch: KeyedJaggedTensor
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`ids_of` without those of hot rows."""
    ids, bags = ids_of(table, batch)
    for _, rows in table.hot:
        cold = ~np.isin(ids, hot_ids(rows, where=f"table {table.name!r}"))
        ids, bags = ids[cold], bags[cold]
    return ids, bags


def set_words(count: int, size: int) -> int:
    """Which of ``size`` rows: nothing if all, else a list or a bitmap."""
    return 0 if count == size else min(count, -(-size // 32))


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows of a piece that every rank holds: all of them, or a hot set."""

    piece: Piece
    rows: NDArray[np.int64] | None
    sums: str

    def touched(self, batch: KeyedJaggedTensor) -> NDArray[np.int64]:
        ids = distinct(ids_of(self.piece.table, batch)[0])
        return ids if self.rows is None else np.intersect1d(ids, self.rows)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.piece.table.num_embeddings if self.rows is None else len(self.rows)

    def adders(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank that adds up each of ``rows``.

        The j-th hot row of an owner, by id, is added up at its place in group j mod M.
        """
        owners = self.piece.table.homes().owners(rows)
        groups, places = self.piece.groups, np.asarray(self.piece.ranks)
        if groups.count == 1 or self.rows is None:
            return np.asarray(places[owners])
        of_all, group = self.piece.table.homes().owners(self.rows), np.zeros(self.count, np.int64)
        for owner in range(len(places)):
            mine = np.flatnonzero(of_all == owner)
            group[mine] = np.arange(len(mine)) % groups.count
        chosen = group[np.searchsorted(self.rows, rows)]
        ranks = np.array([groups.members(m) for m in range(groups.count)])
        return np.asarray(ranks[chosen, places[owners]])

    def sizes(self) -> NDArray[np.int64]:
        """Rows that each rank of the world adds up."""
        world, homes = self.piece.groups.world, self.piece.table.homes()
        if self.rows is not None:
            return np.bincount(self.adders(self.rows), minlength=world)
        found = np.zeros(world, dtype=np.int64)
        found[list(self.piece.ranks)] = [homes.num_slots(i) for i in range(homes.num_owners)]
        return found


def copies_of(piece: Piece) -> list[Copy]:
    table = piece.table
    if is_copied(table):
        return [Copy(piece, None, table.rest.sums)]
    where = f"table {table.name!r}"
    return [
        Copy(piece, hot_ids(rows, where=where), tier.sums)
        for tier, rows in table.hot
        if tier.copies is Copies.WORLD
    ]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Rows of a piece that one rank of every host holds."""

    piece: Piece
    tier: Tier
    rows: NDArray[np.int64]

    def homes(self, rows: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
        """The host of each row's home."""
        owners = self.piece.table.homes().owners(rows)
        return np.asarray(self.piece.ranks)[owners] // topology.local

    def holders(self, rows: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
        """The local rank that has each of ``rows``."""
        of_all = holders(self.tier, len(self.rows), topology.local)
        return of_all[np.searchsorted(self.rows, rows)]

    def touched(self, batch: KeyedJaggedTensor) -> NDArray[np.int64]:
        return np.intersect1d(ids_of(self.piece.table, batch)[0], self.rows)


def host_copies_of(piece: Piece) -> list[HostCopy]:
    where = f"table {piece.table.name!r}"
    return [
        HostCopy(piece, tier, hot_ids(rows, where=where))
        for tier, rows in piece.table.hot
        if tier.copies is Copies.HOST
    ]
