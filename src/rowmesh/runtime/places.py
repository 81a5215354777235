"""Regions: where rows of a table lie in home stacks and copies stacks; hot rows among them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.placement import Homes, TablePlan, hot_ids

__all__ = ["DENSE_SUMS", "Region", "find_hot", "index_hot", "lay_copies"]

Ints = NDArray[np.int64]
DENSE_SUMS: Final = ("dense", "bucket")


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Rows of one piece of a table that lie together in a rank's home or the copies stack.

    Args:
        table: Index into the collection's tables.
        rank: Whose home it is; of copies, who adds up sparse sums.
        owner: Index of the rank among those of its column piece.
        homes: Of the table.
        columns: First and last + 1.
        start: First slot.
        sums: Of copies: how gradients are added up.
        hot: Of hot rows: the ids, ascending.
        home_start: Of hot rows: first slot of the home region of their piece and owner.
    """

    table: int
    rank: int
    owner: int
    homes: Homes
    columns: tuple[int, int]
    start: int
    sums: str = "sparse"
    hot: Ints | None = field(default=None, compare=False)
    home_start: int = 0

    @property
    def num_rows(self) -> int:
        """Slots of the region."""
        return self.homes.num_slots(self.owner) if self.hot is None else len(self.hot)

    def rows(self) -> Ints:
        """The rows in its slots."""
        return self.homes.rows(self.owner) if self.hot is None else self.hot

    def home_slots(self) -> Ints:
        """Of hot rows: their slots in the home stack of ``rank``."""
        return self.homes.slots(self.rows()) + self.home_start


def find_hot(plans: Sequence[TablePlan], home: Sequence[Region]) -> list[Region]:
    """The hot rows of every home region, in the order of home slots."""
    found = []
    for region in sorted(home, key=lambda region: (region.rank, region.start)):
        for tier, rows in plans[region.table].hot:
            ids = hot_ids(rows, where=f"table {plans[region.table].name!r}")
            mine = ids[region.homes.owners(ids) == region.owner]
            found.append(replace(region, hot=mine, home_start=region.start, sums=tier.sums))
    return found


def lay_copies(
    copied: Sequence[Region], hot: Sequence[Region], world: int
) -> tuple[list[Region], list[Region], list[int], list[int]]:
    """The regions with their slots in the copies stack; where sums by rank, and dense, begin."""
    regions = [*copied, *hot]
    if world == 1:  # nobody to add up with
        regions = [replace(region, sums="sparse") for region in regions]
    groups = [[r for r in regions if (r.rank, r.sums) == (k, "sparse")] for k in range(world)]
    groups += [[r for r in regions if r.sums == sums] for sums in DENSE_SUMS]
    bounds, placed = [0], {}
    for group in groups:
        at = bounds[-1]
        for region in group:
            placed[id(region)] = replace(region, start=at)
            at += region.num_rows
        bounds.append(at)
    laid = [placed[id(region)] for region in regions]
    return laid[: len(copied)], laid[len(copied) :], bounds[: world + 1], bounds[world:]


def index_hot(hot: Sequence[Region], home_slots: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """Key, home rank and slot of every hot row, in the order of keys."""
    nothing: Ints = np.empty(0, dtype=np.int64)
    first = np.cumsum([0, *home_slots])
    keys = [region.home_slots() + first[region.rank] for region in hot]
    ranks = [np.full(region.num_rows, region.rank) for region in hot]
    slots = [np.arange(region.start, region.start + region.num_rows) for region in hot]
    found = [np.concatenate([nothing, *parts]) for parts in (keys, ranks, slots)]
    order = np.argsort(found[0], kind="stable")
    return found[0][order], found[1][order], found[2][order]
