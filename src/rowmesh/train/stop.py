"""A clean stop: the first signal asks for it, a second one ends the process."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import PeerError

__all__ = ["INTERRUPTED", "SIGNALS", "Stop"]

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_EVENT_S = 1.0  # terminal and launcher both deliver one Ctrl-C


class Stop:
    """Whether this rank has been asked to stop, and why.

    A context manager: inside, SIGINT and SIGTERM set `reason` instead of ending the process, so
    that the step under way ends and every rank hears of it. A further signal, more than a second
    after the first, ends the process at once with code 130. Outside the main thread signals stay
    as they are.

    Args:
        mesh: Where a SIGTERM looks first: a launcher sends it when another rank has failed, and
            then that rank's sentence is raised.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.reason: str | None = None
        self._mesh, self._asked_at = mesh, 0.0
        self._before: dict[int, Any] = {}

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        if self.reason is None:
            self.reason, self._asked_at = reason, time.monotonic()

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            sentence = self._mesh.bulletin.published()
            if sentence is not None:
                raise PeerError(sentence)
        if self.reason is not None and time.monotonic() - self._asked_at > _ONE_EVENT_S:
            os._exit(INTERRUPTED)
        self.request(signal.Signals(number).name)
