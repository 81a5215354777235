"""What the counts of a table come to: coverage, steady rows, growth, heat."""

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.profile.counts import Ints, TableCounts
from rowmesh.stats import Heat

__all__ = ["SHARES", "cover", "extend_growth", "find_collisions", "find_steady", "make_heat"]

SHARES: Final = (0.001, 0.01, 0.022, 0.05, 0.10, 0.13, 0.50)  # 2.2 % and 13 % are P2RES's
_STEADY: Final = 95  # per cent of batches


def cover(requests: Ints, numbers: Iterable[float], *, total: int) -> list[float]:
    """Share of ``total`` requests that go to the n hottest rows, for each n, rounded down.

    Args:
        requests: Of single rows, in any order.
        numbers: The n.
        total: Requests for all rows, those not counted one by one included.
    """
    sums = np.concatenate([[0], np.cumsum(np.sort(requests)[::-1])])
    places = [min(math.floor(n), len(requests)) for n in numbers]
    return [float(sums[place] / total) if total else 0.0 for place in places]


def find_steady(counts: TableCounts, num_batches: int) -> tuple[int, int]:
    """Rows in more than 95 % of the batches, and the requests for them."""
    steady = counts.presence * 100 > _STEADY * num_batches
    return int(steady.sum()), int(counts.requests[steady].sum())


def find_collisions(
    tables: Sequence[TableCounts], numbers: Iterable[int], *, followed: int, collided: int
) -> list[tuple[int, float]]:
    """Share of the next batch's rows that the running step updates, if the n hottest have copies.

    The hottest of all tables are those in most batches of steps 0 and 1 mod 4; collisions are
    counted from steps 2 to steps 3 mod 4, so no row is called hot for the collisions it had.

    Args:
        tables: Counts of every table.
        numbers: The n; those above the number of rows that were seen are left out.
        followed, collided: Rows of steps 3 mod 4 that were asked for, and that collided, dropped
            ones included.
    """
    scores = np.concatenate([counts.first_pairs for counts in tables])
    later = np.concatenate([counts.later for counts in tables])
    again = np.concatenate([counts.again for counts in tables])
    order = np.argsort(-scores, kind="stable")[: np.count_nonzero(scores)]
    found = []
    for n in numbers:
        left = followed - int(later[order[:n]].sum())
        if n <= len(order) and left:
            found.append((n, (collided - int(again[order[:n]].sum())) / left))
    return found


def make_heat(counts: TableCounts, num_even: int, num_odd: int) -> Heat:
    """The heat of rows in even steps, their means from odd steps; of one step alone, by itself.

    Args:
        counts: Of single rows.
        num_even, num_odd: Batches of even and of odd steps.
    """
    found, asked = counts.halves(0)
    presence, requests = counts.halves(1) if num_odd else (found, asked)
    seen = np.flatnonzero(found)
    order = seen[np.argsort(-found[seen], kind="stable")]
    return Heat(
        ids=counts.rows[order],
        scores=found[order] / num_even,
        requests=requests[order] / (num_odd or num_even),
        presence=presence[order] / (num_odd or num_even),
    )


def extend_growth(growth: Sequence[float], marks: Sequence[tuple[int, float]]) -> list[float]:
    """``growth`` (distinct rows of 1, 2, 4, ... batches) continued through ``marks``.

    A mark is a number of batches from the beginning, and their distinct rows. Between marks lie
    straight lines on doubly logarithmic paper; more batches never have fewer rows.
    """
    known = {2**j: number for j, number in enumerate(growth)}
    known |= {n: number for n, number in marks if n > 2 ** (len(growth) - 1)}
    places = sorted(known)
    curve = np.maximum.accumulate([known[n] for n in places])
    found = list(growth)
    while 2 ** len(found) <= places[-1]:
        found.append(_between(2 ** len(found), places, curve))
    return found


def _between(n: int, places: list[int], curve: NDArray[np.float64]) -> float:
    i = bisect.bisect_left(places, n)
    if places[i] == n or not curve[i - 1]:
        return float(curve[i if places[i] == n else i - 1])
    way = math.log(n / places[i - 1]) / math.log(places[i] / places[i - 1])
    return float(curve[i - 1] * (curve[i] / curve[i - 1]) ** way)
