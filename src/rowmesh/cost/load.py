"""`Load`: bytes and work of every rank in a step; `Part`: one column piece's share, anywhere.

A `Part` does not know its ranks, only how many they are, so that planners can compute it once
and lay it wherever they like.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.placement.groups import Groups
from rowmesh.topology import Topology

__all__ = ["LINES", "Load", "Part", "imbalance", "lay", "lay_groups", "no_load", "spread"]

Floats = NDArray[np.float64]
LINES = 9  # of a load: 4 links, the gradients' part of each, work


@dataclass(frozen=True, slots=True)
class Load:
    """Expected bytes and work of each rank in a step.

    Args:
        values: ``[9, W]``: sent and received inside the host, sent and received across hosts;
            the part of each of these four that is of gradients, and may travel under the
            backward of the dense layers; seconds of work on ids and rows.
        kinds: The exchanges that take place: rows, merged, pooled, relayed, copies, hot dense,
            host copies, squares, dense.
        rounds: Messages of a replica sync that wait for each other, mean over steps; all tables
            share them.
    """

    values: Floats
    kinds: frozenset[str] = frozenset()
    rounds: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        rounds = max(self.rounds, other.rounds)
        return Load(self.values + other.values, self.kinds | other.kinds, rounds)

    @property
    def sent_host(self) -> Floats:
        """Bytes each rank sends to ranks of its host."""
        return np.asarray(self.values[0])

    @property
    def received_host(self) -> Floats:
        """Bytes each rank receives from ranks of its host."""
        return np.asarray(self.values[1])

    @property
    def sent_cross(self) -> Floats:
        """Bytes each rank sends to other hosts."""
        return np.asarray(self.values[2])

    @property
    def received_cross(self) -> Floats:
        """Bytes each rank receives from other hosts."""
        return np.asarray(self.values[3])

    @property
    def work(self) -> Floats:
        """Seconds each rank works on ids and rows."""
        return np.asarray(self.values[8])


def imbalance(amounts: Sequence[float] | Floats) -> float:
    """The largest amount over the mean: 1 if all ranks have the same, or none has any."""
    mean = float(np.mean(amounts))
    return float(np.max(amounts)) / mean if mean > 0.0 else 1.0


def no_load(world: int) -> Load:
    """Nothing at all, on ``world`` ranks."""
    return Load(np.zeros((LINES, world)))


@dataclass(frozen=True, slots=True)
class Part:
    """What one column piece adds to the lines of a load, wherever its owners are.

    Args:
        kind: Of the exchange.
        base: Added to every rank.
        near: Added to every rank of an owner's host, once for each owner.
        host: Added once to every rank of the owners' host, where all owners share one.
        owner: Added to every owner.
        squares: Bytes an owner sends to the owner at its place in every other piece; in
            ``owner`` they are counted as if all pieces were on different hosts.

    Of many tables alike, the lines are ``[9, tables]`` and the squares ``[tables]``.
    """

    kind: str
    base: Floats
    near: Floats
    host: Floats
    owner: Floats
    squares: float | Floats = 0.0


def lay(parts: Sequence[Part], ranks: Sequence[int], *, topology: Topology) -> Load:
    """The load of ``parts``, piece c on the c-th of as many equal stretches of ``ranks``."""
    load = no_load(topology.world)
    places = np.asarray(ranks).reshape(len(parts), -1)
    for part, owners in zip(parts, places, strict=True):
        load.values[:] += part.base[:, None]
        counts = np.bincount(owners // topology.local, minlength=topology.hosts)
        load.values[:] += part.near[:, None] * counts.repeat(topology.local)
        load.values[:] += part.host[:, None] * (counts > 0).repeat(topology.local)
        load.values[:, owners] += part.owner[:, None]
    squares = np.array([part.squares for part in parts])
    if squares.any():
        _mind_neighbours(load.values, places, squares, topology.local)
    kinds = {part.kind for part in parts} | ({"squares"} if squares.any() else set())
    return Load(load.values, frozenset(kinds - {""}))


def lay_groups(
    parts: Sequence[Part], ranks: Sequence[int], *, groups: Groups, topology: Topology
) -> Load:
    """`lay` in every shard group; ``ranks`` are of the first, the parts of its shape."""
    if groups.count == 1:
        return lay(parts, ranks, topology=topology)
    places = np.array([groups.place(rank) for rank in ranks])
    inside = lay(parts, places.tolist(), topology=groups.shape(topology))
    total = spread(inside, groups)
    if groups.layout == "strided" and topology.local % groups.count:
        for members in map(groups.members, range(groups.count)):
            _mind_hosts(total.values, parts, np.array(members), places, topology.local)
    return total


def spread(inside: Load, groups: Groups) -> Load:
    """The load of one group on the ranks of all."""
    ranks = np.arange(groups.world)
    places = ranks % groups.size if groups.layout == "contiguous" else ranks // groups.count
    return Load(inside.values[:, places], inside.kinds, inside.rounds)


def _mind_hosts(
    values: Floats,
    parts: Sequence[Part],
    members: NDArray[np.int64],
    places: NDArray[np.int64],
    local: int,
) -> None:
    """Messages of a group that stay inside a host, of parts laid as if no two ranks shared one."""
    for part, owners in zip(parts, members[places].reshape(len(parts), -1), strict=True):
        for owner in owners:
            beside = members[(members // local == owner // local) & (members != owner)]
            for first in (0, 4):
                there, again = part.base[first + 2 : first + 4] / len(owners)
                moved = np.array([there, again, -there, -again])
                values[first : first + 4, beside] += moved[:, None]
                values[first : first + 4, owner] += len(beside) * moved[[1, 0, 3, 2]]
    squares = np.array([part.squares for part in parts])
    if squares.any():
        _mind_neighbours(values, members[places].reshape(len(parts), -1), squares, local)


def _mind_neighbours(
    values: Floats, places: NDArray[np.int64], squares: Floats, local: int
) -> None:
    """Squares between pieces whose owners of a row share a host stay inside it."""
    hosts = places // local
    same = (hosts[:, None] == hosts[None, :]).astype(np.float64)  # [from, to, place]
    sent = squares[:, None] * (same.sum(1) - 1.0)
    received = (same * squares[:, None, None]).sum(0) - squares[:, None]
    for line, amount in ((0, sent), (1, received), (2, -sent), (3, -received)):
        values[line, places] += amount
