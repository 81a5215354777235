"""Planners: pure functions from tables, topology and statistics to a `Plan`."""

from rowmesh.planners.auto import make_plan, plan_tables

__all__ = ["make_plan", "plan_tables"]
