"""Work of communication threads, for those who wait for it."""

from concurrent.futures import Future
from typing import Generic, TypeVar

from rowmesh.trace import Recorder

__all__ = ["Task"]

T = TypeVar("T")


class Task(Generic[T]):
    """Work of a communication thread; a trace shows who waits for it. `Mesh.later` makes it."""

    def __init__(self, future: Future[T], owner: str, trace: Recorder) -> None:
        self._future, self._owner, self._trace = future, owner, trace

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def result(self) -> T:
        """Wait for its end; raises what it raised."""
        if self.done():
            return self._future.result()
        with self._trace.wait(self._owner):
            return self._future.result()
