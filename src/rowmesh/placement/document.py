"""plan.json: the written form of a plan.

Compatibility rule: a reader accepts exactly its own ``version``; fields it does not know are
errors, so that a newer plan is never half understood. A new optional field with a default
keeps the version; any other change raises it, and this module then converts the older one.
"""

import contextlib
import dataclasses
import json
import types
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

from rowmesh.errors import PlanError, did_you_mean
from rowmesh.placement.plan import PLAN_VERSION, Plan

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
    plan = typing.cast(Plan, _build(Plan, document, "plan")).validate()
    for key, value in written.items():
        if value != str(getattr(plan, key)):
            raise PlanError(
                f"the plan says {key} {value!r}, but its settings give {str(getattr(plan, key))!r}"
            )
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan; a reader never sees half of it."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(plan_to_json(plan))
    partial.replace(path)


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


def _build(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``, a type built from dataclasses, enums, literals, tuples, unions."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise PlanError(f"{where} must be a list, got {value!r}")
        item = typing.get_args(kind)[0]
        return tuple(_build(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            known = [str(a) for a in typing.get_args(kind)]
            raise PlanError(f"{where}: unknown value {value!r}{did_you_mean(str(value), known)}")
        return value
    if origin in (types.UnionType, typing.Union):
        return _build_union(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError:
            known = [str(member) for member in kind]
            raise PlanError(
                f"{where}: unknown value {value!r}{did_you_mean(str(value), known)}"
            ) from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise PlanError(f"{where} must be {kind.__name__}, got {value!r}")
    return value


def _build_union(kind: Any, value: Any, where: str) -> Any:
    """The option that takes ``value``; an object can only be the dataclass among them."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if value is None and len(options) < len(typing.get_args(kind)):
        return None
    if isinstance(value, dict):
        options = [o for o in options if dataclasses.is_dataclass(o)] or options
    for option in options[:-1]:
        with contextlib.suppress(PlanError):
            return _build(option, value, where)
    return _build(options[-1], value, where)


def _build_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise PlanError(f"{where} must be an object, got {value!r}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise PlanError(f"{where}: unknown field {key!r}{did_you_mean(key, fields)}")
    missing = [
        name
        for name, f in fields.items()
        if name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise PlanError(f"{where}: missing {', '.join(missing)}")
    return kind(**{k: _build(hints[k], v, f"{where}.{k}") for k, v in value.items()})
