"""Signals that stop a program: SIGINT (Ctrl-C), SIGTERM and SIGHUP (a terminal that closes).

Imported before all that takes long, so that `rowmesh` has an answer to Ctrl-C from the start.
"""

import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "SIGNALS", "handle", "handled", "ignore", "interrupt"]

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle(handler: Callable[[int, FrameType | None], object]) -> dict[int, Any]:
    """From now on ``handler`` gets SIGNALS; outside the main thread nothing changes.

    What is ignored, as SIGHUP by nohup, stays so; but not SIGINT, which a shell script ignores
    for all that it starts with &.

    Returns:
        The handlers of before.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    mine = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in mine}


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside, `handle`."""
    before = handle(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def ignore() -> None:
    """From now on SIGNALS do nothing: this process is about to end anyway."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A handler: raises KeyboardInterrupt with the signal's name."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """A handler for when nothing is under way that wants an end of its own."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(Exception):  # stdout may be written to right now, or be closed
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, f"rowmesh: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(INTERRUPTED)


def _is_program() -> bool:
    """Whether this process is the program `rowmesh`, not one that imports the package."""
    words = sys.orig_argv
    is_script = len(words) > 1 and Path(words[1]).name == "rowmesh"
    return is_script or ("-m", "rowmesh.cli") in itertools.pairwise(words)


if _is_program():
    handle(_end)
    atexit.register(ignore)  # the first, so called last: the interpreter then drops all handlers
