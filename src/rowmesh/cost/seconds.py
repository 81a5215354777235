"""Seconds of a step from the bytes of every rank: what planners make small."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.load import Load
from rowmesh.errors import InputError
from rowmesh.topology import Topology

__all__ = ["Rates", "latency_seconds", "rank_seconds", "step_seconds"]

# Messages one after the other, in forward (ids, vectors; with relays each goes twice) and step,
# and those in backward, which may be hidden.
_ROUNDS: Final = {
    "rows": (2, 1),
    "pooled": (2, 1),
    "relayed": (4, 2),
    "copies": (0, 2),
    "squares": (1, 0),
    "dense": (0, 2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How fast a cluster is. The defaults are a host with one 25 Gbit/s card and CPU ranks.

    Args:
        host_bytes_per_s: Between two ranks of a host, in each direction.
        cross_bytes_per_s: Of a host's network card, in each direction; its ranks share it.
        memory_bytes_per_s: At which a rank reads and writes rows.
        latency_s: Of one message.
        hidden_share: Share of the time of gradients' messages that passes under the backward of
            the dense layers, from 0 to 1.

    Raises:
        InputError: If a rate is not positive, or the latency or the share is out of range.
    """

    host_bytes_per_s: float = 2e9
    cross_bytes_per_s: float = 3e9
    memory_bytes_per_s: float = 8e9
    latency_s: float = 5e-5
    hidden_share: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("per_s") and not 0.0 < value < float("inf"):
                raise InputError(f"{field.name} is {value}, but must be positive and finite")
        if not 0.0 <= self.latency_s < float("inf"):
            raise InputError(f"latency_s is {self.latency_s}, but must be from 0 and finite")
        if not 0.0 <= self.hidden_share <= 1.0:
            raise InputError(f"hidden_share is {self.hidden_share}, but must be from 0 to 1")


def rank_seconds(
    values: NDArray[np.float64], *, topology: Topology, rates: Rates
) -> NDArray[np.float64]:
    """Seconds of each rank, without latencies, for the ``values`` of a `Load`.

    Its host's cross bytes (the larger of sent and received, over all ranks of the host) over
    the card's rate, plus its bytes inside the host (likewise) over theirs, plus the bytes it
    moves over the memory's rate.
    """
    links: NDArray[np.float64] = values[:4] - rates.hidden_share * values[4:8]
    cards = links[2:].reshape(2, topology.hosts, topology.local).sum(2).max(0)
    found: NDArray[np.float64] = links[:2].max(0) / rates.host_bytes_per_s
    found += (cards / rates.cross_bytes_per_s).repeat(topology.local)
    found += values[8] / rates.memory_bytes_per_s
    return found


def latency_seconds(kinds: Iterable[str], *, world: int, rates: Rates) -> float:
    """The latencies of a step: all tables of a kind share its messages, so each kind counts once.

    One rank alone has none.
    """
    exposed = 1.0 - rates.hidden_share
    rounds = [_ROUNDS[kind] for kind in sorted(set(kinds))]
    total = sum(forward + exposed * backward for forward, backward in rounds)
    return rates.latency_s * total if world > 1 else 0.0


def step_seconds(load: Load, *, topology: Topology, rates: Rates) -> float:
    """Seconds of a step: the busiest rank's, and the latencies."""
    busiest = float(rank_seconds(load.values, topology=topology, rates=rates).max())
    return busiest + latency_seconds(load.kinds, world=topology.world, rates=rates)
