"""Gradients that follow their step: of rows that the next batch does not ask for.

A row's update need only be done before the row is read again. So of a step whose next batch has
been begun ahead, only the gradients of rows which that batch asks for are waited for; the others
cross under its forward, when what that waits for has arrived (docs/notes/look_ahead.md).
"""

import threading
from collections.abc import Callable

from rowmesh.comm.mesh import Mesh
from rowmesh.comm.tasks import Task

__all__ = ["Following", "Rest"]

_PATIENCE_S = 2.0


class Following:
    """Gradients that are exchanged after their step, and the update of their rows.

    A thread of its own does it: when it is told to `go`, or after two seconds. So it needs no
    training thread to come back, of this rank or another, and a rank may wait for it alone.

    Args:
        reader: Number of the one forward that may read rows before: it reads none of these.
        submit: Gives work to that thread.
        work: To be done.
    """

    def __init__(
        self,
        reader: int,
        submit: Callable[[Callable[[], None]], Task[None]],
        work: Callable[[], None],
    ) -> None:
        self.reader, self._may_go = reader, threading.Event()

        def wait_and_work() -> None:
            self._may_go.wait(_PATIENCE_S)
            work()

        self._task = submit(wait_and_work)

    def go(self) -> None:
        """Have it done now."""
        self._may_go.set()

    def wait(self) -> None:
        """Return when the rows have their new values."""
        self._task.result()


class Rest:
    """What is left to do of an engine's last step.

    Args:
        mesh: Of the engine.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.following: Following | None = None

    def go(self) -> None:
        """Have it done now: the link is free."""
        if self.following is not None:
            self.following.go()

    def finish(self, *, but_for: int | None = None) -> None:
        """Wait for it, unless the forward numbered ``but_for`` may go before."""
        if self.following is not None and self.following.reader != but_for:
            self.following.go()
            with self._mesh.trace.phase("wait gradients"):
                self.following.wait()
            self.following = None
