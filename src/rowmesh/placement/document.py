"""plan.json: the written form of a plan.

Compatibility rule: a reader accepts exactly its own ``version``; fields it does not know are
errors, so that a newer plan is never half understood. A new optional field with a default
keeps the version; any other change raises it, and this module then converts the older one.
"""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from rowmesh.errors import PlanError, shown
from rowmesh.files import parse_json, read_text, write_whole
from rowmesh.placement.hot import load_ids, save_ids
from rowmesh.placement.plan import PLAN_VERSION, Plan, TablePlan
from rowmesh.typed import build

__all__ = ["load_plan", "plan_from_json", "plan_to_json", "save_plan"]

_DERIVED = {"fingerprint", "exactness"}  # written for readers, checked on the way in


def plan_to_json(plan: Plan) -> str:
    """The plan as indented JSON, with its exactness and topology fingerprint spelt out."""
    document = dataclasses.asdict(plan, dict_factory=_without_ids)
    document |= {"fingerprint": plan.fingerprint, "exactness": plan.exactness.value}
    return json.dumps(document, indent=2) + "\n"


def _without_ids(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if key != "ids"}


def plan_from_json(text: str) -> Plan:
    """The plan that `plan_to_json` wrote, validated; hot sets come without their ids.

    Raises:
        PlanError: If the text is not JSON, a field is unknown, missing or of the wrong type, a
            rule is broken, or the written exactness or fingerprint does not fit the rest.
    """
    document = parse_json(text, where="the plan", fault=PlanError)
    if not isinstance(document, dict):
        raise PlanError(f"the plan must be a JSON object, got {type(document).__name__}")
    if document.get("version") != PLAN_VERSION:
        raise PlanError(
            f"plan version {shown(document.get('version'))} is not {PLAN_VERSION}, the one known "
            f"here"
        )
    written = {key: document.pop(key) for key in _DERIVED & document.keys()}
    plan = typing.cast(Plan, build(Plan, document, "plan", fault=PlanError)).validate()
    for key, value in written.items():
        found = str(getattr(plan, key))
        if value != found:
            raise PlanError(f"the plan says {key} {shown(value)}, but its settings give {found!r}")
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, and the ids of its hot sets beside it; a reader never sees half of it."""
    for table in plan.tables:
        for _, rows in table.hot:
            save_ids(rows, Path(path).parent, where=f"table {table.name!r}")
    write_whole(path, plan_to_json(plan))


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, and the ids of its hot sets from the files beside it.

    Raises:
        PlanError: Names the file and what is wrong with it.
    """
    text = read_text(path, what="the plan", fault=PlanError)
    try:
        plan = plan_from_json(text)
        tables = [_with_ids(table, Path(path).parent) for table in plan.tables]
        return dataclasses.replace(plan, tables=tuple(tables)).validate()
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _with_ids(table: TablePlan, folder: Path) -> TablePlan:
    tiers = [
        tier
        if tier.rows == "rest"
        else dataclasses.replace(
            tier, rows=load_ids(tier.rows, folder, where=f"table {table.name!r}")
        )
        for tier in table.tiers
    ]
    return dataclasses.replace(table, tiers=tuple(tiers)) if table.hot else table
