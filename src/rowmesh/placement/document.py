"""plan.json: the written form of a plan.

Compatibility rule: a reader accepts exactly its own ``version``; fields it does not know are
errors, so that a newer plan is never half understood. A new optional field with a default
keeps the version; any other change raises it, and this module then converts the older one.
"""

import dataclasses
import json
import typing
from pathlib import Path

from rowmesh.errors import PlanError
from rowmesh.files import write_whole
from rowmesh.placement.plan import PLAN_VERSION, Plan
from rowmesh.typed import build

__all__ = ["load_plan", "plan_from_json", "plan_to_json", "save_plan"]

_DERIVED = {"fingerprint", "exactness"}  # written for readers, checked on the way in


def plan_to_json(plan: Plan) -> str:
    """The plan as indented JSON, with its exactness and topology fingerprint spelt out."""
    document = dataclasses.asdict(plan)
    document |= {"fingerprint": plan.fingerprint, "exactness": plan.exactness.value}
    return json.dumps(document, indent=2) + "\n"


def plan_from_json(text: str) -> Plan:
    """The plan that `plan_to_json` wrote, validated.

    Raises:
        PlanError: If the text is not JSON, a field is unknown, missing or of the wrong type, a
            rule is broken, or the written exactness or fingerprint does not fit the rest.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"the plan is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise PlanError(f"the plan must be a JSON object, got {type(document).__name__}")
    if document.get("version") != PLAN_VERSION:
        raise PlanError(
            f"plan version {document.get('version')!r} is not {PLAN_VERSION}, the one known here"
        )
    written = {key: document.pop(key) for key in _DERIVED & document.keys()}
    plan = typing.cast(Plan, build(Plan, document, "plan", fault=PlanError)).validate()
    for key, value in written.items():
        if value != str(getattr(plan, key)):
            raise PlanError(
                f"the plan says {key} {value!r}, but its settings give {str(getattr(plan, key))!r}"
            )
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan; a reader never sees half of it."""
    write_whole(path, plan_to_json(plan))


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: Names the file and what is wrong with it.
    """
    try:
        return plan_from_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the plan {path}: {error}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
