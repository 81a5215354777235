"""A background thread that makes items before they are asked for."""

import atexit
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

__all__ = ["read_ahead"]

T = TypeVar("T")


def read_ahead(
    items: Iterator[T], *, depth: int, when_full: Callable[[], bool] = lambda: False
) -> Generator[T, None, None]:
    """The same items, made by a thread that is up to ``depth`` of them ahead.

    An exception of ``items`` is raised in the place of the item it belongs to. The thread starts
    with the first item and ends with the last, with ``close()``, when the generator is dropped,
    or at the end of the interpreter, whichever is first; ``close()`` returns when it has ended.

    Args:
        items: Used by the thread alone.
        depth: From 1.
        when_full: Called by the thread, while ``depth`` items wait, to do a piece of further
            work; False says that there is none.
    """
    queue: _Queue[T] = _Queue(depth)
    thread = threading.Thread(
        target=_fill, args=(queue, items, when_full), name="rowmesh-read-ahead", daemon=True
    )

    def stop() -> None:
        queue.close()
        if thread is not threading.current_thread():  # dropped by a collection in the thread
            thread.join()

    atexit.register(stop)
    thread.start()
    try:
        while True:
            yield queue.get()
    except _Ended:
        return
    finally:
        atexit.unregister(stop)
        stop()


class _Ended(Exception):  # noqa: N818 - not an error
    pass


class _Queue(Generic[T]):
    """A bounded queue that either side can end."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False

    def is_full(self) -> bool:
        with self._changed:
            return len(self._items) >= self._depth and not self._closed

    def put(self, item: T) -> bool:
        """Wait for a place; False if nobody reads any more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._depth or self._closed)
            self._items.append(item)
            self._changed.notify_all()
            return not self._closed

    def end(self, error: BaseException) -> None:
        """Nothing follows but ``error``."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._error)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            assert self._error is not None
            raise self._error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _fill(queue: _Queue[T], items: Iterator[T], when_full: Callable[[], bool]) -> None:
    try:
        for item in items:
            while queue.is_full() and when_full():
                pass
            if not queue.put(item):
                return
        queue.end(_Ended())
    except BaseException as error:
        queue.end(error)
