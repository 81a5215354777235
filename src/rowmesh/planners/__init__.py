"""Planners: pure functions from tables, topology and statistics to a `Plan`."""

from rowmesh.planners.auto import blank_table, blank_tables, make_plan, plan_tables
from rowmesh.planners.constraints import Constraints, Pin, parse_constraints
from rowmesh.planners.tiers import HotRows, parse_tiers

__all__ = [
    "Constraints",
    "HotRows",
    "Pin",
    "blank_table",
    "blank_tables",
    "make_plan",
    "parse_constraints",
    "parse_tiers",
    "plan_tables",
]
