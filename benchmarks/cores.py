"""Cores of its own for every rank of a host, for either contestant of a race.

Left to the system, ranks that share cores are moved about: three on one leave one that runs ahead,
and all wait for the slowest (docs/pipeline.md has the figures). Only the thread that computes is
bound; threads that communicate, started before, go where there is room. A benchmark may do so to
its own processes; a library may not, since what its user starts later would be bound as well.
"""

import argparse
import os
from collections.abc import Collection
from typing import Any

__all__ = ["add_own_cores_flag", "bind_to_own_cores", "share"]


def add_own_cores_flag(parser: argparse.ArgumentParser) -> None:
    """``--own-cores``, refused where there are no ranks of a host, or no way to bind them."""
    parser.add_argument(
        "--own-cores", action=_OwnCores, nargs=0, default=False, help="for every rank of a host"
    )


class _OwnCores(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, args: Any, *_: object) -> None:
        if not hasattr(os, "sched_setaffinity"):
            parser.error("--own-cores: this system cannot bind a thread to cores")
        if "LOCAL_RANK" not in os.environ:
            parser.error("--own-cores divides a host's cores among torchrun's ranks: use torchrun")
        setattr(args, self.dest, True)


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
