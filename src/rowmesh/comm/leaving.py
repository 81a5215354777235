"""A rank that ends: what it has sent must leave first, unless nobody receives it."""

import contextlib
import threading
from collections.abc import Callable, Sequence

__all__ = ["let_leave"]

_LEAVE_S = 0.02  # between two looks at whether a peer has left


def let_leave(
    sends: Sequence[tuple[int, Callable[[], object]]], has_left: Callable[[int], bool]
) -> None:
    """Wait for sends; not for those to ranks that have left, since nobody receives them.

    Args:
        sends: A peer, and what waits for a message to it.
        has_left: Whether a peer has.
    """
    waits: dict[int, list[Callable[[], object]]] = {}
    for peer, wait in sends:
        waits.setdefault(peer, []).append(wait)
    threads = {
        peer: threading.Thread(target=_call_all, args=(calls,), daemon=True)
        for peer, calls in waits.items()
    }
    for thread in threads.values():
        thread.start()
    for peer, thread in threads.items():
        while thread.is_alive() and not has_left(peer):
            thread.join(_LEAVE_S)


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    with contextlib.suppress(RuntimeError):  # it took too long, or the peer is gone
        for call in calls:
            call()
