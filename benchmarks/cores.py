"""Cores of its own for every rank of a host, for either contestant of a race.

Left to the system, ranks that share cores are moved about: three on one leave one that runs ahead,
and all wait for the slowest (docs/pipeline.md has the figures). Only the thread that computes is
bound; threads that communicate, started before, go where there is room. A benchmark may do so to
its own processes; a library may not, since what its user starts later would be bound as well.
"""

import os
from collections.abc import Collection

__all__ = ["bind_to_own_cores", "share"]


def share(cores: Collection[int], *, index: int, parts: int) -> list[int]:
    """Part ``index`` of ``cores`` in order, in ``parts`` that differ by at most one core.

    With fewer cores than parts every part has one, and no core many more parts than another.
    """
    ordered = sorted(cores)
    if len(ordered) < parts:
        return [ordered[index % len(ordered)]]
    return ordered[index * len(ordered) // parts : (index + 1) * len(ordered) // parts]


def bind_to_own_cores() -> None:
    """Bind this thread to its part of the cores, torchrun's ranks of this host having one each."""
    index, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    os.sched_setaffinity(0, share(os.sched_getaffinity(0), index=index, parts=count))
