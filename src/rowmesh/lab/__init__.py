"""Emulated hosts on one machine, with real links of a chosen rate. See docs/lab.md."""

from rowmesh.lab.lab import Lab
from rowmesh.lab.network import HostBytes
from rowmesh.lab.permission import check_permitted
from rowmesh.lab.rates import format_rate, parse_rate
from rowmesh.lab.remains import Removed, clean, find_tags
from rowmesh.lab.run import Run

__all__ = [
    "HostBytes",
    "Lab",
    "Removed",
    "Run",
    "check_permitted",
    "clean",
    "find_tags",
    "format_rate",
    "parse_rate",
]
