"""On which ranks an option may go: the least busy ones that have room."""

import functools
from collections.abc import Callable
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from rowmesh.planners.options import Option, Unit
from rowmesh.topology import Topology

__all__ = ["Ranking"]

Ranks = tuple[int, ...]


class Ranking:
    """All ranks and hosts, the least busy first; ties go to the lower number.

    A host is as busy as its busiest rank. ``measure`` gives the seconds of each rank, and is asked
    at most once.
    """

    def __init__(self, topology: Topology, measure: Callable[[], NDArray[np.float64]]) -> None:
        self._topology, self._measure = topology, measure

    @functools.cached_property
    def _seconds(self) -> NDArray[np.float64]:
        return self._measure()

    @functools.cached_property
    def _order(self) -> list[int]:
        return list(np.argsort(self._seconds, kind="stable").tolist())

    @functools.cached_property
    def _by_host(self) -> dict[int, list[int]]:
        """The ranks of each host; hosts by their least busy rank."""
        return self._hosts_of(self._order)

    def _hosts_of(self, ranks: list[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(rank // self._topology.local, []).append(rank)
        return found

    def positions(
        self,
        unit: Unit,
        option: Option,
        *,
        has_room: NDArray[np.bool_] | None = None,
        tries: int = 1,
    ) -> list[Ranks]:
        """Lists of ranks for ``option``, the most promising first; none if nothing has room.

        Args:
            unit: Its ranks are the only ones used.
            option: What is to be placed.
            has_room: Which ranks can hold the largest part of the unit under the option; all if
                not given. Options that leave no choice of ranks are not asked: whether they fit
                is for the caller.
            tries: At most so many lists.
        """
        if option.split in ("data_parallel", "row_wise"):
            return [unit.ranks]
        free = self._free(unit, has_room)
        if option.split == "table_wise":
            return [(rank,) for rank in free[:tries]]
        by_host = self._by_host if free is self._order else self._hosts_of(free)
        if option.split == "column_wise":
            return _columns(by_host, option.columns)[:tries]
        sizes = self._sizes(unit)
        whole = [(self._seconds[r[-1]], h) for h, r in by_host.items() if len(r) == sizes[h]]
        hosts = [tuple(sorted(by_host[host])) for _, host in sorted(whole)]
        if option.split == "table_row_wise":
            return hosts[:tries]
        return _grid(hosts, option.columns, sizes)

    def _free(self, unit: Unit, has_room: NDArray[np.bool_] | None) -> list[int]:
        """Ranks that may take the unit."""
        free = self._order
        if len(unit.ranks) < self._topology.world:
            allowed = set(unit.ranks)
            free = [rank for rank in free if rank in allowed]
        return free if has_room is None else [rank for rank in free if has_room[rank]]

    def _sizes(self, unit: Unit) -> dict[int, int]:
        """The unit's ranks on each host."""
        topology = self._topology
        if len(unit.ranks) == topology.world:
            return dict.fromkeys(range(topology.hosts), topology.local)
        return {host: len(ranks) for host, ranks in self._hosts_of(list(unit.ranks)).items()}


def _columns(by_host: dict[int, list[int]], pieces: int) -> list[Ranks]:
    """One rank of each host in turn; or all pieces on the first host that has ranks for them."""
    some = list(by_host.values())[:pieces]
    dealt = [rank for turn in zip_longest(*some) for rank in turn if rank is not None]
    found = [tuple(dealt[:pieces])] if len(dealt) >= pieces else []
    near = next((tuple(r[:pieces]) for r in by_host.values() if len(r) >= pieces), None)
    return found if near is None or near in found else [*found, near]


def _grid(hosts: list[Ranks], pieces: int, sizes: dict[int, int]) -> list[Ranks]:
    """Column pieces dealt to hosts, as few to a host as the number of hosts allows."""
    per_host = -(-pieces // len(sizes))
    owners = min(sizes.values()) // per_host
    if len(hosts) * per_host < pieces or not owners:
        return []
    dealt = [
        ranks[first * owners : (first + 1) * owners] for ranks in hosts for first in range(per_host)
    ][:pieces]
    return [tuple(rank for piece in dealt for rank in piece)]
