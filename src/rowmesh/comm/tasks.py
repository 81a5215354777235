"""Work of communication threads, for those who wait for it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from rowmesh.trace import Recorder

__all__ = ["Task", "Threads"]

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


class Threads:
    """Communication threads, one for each owner of each model; they end with the model.

    Work holds its model (what it is submitted ``of``), so `end` also waits for that of a model
    nobody else holds.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[object, dict[str, ThreadPoolExecutor]] = WeakKeyDictionary()

    def submit(self, owner: str, work: Callable[[], T], *, of: object) -> "Future[T]":
        """Run ``work`` after what was given to the same owner of the same model before."""
        owners = self._of.setdefault(of, {})
        if owner not in owners:
            name = f"rowmesh-{owner}"
            owners[owner] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        return owners[owner].submit(work)

    def end(self) -> None:
        """Wait until all work is done; no more is taken."""
        for owners in list(self._of.values()):
            for thread in list(owners.values()):
                thread.shutdown()
