"""Planners: pure functions from tables, topology and statistics to a `Plan`."""

from rowmesh.planners.auto import blank_table, blank_tables, make_plan, plan_tables
from rowmesh.planners.codecs import choose_codecs, parse_allow
from rowmesh.planners.constraints import Constraints, Pin, parse_constraints
from rowmesh.planners.depth import parse_depth
from rowmesh.planners.groups import list_meshes, parse_groups, parse_layout, parse_sync
from rowmesh.planners.merging import parse_merge
from rowmesh.planners.per_host import RowTiers
from rowmesh.planners.tiers import HotRows, choose_tiers, parse_tiers

__all__ = [
    "Constraints",
    "HotRows",
    "Pin",
    "RowTiers",
    "blank_table",
    "blank_tables",
    "choose_codecs",
    "choose_tiers",
    "list_meshes",
    "make_plan",
    "parse_allow",
    "parse_constraints",
    "parse_depth",
    "parse_groups",
    "parse_layout",
    "parse_merge",
    "parse_sync",
    "parse_tiers",
    "plan_tables",
]
