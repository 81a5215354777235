"""The recorder of a rank: off it does nothing, on it notes when phases and exchanges began and
ended. It never looks at a tensor."""

import contextlib
import threading
import time
from typing import Final

from rowmesh.trace.recording import STEP, Flight, Recording, Span

__all__ = ["Recorder"]

_MAX_EVENTS = 200_000  # about 50 MB of a rank's memory
_NOTHING: Final = contextlib.nullcontext()


class Recorder:
    """Notes what the threads of one rank do between `begin_step` and `end_step`.

    Args:
        max_events: When there are more, recording stops and the step under way is dropped.

    Attributes:
        is_on: Whether something is recorded now; all other costs hang on this one check.
    """

    def __init__(self, *, max_events: int = _MAX_EVENTS) -> None:
        self.is_on = False
        self._max_events, self._is_full = max_events, False
        self._steps: list[Span] = []
        self._spans: list[Span] = []
        self._flights: list[Flight] = []
        self._thread, self._name, self._start = 0, "", 0

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Marks the block as ``name``; a phase inside another is taken out of the outer one."""
        return _Mark(self, "phase", name) if self.is_on else _NOTHING

    def wait(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Marks the block as blocked on ``name``: a message, or a communication thread."""
        return _Mark(self, "wait", name) if self.is_on else _NOTHING

    def post(
        self,
        *,
        lane: str,
        exchange: str,
        sequence: int,
        num_messages: int,
        sent_bytes: int,
        received_bytes: int,
    ) -> Flight:
        """An exchange that is posted now; its ``end`` is for the caller to set (`land`)."""
        sizes = (num_messages, sent_bytes, received_bytes)
        flight = Flight(lane, exchange, sequence, *sizes, time.perf_counter_ns())
        if self._has_room():
            self._flights.append(flight)
        return flight

    @staticmethod
    def land(flight: Flight) -> None:
        """Note that the exchange is complete."""
        flight.end = time.perf_counter_ns()

    def begin_step(self, number: int) -> None:
        """Record from here on; the calling thread is the one that runs the steps."""
        if self._is_full:
            return
        self._thread, self._name = threading.get_ident(), str(number)
        self.is_on = True
        self._start = time.perf_counter_ns()

    def end_step(self) -> None:
        """Record no more until the next step begins."""
        if self.is_on:
            self.is_on = False
            span = Span(STEP, self._name, STEP, self._start, time.perf_counter_ns())
            self._steps.append(span)

    def stop(self) -> None:
        """Give up the step under way, if one is."""
        self.is_on = False

    def take(self, *, rank: int, host: int) -> Recording:
        """What was recorded since the last call, without marks of a step that was dropped."""
        end = self._steps[-1].end if self._steps else 0
        recording = Recording(
            rank=rank,
            host=host,
            steps=self._steps,
            spans=[s for s in self._spans if s.end <= end],
            flights=[f for f in self._flights if f.start <= end],
            is_full=self._is_full,
        )
        self.is_on = self._is_full = False
        self._steps, self._spans, self._flights = [], [], []
        return recording

    def _add(self, kind: str, name: str, start: int) -> None:
        end = time.perf_counter_ns()
        if self._has_room():
            self._spans.append(Span(kind, name, self._track(), start, end))

    def _has_room(self) -> bool:
        if len(self._spans) + len(self._flights) >= self._max_events:
            self.is_on, self._is_full = False, True
        return not self._is_full

    def _track(self) -> str:
        """Autograd's own threads, which Python did not start, work for the one that steps."""
        if threading.get_ident() == self._thread:
            return STEP
        name = threading.current_thread().name
        if name.startswith("Dummy-"):
            return STEP
        return name.removeprefix("rowmesh-").removesuffix("_0")


class _Mark:
    """A block of one thread, noted when it ends, also by an exception."""

    __slots__ = ("_kind", "_name", "_recorder", "_start")

    def __init__(self, recorder: Recorder, kind: str, name: str) -> None:
        self._recorder, self._kind, self._name = recorder, kind, name

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self._recorder._add(self._kind, self._name, self._start)
