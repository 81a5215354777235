"""The plan: where every row of every table lives, as a frozen value with a JSON form."""

from rowmesh.placement.document import load_plan, plan_from_json, plan_to_json, save_plan
from rowmesh.placement.groups import Groups
from rowmesh.placement.homes import Homes
from rowmesh.placement.hot import hot_ids, make_hot_set
from rowmesh.placement.plan import (
    PLAN_VERSION,
    Codec,
    Copies,
    Exactness,
    Exchange,
    HotSet,
    MeshShape,
    Plan,
    Predicted,
    Split,
    Sync,
    TablePlan,
    Tier,
)
from rowmesh.placement.why import HotChoice, Why

__all__ = [
    "PLAN_VERSION",
    "Codec",
    "Copies",
    "Exactness",
    "Exchange",
    "Groups",
    "Homes",
    "HotChoice",
    "HotSet",
    "MeshShape",
    "Plan",
    "Predicted",
    "Split",
    "Sync",
    "TablePlan",
    "Tier",
    "Why",
    "hot_ids",
    "load_plan",
    "make_hot_set",
    "plan_from_json",
    "plan_to_json",
    "save_plan",
]
