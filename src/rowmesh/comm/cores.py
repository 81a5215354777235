"""Each rank's own cores: the ranks of a host divide them.

Left to the system, a rank waits now and then for a core that another has, though one is idle: it
comes late, and with it all that its peers wait for. Cores of their own keep ranks abreast
(docs/pipeline.md has the figures). Only the thread that computes is bound; communication threads
go where there is room.
"""

import os
import threading
from collections.abc import Collection, Sequence

import torch

__all__ = ["OwnCores", "allowed_cores", "share"]


def allowed_cores() -> frozenset[int]:
    """What this thread may run on; none where the system cannot bind threads."""
    has = hasattr(os, "sched_setaffinity")  # not macOS
    return frozenset(os.sched_getaffinity(0) if has else ())


def share(cores: Collection[int], *, index: int, parts: int) -> list[int]:
    """Part ``index`` of ``cores`` in order, in ``parts`` that differ by at most one core.

    With fewer cores than parts every part has one, and no core many more parts than another.
    """
    ordered = sorted(cores)
    if len(ordered) < parts:
        return [ordered[index % len(ordered)]]
    return ordered[index * len(ordered) // parts : (index + 1) * len(ordered) // parts]


class OwnCores:
    """The cores of the thread that makes this, which binds itself to them.

    Nothing is bound if a launcher has bound the ranks already (their cores differ), if torch would
    compute with more threads than the rank has cores, or if the system cannot bind threads.

    Args:
        index: Of this rank on its machine.
        cores: What each rank of the machine may run on.
    """

    def __init__(self, index: int, cores: Sequence[frozenset[int]]) -> None:
        self._all = cores[index]
        self._thread: int | None = None
        if len(set(cores)) > 1 or len(self._all) < 2:
            return
        mine = share(self._all, index=index, parts=len(cores))
        if torch.get_num_threads() <= len(mine):
            self._thread = threading.get_native_id()
            os.sched_setaffinity(self._thread, mine)

    def leave(self) -> None:
        """Let the calling thread, which the bound one started, run on all of them."""
        if self._thread is not None:
            os.sched_setaffinity(0, self._all)

    def release(self) -> None:
        """Let the bound thread run on all of them again."""
        if self._thread is not None:
            os.sched_setaffinity(self._thread, self._all)
            self._thread = None
