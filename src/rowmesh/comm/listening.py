"""Hears that a peer failed while this rank waits for another, and ends the wait."""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping

from rowmesh.comm.status import Bulletin

__all__ = ["Listener", "cut_sockets", "open_sockets"]


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
