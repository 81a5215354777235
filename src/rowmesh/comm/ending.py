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
) -> None:
    """Publish what ends this process, and let torchrun's SIGTERM wait for the true reason.

    Args:
        bulletin: Where ranks say why they end.
        rank: This rank.
        fail: Called with an exception that nobody caught.
        close: Called at an end without one.
    """
    previous = sys.excepthook
    failed = threading.Event()

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        failed.set()
        fail(error)
        previous(kind, error, trace)

    def leave() -> None:
        if not failed.is_set():
            close()
        if dist.is_initialized() and not failed.is_set():
            dist.destroy_process_group()

    def terminated(number: int, frame: Any) -> None:
        sentence = bulletin.published()
        if sentence is not None:
            raise PeerError(sentence)
        timer = threading.Timer(2.0, _end_now, args=(bulletin, rank))
        timer.daemon = True
        timer.start()  # the next exchange finds the peer gone and says which; else end anyway

    sys.excepthook = hook
    atexit.register(leave)
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGTERM, terminated)


def _end_now(bulletin: Bulletin, rank: int) -> None:
    """End a rank that the launcher stopped, unless it is about to say itself why it ends."""
    if bulletin.is_explaining:
        return
    sentence = bulletin.published() or "stopped by the launcher (SIGTERM)"
    print(f"rank {rank}: {sentence}", file=sys.stderr, flush=True)
    os._exit(143)
