"""Planners: pure functions from tables, topology and statistics to a `Plan`."""

from rowmesh.planners.auto import blank_table, blank_tables, make_plan, plan_tables
from rowmesh.planners.constraints import Constraints, Pin, parse_constraints

__all__ = [
    "Constraints",
    "Pin",
    "blank_table",
    "blank_tables",
    "make_plan",
    "parse_constraints",
    "plan_tables",
]
