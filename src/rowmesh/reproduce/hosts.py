"""Ranks of an experiment on emulated hosts, and what they print."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rowmesh.errors import InputError, LabError
from rowmesh.lab import Lab

__all__ = ["measure_on_hosts", "parse_shape", "run_on_hosts"]

_LONGEST_S = 3600.0  # of one shape at one rate


def parse_shape(word: str) -> tuple[int, int]:
    """``2x3`` as 2 hosts and 3 ranks on each.

    Raises:
        InputError: If it is not said so.
    """
    hosts, _, local = word.partition("x")
    if not (hosts.isdecimal() and local.isdecimal() and int(hosts) > 0 and int(local) > 0):
        raise InputError(f"shape {word!r}: say hosts x ranks, as 2x2")
    return int(hosts), int(local)


def run_on_hosts(
    words: list[str], *, hosts: int, local: int, rate: str
) -> Iterator[dict[str, Any]]:
    """Run ``python words`` as every rank; yields what they print as lines of JSON, as it comes.

    Raises:
        InputError: Where emulated hosts are not permitted.
        LabError: If a rank fails.
    """
    with Lab(hosts, rate=rate) as lab:
        run = lab.launch(words, ranks_per_host=local, timeout_s=_LONGEST_S)
        for line in run.lines:
            if line.startswith("{"):
                yield json.loads(line)
        if run.poll() != 0:
            raise LabError(f"{hosts}x{local} at {rate}: {run.failure()}")


def measure_on_hosts(
    module: str,
    asked: str,
    *,
    shapes: Iterable[tuple[int, int]],
    rates: Sequence[str],
    on_stage: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """What ``python -m module asked`` finds on every shape at every rate, with the rate.

    Raises:
        InputError: Where emulated hosts are not permitted.
        LabError: If the ranks of a shape fail.
    """
    for hosts, local in shapes:
        for rate in rates:
            on_stage(f"{hosts}x{local} at {rate}")
            for case in run_on_hosts(["-m", module, asked], hosts=hosts, local=local, rate=rate):
                yield case | {"rate": rate}
