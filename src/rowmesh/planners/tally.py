"""`Tally`: what is placed so far, what it costs, and what one more unit would make of it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost import Load, Rates
from rowmesh.cost.seconds import latency_seconds
from rowmesh.planners.drafts import Draft, Piece, scale_to_seconds
from rowmesh.topology import Topology

__all__ = ["Cost", "Placed", "Tally"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step on the busiest rank, and the mean over ranks."""

    busiest: float
    mean: float

    @property
    def total(self) -> float:
        """What planners make small: the mean counts too, for what is not on the busiest rank."""
        return self.busiest + self.mean


@dataclass(frozen=True, slots=True)
class Placed:
    """A draft on some ranks."""

    draft: Draft
    ranks: tuple[int, ...]


class Tally:
    """The sum over placed drafts, and the limit on what a rank holds."""

    def __init__(
        self, topology: Topology, *, rates: Rates, limit: int | None = None, fixed: Load
    ) -> None:
        self.topology, self.rates, self.limit = topology, rates, limit
        self._fixed = fixed
        self.clear()

    def clear(self) -> None:
        """Take everything away but the dense layers."""
        lines = scale_to_seconds(self.rates) @ self._fixed.values
        self._ranks = lines[:3]  # [3, W]: sent and received inside hosts, memory
        shape = 2, self.topology.hosts, self.topology.local
        self._cards = lines[3:].reshape(shape).sum(2)  # [2, H]: sent and received across hosts
        self._held = np.zeros(self.topology.world, dtype=np.int64)
        self._kinds: Counter[str] = Counter(self._fixed.kinds)

    def put(self, placed: Placed) -> None:
        """Add a unit."""
        self._add(placed, 1.0)
        if self.limit is not None:
            self._held[list(placed.ranks)] += placed.draft.held
        self._kinds.update(placed.draft.kinds)

    def take(self, placed: Placed) -> None:
        """Remove a unit."""
        self._add(placed, -1.0)
        if self.limit is not None:
            self._held[list(placed.ranks)] -= placed.draft.held
        self._kinds.subtract(placed.draft.kinds)

    def room(self) -> NDArray[np.int64] | None:
        """Bytes left on each rank, if there is a limit."""
        return None if self.limit is None else self.limit - self._held

    def fits(self, placed: Placed) -> bool:
        """Whether no rank would hold more than the limit."""
        if self.limit is None:
            return True
        return bool((self._held[list(placed.ranks)] + placed.draft.held <= self.limit).all())

    def seconds(self) -> Floats:
        """Seconds of each rank, without latencies."""
        sent, received, memory = self._ranks
        busy: Floats = np.maximum(sent, received)
        busy += memory
        busy += np.maximum(self._cards[0], self._cards[1]).repeat(self.topology.local)
        return busy

    def cost(self) -> Cost:
        """Of what is placed."""
        return self._cost(())

    def cost_with(self, placed: Placed) -> Cost:
        """Of what is placed and one more unit."""
        before = self._ranks, self._cards
        self._ranks, self._cards = self._ranks.copy(), self._cards.copy()
        self._add(placed, 1.0)
        found = self._cost(placed.draft.kinds)
        self._ranks, self._cards = before
        return found

    def cost_alone(self, placed: Placed) -> Cost:
        """Of one unit by itself, without latencies: those are shared with other units."""
        before = self._ranks, self._cards
        self._ranks, self._cards = np.zeros_like(self._ranks), np.zeros_like(self._cards)
        self._add(placed, 1.0)
        seconds = self.seconds()
        self._ranks, self._cards = before
        return Cost(float(seconds.max()), float(seconds.sum()) / len(seconds))

    def _cost(self, more: Iterable[str]) -> Cost:
        seconds = self.seconds()
        kinds = {kind for kind, count in self._kinds.items() if count > 0}
        latency = latency_seconds(kinds.union(more), world=len(seconds), rates=self.rates)
        busiest, mean = float(seconds.max()), float(seconds.sum()) / len(seconds)
        return Cost(busiest + latency, mean + latency)

    def _add(self, placed: Placed, sign: float) -> None:
        local, draft, ranks = self.topology.local, placed.draft, placed.ranks
        if len(draft.squares) == 1 and len(ranks) == self.topology.world:  # the same everywhere
            (piece,) = draft.pieces
            self._add_everywhere(sign * (draft.base + local * piece.near + piece.owner))
            return
        self._add_everywhere(sign * draft.base)
        owners, first = len(ranks) // len(draft.squares), 0
        for piece in draft.pieces:
            mine = ranks[first : first + owners * piece.count]
            first += len(mine)
            self._add_piece(piece, mine, sign)
        if any(draft.squares):
            self._add_neighbours(placed, sign)

    def _add_everywhere(self, line: Floats) -> None:
        self._ranks += line[:3, None]
        self._cards += self.topology.local * line[3:, None]

    def _add_piece(self, piece: Piece, ranks: tuple[int, ...], sign: float) -> None:
        local = self.topology.local
        owners = len(ranks) // piece.count
        near, host, owner = sign * piece.near, sign * piece.host, sign * piece.owner
        counts = Counter([rank // local for rank in ranks])
        if len(counts) > 2:
            hosts = np.zeros(self.topology.hosts)
            hosts[list(counts)] = list(counts.values())
            line = near + host / owners
            self._ranks += line[:3, None] * hosts.repeat(local)
            self._cards += (local * line[3:] + owner[3:])[:, None] * hosts
        else:
            for number, count in counts.items():
                line = count * near + (count / owners) * host
                self._ranks[:, number * local : (number + 1) * local] += line[:3, None]
                self._cards[:, number] += local * line[3:] + count * owner[3:]
        self._ranks[:, ranks] += owner[:3, None]

    def _add_neighbours(self, placed: Placed, sign: float) -> None:
        """Squares between pieces of one host do not cross; each piece is within a host here."""
        squares, ranks = placed.draft.squares, placed.ranks
        owners = len(ranks) // len(squares)
        hosts = [rank // self.topology.local for rank in ranks[::owners]]
        if len(set(hosts)) == len(hosts):
            return
        for number, host in enumerate(hosts):
            same = sum(s for s, h in zip(squares, hosts, strict=True) if h == host)
            sent = squares[number] * (hosts.count(host) - 1)
            amounts = sign * np.array([sent, same - squares[number]])
            mine = list(ranks[number * owners : (number + 1) * owners])
            self._ranks[:2, mine] += amounts[:, None] / self.rates.host_bytes_per_s
            self._cards[:, host] -= owners * amounts / self.rates.cross_bytes_per_s
