"""On which ranks an option may go: the least busy ones that have room."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from rowmesh.planners.options import Option, Unit
from rowmesh.topology import Topology

__all__ = ["Ranking"]

Floats = NDArray[np.float64]
Ranks = tuple[int, ...]


class Ranking:
    """All ranks and hosts, the least busy first; ties go to the lower number.

    A host is as busy as its busiest rank. ``measure`` gives the seconds of each rank, and is asked
    at most once.
    """

    def __init__(self, topology: Topology, measure: Callable[[], Floats]) -> None:
        self._topology, self._measure = topology, measure

    @functools.cached_property
    def _seconds(self) -> Floats:
        return self._measure()

    @functools.cached_property
    def _everything(self) -> "_Free":
        topology = self._topology
        sizes = np.full(topology.hosts, topology.local)
        return _Free(self._seconds.reshape(-1, topology.local), sizes, sizes)

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
            return [(rank,) for rank in free.ranks(tries)]
        if option.split == "column_wise":
            return _columns(free.by_host(option.columns), option.columns)[:tries]
        if option.split == "table_row_wise":
            return free.whole_hosts(tries)
        return _grid(free.whole_hosts(option.columns), option.columns, free.sizes)

    def _free(self, unit: Unit, has_room: NDArray[np.bool_] | None) -> "_Free":
        """Ranks that may take the unit."""
        topology = self._topology
        everywhere = len(unit.ranks) == topology.world
        if everywhere and (has_room is None or has_room.all()):
            return self._everything
        allowed = np.full(topology.world, everywhere)
        allowed[list(unit.ranks)] = True
        free = allowed if has_room is None else allowed & has_room
        shape = topology.hosts, topology.local
        seconds = np.where(free, self._seconds, np.inf).reshape(shape)
        return _Free(seconds, free.reshape(shape).sum(1), allowed.reshape(shape).sum(1))


@dataclass(frozen=True)
class _Free:
    """The ranks that may take a unit.

    Args:
        seconds: ``[H, L]``: how busy they are; infinite for all others.
        counts: How many there are on each host.
        sizes: How many the unit may use on each host, if they had room.
    """

    seconds: Floats
    counts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @functools.cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.seconds.ravel(), kind="stable")[: self.counts.sum()]

    @functools.cached_property
    def _by_least(self) -> list[int]:
        """Hosts by their least busy rank."""
        hosts = np.argsort(self.seconds.min(1), kind="stable")
        return list(hosts[: np.count_nonzero(self.counts)].tolist())

    @functools.cached_property
    def _whole(self) -> list[int]:
        """Hosts that are free wherever the unit may go, by their busiest rank."""
        whole = (self.counts == self.sizes) & (self.counts > 0)
        free = np.where(np.isinf(self.seconds), -np.inf, self.seconds)
        hosts = np.argsort(np.where(whole, free.max(1), np.inf), kind="stable")
        return list(hosts[: np.count_nonzero(whole)].tolist())

    def ranks(self, number: int) -> list[int]:
        """The least busy ones."""
        return list(self._order[:number].tolist())

    def by_host(self, number: int) -> list[list[int]]:
        """The least busy ranks of ``number`` hosts, and of the first that has as many."""
        hosts = self._by_least[:number]
        enough = next((h for h in self._by_least if self.counts[h] >= number), None)
        if enough is not None and enough not in hosts:
            hosts.append(enough)
        order = np.argsort(self.seconds[hosts], axis=1, kind="stable")
        order += np.array(hosts, dtype=np.int64)[:, None] * self.seconds.shape[1]
        return [r[:n] for r, n in zip(order.tolist(), self.counts[hosts].tolist(), strict=True)]

    def whole_hosts(self, number: int) -> list[Ranks]:
        """The ranks of the ``number`` hosts that are least busy."""
        local, found = self.seconds.shape[1], list[Ranks]()
        for host in self._whole[:number]:
            ranks = range(host * local, (host + 1) * local)
            free = np.isfinite(self.seconds[host]).tolist() if self.sizes[host] < local else ()
            found.append(tuple(itertools.compress(ranks, free) if free else ranks))
        return found


def _columns(by_host: list[list[int]], pieces: int) -> list[Ranks]:
    """One rank of each host in turn; or all pieces on the first host that has ranks for them."""
    dealt = [rank for turn in zip_longest(*by_host[:pieces]) for rank in turn if rank is not None]
    found = [tuple(dealt[:pieces])] if len(dealt) >= pieces else []
    near = next((tuple(r[:pieces]) for r in by_host if len(r) >= pieces), None)
    return found if near is None or near in found else [*found, near]


def _grid(hosts: list[Ranks], pieces: int, sizes: NDArray[np.int64]) -> list[Ranks]:
    """Column pieces dealt to hosts, as few to a host as the number of hosts allows."""
    per_host = -(-pieces // np.count_nonzero(sizes))
    owners = int(sizes[sizes > 0].min()) // per_host
    if len(hosts) * per_host < pieces or not owners:
        return []
    dealt = [
        ranks[first * owners : (first + 1) * owners] for ranks in hosts for first in range(per_host)
    ][:pieces]
    return [tuple(rank for piece in dealt for rank in piece)]
