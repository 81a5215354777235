"""Latency and bandwidth of a class of links, by the exchange that training uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

import torch

from rowmesh.comm.exchange import Channel, ChannelPool, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.topology import Topology
from rowmesh.train.calibrate.clock import now

__all__ = ["LONG_S", "LinkRate", "fit_line", "measure_link", "num_parcels"]

_SMALL: Final = 16  # bytes of a parcel whose time is all latency
_FIRST, _LARGEST = 1 << 16, 1 << 26  # bytes of a parcel
LONG_S: Final = 0.08  # an exchange so long is hardly noise
_REPEATS: Final = 7
Link = Literal["host", "cross"]


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Seconds of an exchange: latency + bytes / rate.

    ``bytes_per_s`` counts what a rank sends inside its host, or what a host's card sends.
    """

    latency_s: float
    bytes_per_s: float


def num_parcels(topology: Topology, link: Link) -> int:
    """Parcels a link carries each way when every rank sends one to each of its peers on it.

    Inside a host, L - 1 of one rank; across, L (W - L) of all ranks that share a card.
    """
    if link == "host":
        return topology.local - 1
    return topology.local * (topology.world - topology.local)


def measure_link(mesh: Mesh, link: Link, *, long_s: float = LONG_S) -> LinkRate | None:
    """All ranks send to all their peers on one class of links at once; None without such peers.

    The latency is the median of small exchanges. The rate is the slope between large exchanges
    of two sizes, the larger of which takes ``long_s``: latency and a shaper's burst are not in it.

    Collective:
        All ranks.
    """
    topology = mesh.topology
    peers = [p for p in mesh.peers() if topology.link(mesh.rank, p).value == link]
    parcels = num_parcels(topology, link)
    if not parcels:
        return None
    exchange = _Exchange(mesh, peers)
    latency = exchange.seconds(_SMALL, repeats=40)
    size, taken = _FIRST, 0.0
    largest = _largest(mesh, link)
    while taken < long_s and 2 * size <= largest:
        size *= 2
        taken = exchange.seconds(size, repeats=2)
    sizes = (size // 4, size)
    times = [[exchange.seconds(s, repeats=1) for s in sizes] for _ in range(_REPEATS)]
    short, long = (median(column) for column in zip(*times, strict=True))
    return LinkRate(latency_s=latency, bytes_per_s=parcels / fit_line(sizes, (short, long)))


def _largest(mesh: Mesh, link: Link) -> int:
    """The largest parcel to try: inside a host, one that still travels as smaller ones do."""
    segment = mesh.wire.segment if link == "host" else None
    mine = _LARGEST if segment is None else min(_LARGEST, segment.largest_bytes)
    return int(min(mesh.gather_objects(mine)))


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds a unit between two sizes; by the larger alone if noise made it the faster."""
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    return slope if slope > 0.0 else seconds[1] / sizes[1]


class _Exchange:
    """Parcels of one size to and from every peer."""

    def __init__(self, mesh: Mesh, peers: Sequence[int]) -> None:
        self._mesh, self._peers, self._sequence = mesh, list(peers), 0
        self._pool = ChannelPool(mesh.wire)
        self._channel: Channel = self._pool.channel("calibration", Lane.ROWS)

    def seconds(self, size: int, *, repeats: int) -> float:
        """Median over repeats of the slowest rank's time, the same on all ranks."""
        device = self._mesh.device
        sent = torch.zeros(size, dtype=torch.uint8, device=device)
        received = [torch.empty_like(sent) for _ in self._peers]
        times = []
        for _ in range(repeats):
            self._mesh.total(0)
            start = now(device)
            self._sequence += 1
            self._channel.post(
                self._sequence,
                sends=[(peer, sent) for peer in self._peers],
                receives=zip(self._peers, received, strict=True),
                edge=None,
            ).wait()
            times.append(now(device) - start)
        slowest = [max(column) for column in zip(*self._mesh.gather_objects(times), strict=True)]
        return float(median(slowest))
