"""Ranks of an experiment on emulated hosts, and what they print."""

import json
from collections.abc import Iterator
from typing import Any

from rowmesh.errors import LabError
from rowmesh.lab import Lab

__all__ = ["run_on_hosts"]

_LONGEST_S = 3600.0  # of one shape at one rate


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
