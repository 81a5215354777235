"""Regions: where rows of a table lie in home stacks and copies stacks; hot rows among them.

Hot rows are copied to every rank, or to one rank of every host: row i of a hot set of the latter
kind lies with local rank i mod L, or all of them with one. The copies of a row are with peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.placement import Copies, Homes, TablePlan, hot_ids
from rowmesh.placement.hot import holders
from rowmesh.topology import Topology

__all__ = ["DENSE_SUMS", "Region", "find_hot", "index_hot", "lay_copies", "lay_host_copies"]

Ints = NDArray[np.int64]
DENSE_SUMS: Final = ("dense", "bucket")


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Rows of one piece of a table that lie together in a rank's home or the copies stack.

    Args:
        table: Index into the collection's tables.
        rank: Whose home it is, in this rank's shard group.
        replicas: The ranks whose home it is in all groups, in their order; of a table that is
            copied whole, the rank that adds up sparse sums.
        owner: Index of the rank among those of its column piece.
        homes: Of the table.
        columns: First and last + 1.
        start: First slot.
        sums: Of copies: how gradients are added up.
        hot: Of hot rows: the ids, ascending.
        home_start: Of hot rows: first slot of the home region of their piece and owner.
        tier: Of hot rows: the number of their tier.
        group: Of hot rows on every rank: the group whose rank adds up sparse sums.
        holder: Of copies per host: the local rank that has them; ``start`` counts from its first
            such copy.
    """

    table: int
    rank: int
    replicas: tuple[int, ...]
    owner: int
    homes: Homes
    columns: tuple[int, int]
    start: int
    sums: str = "sparse"
    hot: Ints | None = field(default=None, compare=False)
    home_start: int = 0
    tier: int = 0
    group: int = 0
    holder: int | None = None

    @property
    def num_rows(self) -> int:
        """Slots of the region."""
        return self.homes.num_slots(self.owner) if self.hot is None else len(self.hot)

    @property
    def adder(self) -> int:
        """Of copies: the rank that adds up sparse sums."""
        return self.replicas[self.group]

    @property
    def writer(self) -> int:
        """The rank that writes a checkpoint of it: replicas take turns."""
        return self.replicas[(self.table + self.owner) % len(self.replicas)]

    def rows(self) -> Ints:
        """The rows in its slots."""
        return self.homes.rows(self.owner) if self.hot is None else self.hot

    def home_slots(self) -> Ints:
        """Of hot rows: their slots in the home stack of ``rank``."""
        return self.homes.slots(self.rows()) + self.home_start


def find_hot(
    plans: Sequence[TablePlan], home: Sequence[Region], local: int
) -> tuple[list[Region], list[Region]]:
    """The hot rows of every home region, in the order of home slots: of the world, and per host.

    Groups take turns in adding up those of the world.
    """
    everywhere, per_host = [], []
    for region in sorted(home, key=lambda region: (region.rank, region.start)):
        for number, (tier, rows) in enumerate(plans[region.table].hot):
            ids = hot_ids(rows, where=f"table {plans[region.table].name!r}")
            mine = region.homes.owners(ids) == region.owner
            hot = replace(region, home_start=region.start, sums=tier.sums, tier=number)
            if tier.copies is Copies.WORLD:
                count = len(region.replicas)
                everywhere += [
                    replace(hot, hot=ids[mine][group::count], group=group) for group in range(count)
                ]
                continue
            held = holders(tier, len(ids), local)
            for holder in np.unique(held).tolist():
                part = ids[mine & (held == holder)]
                if len(part):
                    per_host.append(replace(hot, hot=part, holder=holder))
    return everywhere, per_host


def lay_copies(
    copied: Sequence[Region], hot: Sequence[Region], world: int
) -> tuple[list[Region], list[Region], list[int], list[int]]:
    """The regions with their slots in the copies stack; where sums by rank, and dense, begin."""
    regions = [*copied, *hot]
    if world == 1:  # nobody to add up with
        regions = [replace(region, sums="sparse") for region in regions]
    groups = [[r for r in regions if (r.adder, r.sums) == (k, "sparse")] for k in range(world)]
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


def lay_host_copies(
    regions: Sequence[Region], topology: Topology, hosts: Sequence[int]
) -> tuple[list[Region], list[list[int]]]:
    """The regions with their places among a holder's copies; where each host's sums begin.

    A holder has those first whose homes are on the first of the group's ``hosts``, then on the
    second, ...; the peer on that host adds up their gradients. The bounds are ``[L][H + 1]``.
    """
    laid: list[Region] = []
    bounds = []
    for holder in range(topology.local):
        at, mine = 0, [0]
        for host in hosts:
            for region in regions:
                if (topology.host(region.rank), region.holder) == (host, holder):
                    laid.append(replace(region, start=at))
                    at += region.num_rows
            mine.append(at)
        bounds.append(mine)
    return laid, bounds


def index_hot(
    regions: Sequence[Region], asked_slots: Sequence[int], places: Sequence[tuple[int, int]]
) -> tuple[Ints, ...]:
    """Of every hot row, in the order of home keys: that key, its rank, its other key, its rank.

    Keys are those of `rowmesh.runtime.routes` without bags.

    Args:
        regions: Of hot rows.
        asked_slots: ``[W]`` slots of each rank.
        places: Of each region the rank to read it from (W: this rank's copies) and its first slot.
    """
    nothing: Ints = np.empty(0, dtype=np.int64)
    first = np.cumsum([0, *asked_slots])
    columns: list[list[Ints]] = [[nothing], [nothing], [nothing], [nothing]]
    for region, (target, start) in zip(regions, places, strict=True):
        size = region.num_rows
        columns[0].append(region.home_slots() + first[region.rank])
        columns[1].append(np.full(size, region.rank))
        columns[2].append(np.arange(size) + (first[target] + start))
        columns[3].append(np.full(size, target))
    found = [np.concatenate(parts) for parts in columns]
    order = np.argsort(found[0], kind="stable")
    return tuple(part[order] for part in found)
