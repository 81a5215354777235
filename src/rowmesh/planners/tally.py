"""`Tally`: what is placed so far, what it costs, and what one more unit would make of it."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost import Load, Rates
from rowmesh.cost.seconds import latency_seconds
from rowmesh.planners.drafts import Draft, lay_drafts, scale_to_seconds
from rowmesh.planners.positions import Ranking
from rowmesh.topology import Topology

__all__ = ["Cost", "Placed", "Tally", "cost_alone"]

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


@dataclass(frozen=True, eq=False)
class Placed:
    """A draft on some ranks."""

    draft: Draft
    ranks: tuple[int, ...]

    @functools.cached_property
    def lines(self) -> Floats:
        """What it adds to the lines of every rank: ``[5, W]``."""
        found: Floats = lay_drafts([self.draft], [self.ranks])[0]
        return found


class Tally:
    """The sum over placed drafts, and the limit on what a rank holds."""

    def __init__(
        self, topology: Topology, *, rates: Rates, limit: int | None = None, fixed: Load
    ) -> None:
        self.topology, self.rates, self.limit = topology, rates, limit
        self._fixed_kinds = fixed.kinds
        self._fixed = scale_to_seconds(rates) @ fixed.values
        cards = self._fixed[3:].reshape(2, topology.hosts, topology.local).sum(2)
        self._fixed[3:] = cards.repeat(topology.local, 1)
        self._latencies: dict[frozenset[str], float] = {}
        self._ranking: Ranking | None = None
        self._cost: Cost | None = None
        self.clear()

    def clear(self) -> None:
        """Take everything away but the dense layers."""
        self._lines = self._fixed  # [5, W], those of a draft; never changed in place
        self._held = np.zeros(self.topology.world, dtype=np.int64)
        self._kinds: Counter[str] = Counter(self._fixed_kinds)
        self._change()

    def put(self, placed: Placed) -> None:
        """Add a unit."""
        self._lines = self._lines + placed.lines
        if self.limit is not None:
            self._held[list(placed.ranks)] += placed.draft.held
        for kind in placed.draft.kinds:
            self._kinds[kind] += 1
        self._change()

    def take(self, placed: Placed) -> None:
        """Remove a unit."""
        self._lines = self._lines - placed.lines
        if self.limit is not None:
            self._held[list(placed.ranks)] -= placed.draft.held
        for kind in placed.draft.kinds:
            self._kinds[kind] -= 1
        self._change()

    @contextmanager
    def without(self, placed: Placed) -> Iterator[None]:
        """Remove a unit for a while; afterwards all is as before, to the bit."""
        before = self._lines, self._ranking, self._cost
        self.take(placed)
        try:
            yield
        finally:
            self.put(placed)
            self._lines, self._ranking, self._cost = before

    def _change(self) -> None:
        """Forget what was found out about the lines before."""
        self._ranking = self._cost = None

    @property
    def ranking(self) -> Ranking:
        """The ranks by their seconds."""
        if self._ranking is None:
            self._ranking = Ranking(self.topology, self.seconds)
        return self._ranking

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
        return _seconds(self._lines)

    def seconds_without(self, placed: Sequence[Placed], rank: int) -> list[float]:
        """Seconds of one rank without the first of ``placed``, without the second, and so on."""
        gone = np.array([p.lines[:, rank] for p in placed]).reshape(-1, 5)
        left: list[float] = _seconds((self._lines[:, rank] - gone)[:, :, None])[:, 0].tolist()
        return left

    def cost(self) -> Cost:
        """Of what is placed."""
        if self._cost is None:
            seconds, latency = self.seconds(), self._latency(frozenset())
            busiest, mean = float(seconds.max()), float(seconds.sum()) / len(seconds)
            self._cost = Cost(busiest + latency, mean + latency)
        return self._cost

    def cost_with(self, placed: Placed) -> Cost:
        """Of what is placed and one more unit."""
        seconds, latency = _seconds(self._lines + placed.lines), self._latency(placed.draft.kinds)
        busiest, mean = float(seconds.max()), float(seconds.sum()) / len(seconds)
        return Cost(busiest + latency, mean + latency)

    def costs_with(self, options: Sequence[Placed]) -> list[Cost]:
        """`cost_with` of each."""
        lines = lay_drafts([p.draft for p in options], [p.ranks for p in options])
        lines += self._lines
        seconds = _seconds(lines)
        busiest, mean = seconds.max(1).tolist(), (seconds.sum(1) / seconds.shape[1]).tolist()
        latencies = [self._latency(placed.draft.kinds) for placed in options]
        return [
            Cost(most + late, even + late)
            for most, even, late in zip(busiest, mean, latencies, strict=True)
        ]

    def _latency(self, more: frozenset[str]) -> float:
        kinds = more.union([kind for kind, count in self._kinds.items() if count > 0])
        if kinds not in self._latencies:
            self._latencies[kinds] = latency_seconds(
                kinds, topology=self.topology, rates=self.rates
            )
        return self._latencies[kinds]


def cost_alone(placed: Sequence[Placed]) -> list[Cost]:
    """Of each by itself, without latencies: those are shared with other units."""
    seconds = _seconds(lay_drafts([p.draft for p in placed], [p.ranks for p in placed]))
    busiest, mean = seconds.max(1).tolist(), (seconds.sum(1) / seconds.shape[1]).tolist()
    return [Cost(most, even) for most, even in zip(busiest, mean, strict=True)]


def _seconds(lines: Floats) -> Floats:
    """``[..., W]`` from ``[..., 5, W]``: the longer way inside the host, work, the card."""
    busy: Floats = np.maximum(lines[..., 0, :], lines[..., 1, :])
    busy += lines[..., 2, :]
    busy += np.maximum(lines[..., 3, :], lines[..., 4, :])
    return busy
