"""How a rank ends: what ends it reaches the other ranks, and their reason reaches it."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rowmesh.comm.status import Bulletin
from rowmesh.errors import PeerError

__all__ = ["watch_end"]


def watch_end(
    bulletin: Bulletin,
    *,
    rank: int,
    fail: Callable[[BaseException], None],
    close: Callable[[], None],
    owns_default: bool,
) -> Callable[[], None]:
    """Publish what ends this process, and let torchrun's SIGTERM wait for the true reason.

    Processes forked from it inherit the hooks, and end without them.

    Args:
        bulletin: Where ranks say why they end.
        rank: This rank.
        fail: Called with an exception that nobody caught.
        close: Called at an end without one.
        owns_default: Whether to destroy the default process group then.

    Returns:
        What forgets ``fail`` and ``close``: the mesh was closed before the end.
    """
    previous, process = sys.excepthook, os.getpid()
    failed = threading.Event()
    calls = [(fail, close)]
    del fail, close
    handles_signal = (
        "TORCHELASTIC_RUN_ID" in os.environ
        and threading.current_thread() is threading.main_thread()
    )

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if os.getpid() == process:
            failed.set()
            for on_failure, _ in calls:
                on_failure(error)
        previous(kind, error, trace)

    def leave() -> None:
        if os.getpid() != process or failed.is_set():
            return
        for _, on_end in list(calls):
            on_end()
        if owns_default and dist.is_initialized():
            dist.destroy_process_group()

    def terminated(number: int, frame: Any) -> None:
        if os.getpid() != process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        sentence = bulletin.published()
        if sentence is not None:
            raise PeerError(sentence)
        timer = threading.Timer(2.0, _end_now, args=(bulletin, rank))
        timer.daemon = True
        timer.start()  # the next exchange finds the peer gone and says which; else end anyway

    def forget() -> None:
        calls.clear()
        if sys.excepthook is hook:
            sys.excepthook = previous
        if not owns_default:
            atexit.unregister(leave)

    sys.excepthook = hook
    atexit.register(leave)
    if handles_signal:
        signal.signal(signal.SIGTERM, terminated)
    return forget


def _end_now(bulletin: Bulletin, rank: int) -> None:
    """End a rank that the launcher stopped, unless it is about to say itself why it ends."""
    if bulletin.is_explaining:
        return
    sentence = bulletin.published() or "stopped by the launcher (SIGTERM)"
    print(f"rank {rank}: {sentence}", file=sys.stderr, flush=True)
    os._exit(143)
