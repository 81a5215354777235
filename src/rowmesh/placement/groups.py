"""Shard groups: the ranks one copy of the tables is spread over, and their replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rowmesh.topology import Topology

__all__ = ["Groups", "can_merge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """``world`` ranks in M = world / N groups of ``size`` = N.

    A rank is at a place 0 .. N - 1 of a group 0 .. M - 1. Contiguous: rank = group * N + place;
    strided: rank = place * M + group. Ranks at one place of all groups are replicas: they hold the
    same rows.
    """

    world: int
    size: int
    layout: Literal["contiguous", "strided"] = "contiguous"

    @property
    def count(self) -> int:
        """M, the number of groups."""
        return self.world // self.size

    def group(self, rank: int) -> int:
        """The group of ``rank``."""
        return rank // self.size if self.layout == "contiguous" else rank % self.count

    def place(self, rank: int) -> int:
        """The place of ``rank`` in its group."""
        return rank % self.size if self.layout == "contiguous" else rank // self.count

    def rank(self, group: int, place: int) -> int:
        """The rank at a place of a group."""
        if self.layout == "contiguous":
            return group * self.size + place
        return place * self.count + group

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group, ascending."""
        return tuple(self.rank(group, place) for place in range(self.size))

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold what ``rank`` holds, itself among them, in the order of groups."""
        return tuple(self.rank(group, self.place(rank)) for group in range(self.count))

    def move(self, ranks: Sequence[int], group: int) -> tuple[int, ...]:
        """The ranks of ``group`` at the places of ``ranks`` in theirs."""
        return tuple(self.rank(group, self.place(rank)) for rank in ranks)

    def shape(self, topology: Topology) -> Topology:
        """Hosts and ranks per host of one group, whose places are in that order.

        Where groups differ in shape (strided, and neither of M and L divides the other), no two
        ranks count as of one host.
        """
        local, size = topology.local, self.size
        if self.layout == "strided":
            local = local // self.count if local % self.count == 0 else 1
        local = min(local, size)
        return Topology(hosts=size // local, local=local, memory_bytes=topology.memory_bytes)


def can_merge(groups: Groups, topology: Topology) -> bool:
    """Whether hosts can merge the requests of their ranks: several hosts of several ranks each.

    Of several groups each must fill hosts next to each other.
    """
    shape = groups.shape(topology)
    is_whole = groups.count == 1 or (
        groups.layout == "contiguous" and shape.local == topology.local
    )
    return is_whole and shape.hosts > 1 and shape.local > 1
