"""Gradients that follow their step: of rows that the next batch does not ask for.

A row's update need only be done before the row is read again. So of a step whose next batch has
been begun ahead, only the gradients of rows which that batch asks for are waited for; the others
cross under its forward, when the rows that it waits for have crossed (docs/notes/look_ahead.md).
"""

import threading
from collections.abc import Callable

from rowmesh.comm.mesh import Mesh
from rowmesh.comm.tasks import Task

__all__ = ["Following", "Rest"]


class Following:
    """Gradients to be exchanged after their step, and the update of their rows.

    Args:
        reader: Number of the one forward that may read rows before: it reads none of these.
        begin: Has a communication thread do it.
    """

    def __init__(self, reader: int, begin: Callable[[], Task[None]]) -> None:
        self.reader, self._begin = reader, begin
        self._task: Task[None] | None = None
        self._lock = threading.Lock()

    def launch(self) -> Task[None]:
        """Begin, if it has not begun."""
        with self._lock:
            if self._task is None:
                self._task = self._begin()
            return self._task

    def wait(self) -> None:
        """Return when the rows have their new values."""
        self.launch().result()


class Rest:
    """What is left to do of an engine's last step.

    A step launches it at its end, so that it needs nothing more of any rank's training thread: a
    rank may wait for it alone.

    Args:
        mesh: Of the engine.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.following: Following | None = None

    def launch(self) -> None:
        """Begin it, if anything is left."""
        if self.following is not None:
            self.following.launch()

    def finish(self, *, but_for: int | None = None) -> None:
        """Wait for it, unless the forward numbered ``but_for`` may go before."""
        if self.following is not None and self.following.reader != but_for:
            with self._mesh.trace.phase("wait gradients"):
                self.following.wait()
            self.following = None
