"""Ends processes that come and go: by signal, through descriptors that no other process can get."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator

from rowmesh.errors import LabError
from rowmesh.lab.tags import start_time

__all__ = ["end_processes"]

_KILL_S = 10.0


def end_processes(find: Callable[[], set[int]], *, grace_s: float) -> int:
    """End what ``find`` gives until it gives nothing: SIGTERM, ``grace_s``, then SIGKILL.

    Returns:
        How many processes were told to end.

    Raises:
        LabError: If some are left 10 s after the first SIGKILL.
    """
    told: set[tuple[int, int | None]] = set()
    if grace_s > 0:
        told |= _signal_all(find, signal.SIGTERM, wait_s=grace_s)
    deadline = time.monotonic() + _KILL_S
    while True:
        told |= _signal_all(find, signal.SIGKILL, wait_s=1.0)
        left = find()
        if not left:
            return len(told)
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(left)} do not end, even by SIGKILL")


def _signal_all(
    find: Callable[[], set[int]], number: signal.Signals, *, wait_s: float
) -> set[tuple[int, int | None]]:
    """Signal what ``find`` gives and wait for it to end; gives (pid, start time) of each."""
    with _descriptors(find()) as opened:
        still = find() & set(opened)  # a pid found again was not reused before it was opened
        told = {(pid, start_time(pid)) for pid in still}
        poll = select.poll()
        for pid in still:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(opened[pid], number)
            poll.register(opened[pid], select.POLLIN)
        waiting, deadline = len(still), time.monotonic() + wait_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                waiting -= 1
        return told


@contextlib.contextmanager
def _descriptors(pids: set[int]) -> Iterator[dict[int, int]]:
    opened: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                opened[pid] = os.pidfd_open(pid)
        yield opened
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
