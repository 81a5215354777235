"""Pieces of tables, their copies, and what a batch asks of them: what `predict` counts with."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, Exchange, TablePlan, Tier, hot_ids
from rowmesh.placement.hot import holders
from rowmesh.topology import Topology

__all__ = [
    "Copy",
    "HostCopy",
    "Piece",
    "Traffic",
    "copies_of",
    "host_copies_of",
    "ids_of",
    "is_copied",
    "pieces_of",
]

Traffic = Counter[tuple[str, int, int]]  # (edge, source, target) -> bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns of a table and the ranks that hold them; equal in `stack`, they travel together."""

    table: TablePlan
    width: int
    ranks: tuple[int, ...]
    apart: bool = False  # bags that owners pool have stacks of their own

    @property
    def stack(self) -> tuple[object, ...]:
        table = self.table
        pooled = table.exchange is Exchange.POOLED and not is_copied(table)
        widened = table.data_type != "fp32" and pooled
        form = (table.data_type, table.trainable, widened, table.is_relayed, self.apart and pooled)
        return self.width, table.embedding_dim, *form

    @property
    def row_bytes(self) -> int:
        return self.width * self.table.row_bytes // self.table.embedding_dim


def is_copied(table: TablePlan) -> bool:
    return table.rest.copies is Copies.WORLD


def pieces_of(table: TablePlan) -> list[Piece]:
    columns, ranks = table.columns(), table.rest.ranks
    n = len(ranks) // len(columns)
    return [
        Piece(table, last - first, ranks[c * n : (c + 1) * n])
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


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows of a piece that every rank holds: all of them, or a hot set."""

    piece: Piece
    rows: NDArray[np.int64] | None
    sums: str

    def touched(self, batch: KeyedJaggedTensor) -> NDArray[np.int64]:
        ids = np.unique(ids_of(self.piece.table, batch)[0])
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
