"""Rows and their homes: which rank owns a row, and in which slot it keeps it.

A table in its natural order is the padded view [Q, S, D] with row r = (r // S, r mod S).
Virtual shard j = r mod S belongs to owner j mod n, so a change of n moves whole boxes [:, j].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Homes", "count_slots"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Homes:
    """``num_rows`` rows in ``num_shards`` virtual shards over ``num_owners`` owners.

    owner(r) = (r mod S) mod n, an index into the tier's list of ranks;
    slot(r) = (r // S) * c + (r mod S) // n with c the owner's number of virtual shards,
    so an owner's slots are 0 .. `num_slots` - 1, in row order, without gaps.
    """

    num_rows: int
    num_shards: int
    num_owners: int

    def width(self, owner: int) -> int:
        """Virtual shards of ``owner``: the c of the formula."""
        return max(0, -(-(self.num_shards - owner) // self.num_owners))

    def num_slots(self, owner: int) -> int:
        """Rows of ``owner``."""
        whole, rest = divmod(self.num_rows, self.num_shards)
        return whole * self.width(owner) + max(0, -(-(rest - owner) // self.num_owners))

    def owners(self, rows: Ints) -> Ints:
        """The owner of each row."""
        return (rows % self.num_shards) % self.num_owners

    def slots(self, rows: Ints) -> Ints:
        """The slot of each row at its owner."""
        shard = rows % self.num_shards
        widths = np.array([self.width(o) for o in range(self.num_owners)], dtype=np.int64)
        return (rows // self.num_shards) * widths[shard % self.num_owners] + (
            shard // self.num_owners
        )

    def rows(self, owner: int, start: int = 0, stop: int | None = None) -> Ints:
        """The rows in slots ``start`` to ``stop`` of ``owner``; the inverse of `slots`."""
        slots = np.arange(start, self.num_slots(owner) if stop is None else stop, dtype=np.int64)
        width = max(self.width(owner), 1)
        return (slots // width) * self.num_shards + (slots % width) * self.num_owners + owner


def count_slots(num_rows: Sequence[int], *, num_shards: int, num_owners: int) -> Ints:
    """``[tables, owners]``: `Homes.num_slots` of every owner, for tables of so many rows."""
    owners = np.arange(num_owners)
    dtype = np.int64 if max(num_rows, default=0) < 1 << 62 else object  # a plan may say anything
    rows = np.array(num_rows, dtype=dtype)[:, None]
    whole, rest = rows // num_shards, rows % num_shards
    widths = np.maximum(0, -(-(num_shards - owners) // num_owners))
    found: Ints = whole * widths + np.maximum(0, -(-(rest - owners) // num_owners))
    return found
