"""Times of one rank's steps from its recording: by phase, and of communication.

A message exchange is in flight from its post to its completion on this rank. Communication time
is the length of the union of in-flight intervals; EXPOSED is the part of it during which the
thread that runs the steps is inside a wait; HIDDEN is the rest, during which it computes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rowmesh.trace.recording import STEP, Recording, Span

__all__ = ["OTHER", "Communication", "PhaseTime", "communication", "kind_of", "phase_times"]

OTHER = "other"
Interval = tuple[int, int]


@dataclass(slots=True)
class PhaseTime:
    """Nanoseconds of a phase in one step of one rank, and how much of them it was blocked."""

    spent: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Communication:
    """Nanoseconds with messages in flight in one step of one rank; the rest of it is hidden."""

    in_flight: int
    exposed: int

    @property
    def hidden(self) -> int:
        """In flight while the thread that steps computes."""
        return self.in_flight - self.exposed


def phase_times(recording: Recording, step: Span) -> dict[str, PhaseTime]:
    """Every moment of ``step`` counted to the innermost phase around it, else to `OTHER`.

    So the times add up to the step: sum(spent) == step.end - step.start, exactly.
    """
    found = {OTHER: PhaseTime()}
    inside: list[Span] = []
    at = step.start

    def advance(to: int) -> None:
        nonlocal at
        name = next((s.name for s in reversed(inside) if s.kind == "phase"), OTHER)
        time = found.setdefault(name, PhaseTime())
        time.spent += to - at
        time.waiting += to - at if any(s.kind == "wait" for s in inside) else 0
        at = to

    for span in _nested(recording, step):
        while inside and inside[-1].end <= span.start:
            advance(inside[-1].end)
            inside.pop()
        advance(span.start)
        inside.append(span)
    while inside:
        advance(inside[-1].end)
        inside.pop()
    advance(step.end)
    return found


def _nested(recording: Recording, step: Span) -> list[Span]:
    """Marks of the steps' thread inside ``step``, each after those around it."""
    mine = [s for s in recording.spans if s.track == STEP and _is_inside(s, step)]
    # of two marks with the same times, the inner one ended, and so was noted, first
    return sorted(reversed(mine), key=lambda s: (s.start, -s.end))


def _is_inside(span: Span, step: Span) -> bool:
    return step.start <= span.start and span.end <= step.end


def communication(recording: Recording, step: Span) -> dict[tuple[str, str], Communication]:
    """By (lane, kind of exchange) in ``step``; ``(lane, "")`` a whole lane, ``("", "")`` all.

    Each is the union of its own intervals: what was in flight on two lanes at once counts to
    both, and once to all. An interval that reaches over the step's end is cut there.
    """
    waits = _union(
        (s.start, s.end)
        for s in recording.spans
        if s.kind == "wait" and s.track == STEP and _is_inside(s, step)
    )
    groups: dict[tuple[str, str], list[Interval]] = {("", ""): []}
    for flight in recording.flights:
        end = step.end if flight.end is None else min(flight.end, step.end)
        interval = (max(flight.start, step.start), end)
        if interval[0] <= interval[1]:
            lane = flight.lane
            for key in (("", ""), (lane, ""), (lane, kind_of(flight.exchange))):
                groups.setdefault(key, []).append(interval)
    found = {}
    for key, intervals in groups.items():
        union = _union(intervals)
        found[key] = Communication(_length(union), _length(_common(union, waits)))
    return found


def kind_of(exchange: str) -> str:
    """The exchange without its collection and number: ``"ids of users"`` is ``"ids"``."""
    return re.split(r" of |,| \d+", exchange, maxsplit=1)[0]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Where both are; each a union."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(union: Sequence[Interval]) -> int:
    return sum(end - start for start, end in union)
