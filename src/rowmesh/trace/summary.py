"""The table of a trace: per phase, lane and edge, over steps and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, TypeVar

from rowmesh.trace.recording import PHASES, Recording
from rowmesh.trace.times import OTHER, Communication, PhaseTime, communication, phase_times

__all__ = ["CommunicationRow", "PhaseRow", "Summary", "summarise"]

K = TypeVar("K")
_MS = 1e6  # ns


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """A phase: a rank's time is the median of its steps, ``ms`` the mean of the ranks' times.

    Args:
        name: Of the phase; ``other`` is what no phase covers, ``step`` the whole.
        ms: A step.
        waiting_ms: Of it blocked on a message or a communication thread.
        slowest_ms: Of the rank that takes longest.
        slowest_rank: That rank.
    """

    name: str
    ms: float
    waiting_ms: float
    slowest_ms: float
    slowest_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationRow:
    """Messages in flight, made up like `PhaseRow`; an empty lane or exchange means all."""

    lane: str
    exchange: str
    in_flight_ms: float
    exposed_ms: float
    hidden_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a trace says in figures.

    Args:
        ranks: How many.
        hosts: How many.
        steps: Their numbers.
        is_full: Whether a rank dropped events because there were too many.
        clock_error_ms: Most by which the times of two ranks may be out of step in the trace.
        phases: In the order of a step, then ``other``, then ``step``.
        communication: All, then lane by lane, a lane before its exchanges.
        sent_mb: ``{edge: {link: MB}}``, mean of ranks and steps.
    """

    ranks: int
    hosts: int
    steps: tuple[int, ...]
    is_full: bool
    clock_error_ms: float
    phases: tuple[PhaseRow, ...]
    communication: tuple[CommunicationRow, ...]
    sent_mb: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(recordings: Sequence[Recording]) -> Summary | None:
    """The summary of all ranks' recordings; None if they have no step in common."""
    numbers = [[step.name for step in r.steps] for r in recordings]
    common = [n for n in numbers[0] if all(n in theirs for theirs in numbers)]
    if not common:
        return None
    by_rank = [_steps_of(r, common) for r in recordings]
    return Summary(
        ranks=len(recordings),
        hosts=len({r.host for r in recordings}),
        steps=tuple(int(n) for n in common),
        is_full=any(r.is_full for r in recordings),
        clock_error_ms=_clock_error(recordings),
        phases=_phase_rows([phases for phases, _ in by_rank], [r.rank for r in recordings]),
        communication=_communication_rows([flights for _, flights in by_rank]),
        sent_mb=_sent(recordings),
    )


_Phases = Sequence[Mapping[str, PhaseTime]]  # by step
_Flights = Sequence[Mapping[tuple[str, str], Communication]]


def _steps_of(recording: Recording, common: Sequence[str]) -> tuple[_Phases, _Flights]:
    phases, flights = [], []
    for step in recording.steps:
        if step.name in common:
            found = phase_times(recording, step)
            waiting = sum(time.waiting for time in found.values())
            phases.append(found | {"step": PhaseTime(step.end - step.start, waiting)})
            flights.append(communication(recording, step))
    return phases, flights


def _phase_rows(by_rank: Sequence[_Phases], ranks: Sequence[int]) -> tuple[PhaseRow, ...]:
    names = _keys(by_rank)
    known = [name for name in PHASES if name in names]
    more = [name for name in names if name not in (*PHASES, OTHER, "step")]
    rows, nothing = [], PhaseTime()
    for name in (*known, *more, OTHER, "step"):
        times = [[step.get(name, nothing) for step in steps] for steps in by_rank]
        spent = [median(t.spent for t in steps) / _MS for steps in times]
        waiting = [median(t.waiting for t in steps) / _MS for steps in times]
        slowest = max(range(len(spent)), key=spent.__getitem__)
        rows.append(
            PhaseRow(
                name=name,
                ms=fmean(spent),
                waiting_ms=fmean(waiting),
                slowest_ms=spent[slowest],
                slowest_rank=ranks[slowest],
            )
        )
    return tuple(rows)


def _communication_rows(by_rank: Sequence[_Flights]) -> tuple[CommunicationRow, ...]:
    rows, nothing = [], Communication(0, 0)
    lanes = list(dict.fromkeys(lane for lane, _ in _keys(by_rank)))
    for lane, kind in sorted(_keys(by_rank), key=lambda key: lanes.index(key[0])):
        times = [[step.get((lane, kind), nothing) for step in steps] for steps in by_rank]
        rows.append(
            CommunicationRow(
                lane=lane,
                exchange=kind,
                in_flight_ms=fmean(median(t.in_flight for t in s) / _MS for s in times),
                exposed_ms=fmean(median(t.exposed for t in s) / _MS for s in times),
                hidden_ms=fmean(median(t.hidden for t in s) / _MS for s in times),
            )
        )
    return tuple(rows)


def _keys(by_rank: Sequence[Sequence[Mapping[K, Any]]]) -> list[K]:
    """Of all ranks and steps, in the order of their first use."""
    return list(dict.fromkeys(key for steps in by_rank for step in steps for key in step))


def _clock_error(recordings: Sequence[Recording]) -> float:
    """Two ranks' errors add up; rank 0 has none."""
    errors = sorted((r.clock.error_ns + abs(r.clock.drift_ns) for r in recordings), reverse=True)
    return sum(errors[:2]) / _MS


def _sent(recordings: Sequence[Recording]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for recording in recordings:
        for edge, links in recording.sent.items():
            for link, amount in links.items():
                share = amount / 1e6 / len(recording.steps) / len(recordings)
                row = found.setdefault(edge, {})
                row[link] = row.get(link, 0.0) + share
    return found
