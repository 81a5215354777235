"""`Load`: bytes and work of every rank in a step; `Part`: one column piece's share, anywhere.

A `Part` does not know its ranks, only how many they are, so that planners can compute it once
and lay it wherever they like.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.topology import Topology

__all__ = ["LINES", "Load", "Part", "lay", "no_load"]

Floats = NDArray[np.float64]
LINES = 9  # of a load: 4 links, the gradients' part of each, work


@dataclass(frozen=True, slots=True)
class Load:
    """Expected bytes and work of each rank in a step.

    Args:
        values: ``[9, W]``: sent and received inside the host, sent and received across hosts;
            the part of each of these four that is of gradients, and may travel under the
            backward of the dense layers; seconds of work on ids and rows.
        kinds: The exchanges that take place: rows, pooled, relayed, copies, hot dense, host
            copies, squares, dense.
    """

    values: Floats
    kinds: frozenset[str] = frozenset()

    def __add__(self, other: "Load") -> "Load":
        return Load(self.values + other.values, self.kinds | other.kinds)

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
