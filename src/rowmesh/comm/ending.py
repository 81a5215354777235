"""How a rank ends: what ends it reaches the other ranks, and their reason reaches it."""

import atexit
import contextlib
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from rowmesh.comm.status import Bulletin
from rowmesh.errors import PeerError

__all__ = ["Listener", "cut_sockets", "open_sockets", "watch_end"]


class Listener:
    """A thread that looks for a peer's sentence while this rank may be waiting for another's.

    gloo's waits take no look at anything: a rank that waits for one who sleeps would not learn
    before he wakes that a third has failed.

    Args:
        bulletin: Where the sentence will be.
        cut: Called once it is there; ends this rank's waits.
    """

    def __init__(self, bulletin: Bulletin, cut: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._bulletin, self._cut = bulletin, cut
        threading.Thread(target=self._listen, name="rowmesh-listener", daemon=True).start()

    def _listen(self) -> None:
        if self._bulletin.await_failure(self._ended):
            self._cut()

    def end(self) -> None:
        """Listen no more."""
        self._ended.set()


def open_sockets() -> dict[int, int]:
    """Descriptors of this process's sockets, each with a number that no other socket gets."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the folder's own is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def cut_sockets(sockets: Mapping[int, int]) -> None:
    """End these connections, as the other side's death would, where they are still open."""
    now = open_sockets()
    for descriptor, number in sockets.items():
        if now.get(descriptor) == number:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as ours:
                ours.getpeername()  # raises for one that listens, which gloo needs
                ours.shutdown(socket.SHUT_RDWR)


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
