"""A clean stop: the first signal asks for it, a second one ends the process."""

import contextlib
import os
import signal
import time
from types import FrameType

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import PeerError
from rowmesh.signals import INTERRUPTED, handled

__all__ = ["ONE_EVENT_S", "Stop"]

ONE_EVENT_S = 1.0  # terminal and launcher both deliver one Ctrl-C


class Stop:
    """Whether this rank has been asked to stop, and why.

    A context manager: inside, SIGINT, SIGTERM and SIGHUP set `reason` instead of ending the
    process, so that the step under way ends and every rank hears of it. A further signal, more
    than a second after the first, ends the process at once with code 130. Outside the main thread
    signals stay as they are.

    Args:
        mesh: Where a SIGTERM looks first: a launcher sends it when another rank has failed, and
            then that rank's sentence is raised.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.reason: str | None = None
        self._mesh, self._asked_at = mesh, 0.0
        self._inside = contextlib.ExitStack()

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        if self.reason is None:
            self.reason, self._asked_at = reason, time.monotonic()

    def __enter__(self) -> "Stop":
        self._inside.enter_context(handled(self._handle))
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            sentence = self._mesh.bulletin.published()
            if sentence is not None:
                raise PeerError(sentence)
        if self.reason is not None and time.monotonic() - self._asked_at > ONE_EVENT_S:
            os._exit(INTERRUPTED)
        self.request(signal.Signals(number).name)
