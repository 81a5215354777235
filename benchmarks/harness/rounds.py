"""One round of steps, measured alike in both contestants. Standard library only."""

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["nic_bytes", "timed"]


def timed(
    step: Callable[[], Any],
    *,
    count: int,
    barrier: Callable[[], Any],
    settle: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Run ``count`` steps; ``ms`` of each here, and ``nic``: this host's bytes [sent, received].

    The counters are read between two barriers, before any rank of the host starts, and after a
    barrier, when all has arrived. The last step ends with that barrier, so that what any rank had
    left to do is in its time. What has been begun for the step after it, or what may follow under
    that, is waited for by ``settle``, which is in no step's time: a round's bytes then are those of
    as many steps. (The first step, whose time counts nowhere, has nothing of one before it.)

    Collective:
        All ranks.
    """
    barrier()
    before = nic_bytes()
    barrier()
    marks = [time.perf_counter()]
    for _ in range(count):
        step()
        marks.append(time.perf_counter())
    barrier()
    marks[-1] = time.perf_counter()
    settle()
    barrier()
    after = nic_bytes()
    moved = None if before is None or after is None else [after[i] - before[i] for i in (0, 1)]
    return {"ms": [1e3 * (b - a) for a, b in itertools.pairwise(marks)], "nic": moved}


def nic_bytes() -> tuple[int, int] | None:
    """Bytes sent and received by the interface that TB_IFNAME names; None without it."""
    name = os.environ.get("TB_IFNAME")
    if not name:
        return None
    folder = Path(f"/sys/class/net/{name}/statistics")
    sent, received = (int((folder / f"{d}_bytes").read_text()) for d in ("tx", "rx"))
    return sent, received
