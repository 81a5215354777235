"""Worker processes that say when a piece of work is done, or why they failed."""

import multiprocessing
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from rowmesh.errors import InputError, PeerError

__all__ = ["run_workers"]

_LOOK_S = 1.0  # between looks at whether all workers live


def run_workers(
    work: Callable[[Any], Iterator[int]], parts: Sequence[Any], *, on_piece: Callable[[int], None]
) -> None:
    """``work(part)`` for each part, in a process of its own.

    All processes are ended before this returns, whatever happened.

    Args:
        work: A function or `functools.partial` that pickles; yields the number of every piece.
        parts: What each process gets.
        on_piece: Called in this process with these numbers, as they come.

    Raises:
        InputError: If a worker raised it; the sentence is the worker's.
        PeerError: If a worker failed for another reason, or was killed.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    said: Any = context.Queue()
    workers = [context.Process(target=_run, args=(work, part, said), daemon=True) for part in parts]
    try:
        _start(workers)
        left = len(workers)
        while left:
            try:
                kind, value = said.get(timeout=_LOOK_S)
            except queue.Empty:
                _check_alive(workers)
                continue
            if kind == "piece":
                on_piece(value)
            elif kind == "done":
                left -= 1
            else:
                raise (InputError if kind == "input" else PeerError)(value)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()
        said.close()
        said.join_thread()


def _start(workers: Sequence[BaseProcess]) -> None:
    """With SIGINT blocked: a Ctrl-C is for this process alone, which ends them."""
    resource_tracker.ensure_running()  # it unblocks the signal when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_alive(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        if worker.exitcode:  # 0 is an end whose last word is still under way
            raise PeerError(
                f"a worker process ended with code {worker.exitcode}, as when memory runs out: "
                f"use fewer processes"
            )


def _run(work: Callable[[Any], Iterator[int]], part: Any, said: Any) -> None:
    try:
        for piece in work(part):
            said.put(("piece", piece))
        said.put(("done", None))
    except InputError as error:
        said.put(("input", str(error)))
    except Exception as error:
        said.put(("failed", f"a worker process failed: {type(error).__name__}: {error}"))
