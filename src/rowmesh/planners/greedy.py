"""The greedy planner: largest first, each to the least busy ranks with room, then improvements.

Several starts are placed (every unit by its least peak; all by one split; by least mean cost
under a bound on the busiest rank), or, if none fits, one by least memory; the best is improved
unit by unit until no move gains.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rowmesh.errors import PlanError
from rowmesh.placement.memory import RuleState
from rowmesh.planners.constraints import SPLITS
from rowmesh.planners.drafts import Draft, draft, draft_alike
from rowmesh.planners.options import Option, Unit
from rowmesh.planners.positions import Ranking
from rowmesh.planners.tally import Cost, Placed, Tally, cost_alone

__all__ = ["Greedy"]

_MAX_SWEEPS = 6  # a limit in seconds would give another plan every time
_SLACKS = (0.05, 0.15, 0.25, 0.35, 0.5, float("inf"))  # over an even spread of the cheapest options
_LEAST_SWEEP = 0.002  # of the step: a sweep that gains less is the last
_LEAST_GAIN = 0.01  # of what the unit costs alone: less is not worth another split
_ALLOWANCE = 0.05  # of a step, for small tables to be data-parallel
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class _Sized:
    """An option of a unit, and what it costs on an empty mesh."""

    first: Placed  # where it would go
    alone: Cost

    @property
    def draft(self) -> Draft:
        return self.first.draft

    @property
    def option(self) -> Option:
        return self.draft.option

    def is_worse(self, other: "_Sized") -> bool:
        """Whether ``other`` is as good on average, at its peak and in memory."""
        return (
            other.alone.mean <= self.alone.mean * (1 + 1e-9)
            and other.alone.busiest <= self.alone.busiest * (1 + 1e-9)
            and other.draft.need <= self.draft.need
        )


class Greedy:
    """Places units on a tally; one answer whatever the order they came in.

    Args:
        units: What is to be placed.
        tally: Empty; it holds the plan after `place`.
        state: Of the update rule.
        on_progress: Called with the share of the work done.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        tally: Tally,
        *,
        state: RuleState,
        on_progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self._units = sorted(units, key=lambda unit: unit.name)
        self._tally, self._state, self._on_progress = tally, state, on_progress
        self._all = self._size_all()
        self._sized = [_best_of(sized) for sized in self._all]

    @property
    def units(self) -> Sequence[Unit]:
        """In the order in which they are placed."""
        return self._units

    def place(self) -> list[Placed]:
        """The option and ranks of every unit.

        Raises:
            PlanError: If the rows do not fit into the memory of the ranks.
        """
        best: list[Placed] | None = None
        best_cost = Cost(np.inf, np.inf)
        for number, fill in enumerate(self._fills()):
            self._on_progress(0.3 + 0.2 * number / (len(_SLACKS) + len(SPLITS) + 1))
            placed = fill(best_cost.busiest)
            if placed is not None and _is_less(self._tally.cost(), best_cost):
                best, best_cost = placed, self._tally.cost()
        if best is None:
            best = self._fill_by_memory()
        self._improve(best)
        return best

    def copy_small(self, placed: Sequence[Placed]) -> list[Placed]:
        """``placed`` with small tables data-parallel, the cheapest first, while the step stays as
        good.

        Their lookups then wait for no other rank, which the tally does not see; it may cost
        `_ALLOWANCE` of the step.
        """
        found = list(placed)
        self.refill(found)
        limit = self._tally.cost().total * (1.0 + _ALLOWANCE)
        copies = [
            next((s for s in a if s.option.split == "data_parallel"), None) for a in self._all
        ]
        numbers = [i for i, sized in enumerate(copies) if sized is not None]
        for i in sorted(numbers, key=lambda i: (copies[i].alone.mean, i)):  # type: ignore[union-attr]
            with self._tally.without(found[i]):
                other = self._best(self._units[i], [s for s in (copies[i],) if s], tries=1)
                moves = other is not None and self._tally.cost_with(other).total <= limit
            if other is not None and moves:
                self._move(found, i, other)
        return found

    def refill(self, found: Sequence[Placed]) -> None:
        """Have the tally hold ``found``, added up anew: moves leave rounding errors."""
        self._tally.clear()
        for placed in found:
            self._tally.put(placed)

    def best_other(self, number: int, placed: Placed) -> Placed | None:
        """The best placement of a unit under another option; the tally must not hold the unit."""
        kept = self._sized[number]
        known = kept if len(kept) > 1 else self._all[number]
        others = [s for s in known if s.option != placed.draft.option]
        return self._best(self._units[number], others, tries=1)

    def _size_all(self) -> list[list[_Sized]]:
        """All options of every unit, alone on the mesh; units alike are sized at once."""
        alike: dict[object, list[int]] = {}
        for number, unit in enumerate(self._units):
            alike.setdefault(unit.shape, []).append(number)
        found: list[list[_Sized]] = [[] for _ in self._units]
        done = 0
        for numbers in alike.values():
            self._on_progress(0.3 * done / len(self._units))
            done += len(numbers)
            for sized in self._size([self._units[number] for number in numbers]):
                for number, one in zip(numbers, sized, strict=True):
                    found[number].append(one)
        return found

    def _size(self, units: Sequence[Unit]) -> Iterator[list[_Sized]]:
        """Option by option, of units alike."""
        topology = self._tally.topology
        ranking = Ranking(topology, lambda: np.zeros(topology.world))
        for option in units[0].options:
            ranks = ranking.positions(units[0], option)[0]
            drafts = draft_alike(
                units, option, ranks, topology=topology, rates=self._tally.rates, state=self._state
            )
            placed = [Placed(made, ranks) for made in drafts]
            yield [_Sized(*sized) for sized in zip(placed, cost_alone(placed), strict=True)]

    def _draft(self, unit: Unit, option: Option, ranks: tuple[int, ...]) -> Draft:
        topology = self._tally.topology
        return draft(
            unit, option, ranks, topology=topology, rates=self._tally.rates, state=self._state
        )

    def _fills(self) -> Iterator[Callable[[float], list[Placed] | None]]:
        """The starts: under bounds; by least peak; all by one split, where they have it.

        Each takes the seconds of the best one so far, and gives up where it cannot be better.
        """
        for slack in _SLACKS:
            yield functools.partial(self._fill_under, slack)
        peaks = [min(sized, key=lambda s: s.alone.busiest) for sized in self._sized]
        yield functools.partial(self._fill, peaks)
        known = {s.option.split for sized in self._all for s in sized}
        for split in (s for s in SPLITS if s in known):
            chosen = []
            for everything, sized in zip(self._all, self._sized, strict=True):
                same = [s for s in everything if s.option.split == split]
                chosen.append(min(same, key=lambda s: s.alone.mean, default=sized[0]))
            yield functools.partial(self._fill, chosen)

    def _fill(self, chosen: Sequence[_Sized], most: float) -> list[Placed] | None:
        """All units on an emptied tally, the costliest first.

        None if one finds no room, or if the mean over ranks alone is above ``most``.
        """
        self._tally.clear()
        if sum(sized.alone.mean for sized in chosen) > most:
            return None
        found: dict[int, Placed] = {}
        for i in sorted(range(len(chosen)), key=lambda i: (-chosen[i].alone.busiest, i)):
            placed = self._best(self._units[i], [chosen[i]], tries=1)
            if placed is None:
                placed = self._best(self._units[i], self._sized[i], tries=1)
            if placed is None:
                return None
            self._tally.put(placed)
            found[i] = placed
        return [found[i] for i in range(len(chosen))]

    def _fill_under(self, slack: float, most: float) -> list[Placed] | None:
        """The costliest first, each by its least mean cost that keeps the busiest rank in bounds.

        The bound is ``1 + slack`` times the mean cost of all units, as if they could be spread
        evenly; units not placed yet count as spread evenly too. None if one finds no room, or if
        the busiest rank comes above ``most``.
        """
        self._tally.clear()
        means = [sized[0].alone.mean for sized in self._sized]
        bound = (1.0 + slack) * (self._tally.cost().mean + sum(means))
        found: dict[int, Placed] = {}
        peaks = [sized[0].alone.busiest for sized in self._sized]
        left = sum(means)
        for i in sorted(range(len(means)), key=lambda i: (-peaks[i], i)):
            left -= means[i]
            placed, busiest = self._first_under(i, bound - left)
            if placed is None or busiest > most:
                return None
            self._tally.put(placed)
            found[i] = placed
        return [found[i] for i in range(len(means))]

    def _first_under(self, number: int, bound: float) -> tuple[Placed | None, float]:
        """The first option of a unit within the bound, else the nearest; and the busiest rank."""
        best: Placed | None = None
        least = np.inf
        for sized in self._sized[number]:
            placed = self._best(self._units[number], [sized], tries=1)
            if placed is None:
                continue
            busiest = self._tally.cost_with(placed).busiest
            if busiest < least:
                best, least = placed, busiest
            if busiest <= bound:
                return placed, busiest
        return best, least

    def _fill_by_memory(self) -> list[Placed]:
        """The largest units first, each under the option that needs least on a rank."""
        self._tally.clear()
        found: dict[int, Placed] = {}
        by_need = [sorted(sized, key=lambda s: s.draft.need) for sized in self._sized]
        for i in sorted(range(len(by_need)), key=lambda i: (-by_need[i][0].draft.need, i)):
            unit = self._units[i]
            tried = (self._best(unit, [sized], tries=1) for sized in by_need[i])
            placed = next((p for p in tried if p is not None), None)
            if placed is None:
                raise self._no_room(unit, by_need[i][0])
            self._tally.put(placed)
            found[i] = placed
        return [found[i] for i in range(len(by_need))]

    def _no_room(self, unit: Unit, least: _Sized) -> PlanError:
        room, limit = self._tally.room(), self._tally.limit
        assert room is not None
        assert limit is not None
        rank = max(unit.ranks, key=lambda r: (room[r], -r))
        return PlanError(
            f"{unit.label} needs at least {_size(least.draft.need)} on a rank "
            f"({least.option.word}), but of {_size(limit)} rank {rank} has most left, "
            f"{_size(int(room[rank]))}: add ranks or memory, or pin fewer tables"
        )

    def _best(self, unit: Unit, options: Sequence[_Sized], *, tries: int) -> Placed | None:
        """The placement that costs least on top of the tally, if any fits."""
        room, ranking = self._tally.room(), self._tally.ranking
        found: list[Placed] = []
        for sized in options:
            has_room = None if room is None else room >= sized.draft.need
            for ranks in ranking.positions(unit, sized.option, has_room=has_room, tries=tries):
                placed = self._on(unit, sized, ranks)
                if self._tally.fits(placed):
                    found.append(placed)
        if len(found) < 2:
            return found[0] if found else None
        best, least = found[0], np.inf
        for placed, cost in zip(found, self._tally.costs_with(found), strict=True):
            if cost.total < least * (1.0 - 1e-9):
                best, least = placed, cost.total
        return best

    def _on(self, unit: Unit, sized: _Sized, ranks: tuple[int, ...]) -> Placed:
        """An option on some ranks; its lines are known already if there is no choice of ranks."""
        if ranks == sized.first.ranks:
            return sized.first
        if len(ranks) == len(sized.first.ranks):
            return Placed(sized.draft, ranks)
        # Some hosts have more ranks for it than others.
        return Placed(self._draft(unit, sized.option, ranks), ranks)

    def _improve(self, found: list[Placed]) -> None:
        """Move one unit at a time, those that weigh most on the busiest rank first."""
        self.refill(found)
        for sweep in range(_MAX_SWEEPS):
            start = self._tally.cost().total
            order = [i for i in self._by_weight(found) if self._can_move(i)]
            for done, i in enumerate(order):
                self._on_progress(0.5 + 0.4 * (sweep + done / len(order)) / _MAX_SWEEPS)
                before = self._tally.cost()
                with self._tally.without(found[i]):
                    other = self._best(self._units[i], self._sized[i], tries=3)
                    moves = other is not None and self._gains(other, i, before)
                if other is not None and moves:
                    self._move(found, i, other)
            self.refill(found)
            if self._tally.cost().total > start * (1.0 - _LEAST_SWEEP):
                return

    def _can_move(self, number: int) -> bool:
        """Whether a unit has another option, or other ranks."""
        sized = self._sized[number]
        return len(sized) > 1 or sized[0].option.split not in ("row_wise", "data_parallel")

    def _move(self, found: list[Placed], number: int, other: Placed) -> None:
        self._tally.take(found[number])
        self._tally.put(other)
        found[number] = other

    def _by_weight(self, found: Sequence[Placed]) -> list[int]:
        """Units by the seconds they take of the busiest rank."""
        rank = int(self._tally.seconds().argmax())
        left = self._tally.seconds_without(found, rank)
        return sorted(range(len(found)), key=lambda i: (left[i], i))

    def _gains(self, other: Placed, number: int, before: Cost) -> bool:
        """Whether a move saves enough, and takes no longer on the busiest rank."""
        after = self._tally.cost_with(other)
        worth = _LEAST_GAIN * self._sized[number][0].alone.mean
        return (
            after.busiest <= before.busiest * (1.0 + 1e-9)
            and before.total - after.total > worth + 1e-9 * before.total
        )


def _best_of(found: Sequence[_Sized]) -> list[_Sized]:
    """Without the options that another is as good as in every way; the least mean cost first."""
    kept = [
        sized
        for i, sized in enumerate(found)
        if not any(
            sized.is_worse(other) and not (j > i and other.is_worse(sized))
            for j, other in enumerate(found)
            if j != i
        )
    ]
    return sorted(kept, key=lambda sized: sized.alone.mean)


def _is_less(cost: Cost, other: Cost) -> bool:
    """Whether it is less on the busiest rank, or as much, and less on average."""
    if cost.busiest > other.busiest * (1.0 - 1e-6):
        return cost.busiest < other.busiest * (1.0 + 1e-9) and cost.mean < other.mean
    return True


def _size(num_bytes: int) -> str:
    held = max(0, num_bytes)
    return f"{held / _GIB:.3f} GiB" if held >= _GIB / 10 else f"{held:,} bytes"
