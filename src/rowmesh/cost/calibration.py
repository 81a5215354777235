"""`Calibration`: the measured speed of a cluster, and its written form, topology.json.

Compatibility rule: a reader accepts exactly its own ``version``; unknown fields are errors. A new
optional field with a default keeps the version.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from rowmesh.cost.rates import Rates
from rowmesh.errors import InputError, shown
from rowmesh.files import read_json, write_whole
from rowmesh.topology import Topology
from rowmesh.typed import build

__all__ = ["Calibration", "load_calibration", "save_calibration"]

_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What `rowmesh calibrate` found out about a cluster: the content of topology.json."""

    topology: Topology
    rates: Rates
    machine: Mapping[str, str] = field(default_factory=dict)
    version: int = _VERSION


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write topology.json; a reader never sees half of it."""
    write_whole(path, json.dumps(dataclasses.asdict(calibration), indent=2) + "\n")


def load_calibration(path: str | Path, *, topology: Topology | None = None) -> Calibration:
    """Read topology.json.

    Args:
        path: The file.
        topology: Hosts and ranks per host that it must be of, if given.

    Raises:
        InputError: Names the file and what is wrong with it.
    """
    document = read_json(path)
    version = document.get("version") if isinstance(document, dict) else None
    if version != _VERSION:
        raise InputError(
            f"{path}: version {shown(version)} is not {_VERSION}: make it anew with rowmesh "
            f"calibrate"
        )
    try:
        found = cast(Calibration, build(Calibration, document, "topology.json"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if topology is not None and found.topology.fingerprint() != topology.fingerprint():
        raise InputError(
            f"{path} is of {found.topology.hosts} hosts x {found.topology.local} ranks, not of "
            f"{topology.hosts} x {topology.local}: run rowmesh calibrate on those, or leave it out"
        )
    return found
