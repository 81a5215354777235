"""A trace in Chrome's format, for chrome://tracing and ui.perfetto.dev.

A process is a rank; its threads are the thread that runs the steps, every communication thread,
and every lane with the exchanges in flight on it. Exchanges of one lane that overlap lie on
tracks of their own (``lane grads``, ``lane grads (2)``), so that marks of a track always nest.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rowmesh.trace.recording import STEP, Flight, Recording

__all__ = ["chrome_trace"]

_Event = dict[str, Any]


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The JSON object of all ranks, on rank 0's clock, from the first traced step on.

    ``ts`` and ``dur`` are microseconds. ``otherData.clocks`` says for every rank by how much its
    clock was shifted, by how much that may be wrong, and how far it drifted during the trace.
    """
    starts = [s.start + r.clock.offset_ns for r in recordings for s in r.steps]
    zero = min(starts, default=0)
    return {
        "traceEvents": [event for r in recordings for event in _events(r, zero)],
        "displayTimeUnit": "ms",
        "otherData": {
            "program": "rowmesh",
            "clocks": {
                f"rank {r.rank}": {
                    "offset_us": r.clock.offset_ns / 1e3,
                    "error_us": r.clock.error_ns / 1e3,
                    "drift_us": r.clock.drift_ns / 1e3,
                }
                for r in recordings
            },
        },
    }


def _events(recording: Recording, zero: int) -> Iterator[_Event]:
    rank, shift = recording.rank, recording.clock.offset_ns - zero
    yield _meta("process_name", rank, 0, name=f"rank {rank}, host {recording.host}")
    yield _meta("process_sort_index", rank, 0, sort_index=rank)
    tracks = {STEP: 0}
    for span in (*recording.steps, *recording.spans):
        tid = tracks.setdefault(span.track, len(tracks))
        name = f"step {span.name}" if span.kind == STEP else span.name
        yield _complete(rank, tid, name, span.kind, span.start + shift, span.end - span.start)
    last = max((s.end for s in recording.steps), default=0)
    for flight, track in _lay_out(recording.flights, last):
        tid = tracks.setdefault(track, len(tracks))
        duration = (last if flight.end is None else flight.end) - flight.start
        event = _complete(rank, tid, flight.exchange, "message", flight.start + shift, duration)
        yield event | {"args": _arguments(flight)}
    for track, tid in tracks.items():
        yield _meta("thread_name", rank, tid, name=track)
        yield _meta("thread_sort_index", rank, tid, sort_index=tid)


def _lay_out(flights: Sequence[Flight], last: int) -> Iterator[tuple[Flight, str]]:
    """Every exchange with the first track of its lane that is free when it is posted."""
    free: dict[str, list[int]] = {}
    for flight in sorted(flights, key=lambda f: (f.lane, f.start)):
        ends = free.setdefault(flight.lane, [])
        place = next((i for i, end in enumerate(ends) if end <= flight.start), len(ends))
        ends[place : place + 1] = [last if flight.end is None else flight.end]
        yield flight, f"lane {flight.lane}" + (f" ({place + 1})" if place else "")


def _arguments(flight: Flight) -> _Event:
    return {
        "sequence": flight.sequence,
        "messages": flight.num_messages,
        "sent_bytes": flight.sent_bytes,
        "received_bytes": flight.received_bytes,
    }


def _meta(what: str, pid: int, tid: int, **arguments: str | int) -> _Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _complete(pid: int, tid: int, name: str, kind: str, start: int, duration: int) -> _Event:
    place = {"pid": pid, "tid": tid, "ts": start / 1e3, "dur": duration / 1e3}
    return {"name": name, "cat": kind, "ph": "X", **place}
