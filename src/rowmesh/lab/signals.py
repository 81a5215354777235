"""Signals while a lab is open: they end the process by way of the teardown, and never inside it."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

__all__ = ["deferred_signals", "exit_on_signals", "restore_signals"]

_DEADLY = (signal.SIGTERM, signal.SIGHUP)  # end a Python process without any clean-up


def exit_on_signals() -> dict[int, Any]:
    """From now on SIGTERM and SIGHUP raise SystemExit(128 + n), unless they are handled already.

    Outside the main thread nothing changes.

    Returns:
        What `restore_signals` takes back.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    unhandled = [n for n in _DEADLY if signal.getsignal(n) is signal.SIG_DFL]
    return {number: signal.signal(number, _exit) for number in unhandled}


def restore_signals(before: dict[int, Any]) -> None:
    """Undo `exit_on_signals`, once; outside the main thread nothing changes."""
    if threading.current_thread() is threading.main_thread():
        while before:
            signal.signal(*before.popitem())


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that come inside take effect afterwards: a teardown is not left half-way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_DEADLY))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
