"""Values from documents: JSON, TOML or words of a command line, checked against type hints.

One implementation for plans and recipes: types built from dataclasses, enums, literals, tuples,
sequences, unions, numbers and strings.
"""

import collections.abc
import contextlib
import dataclasses
import types
import typing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rowmesh.errors import InputError, RowmeshError, did_you_mean, shown
from rowmesh.files import parse_toml

__all__ = ["Text", "build", "overlay"]

Fault = type[RowmeshError]


@dataclass(frozen=True, slots=True)
class Text:
    """A value as somebody typed it: its type is the field's, not the text's."""

    text: str

    def __repr__(self) -> str:
        return shown(self.text)


def build(kind: Any, value: Any, where: str, *, fault: Fault = InputError) -> Any:
    """``value`` as ``kind``; nothing is converted but an int to a float.

    A `Text` is read as TOML, as ``none`` or as itself, whichever ``kind`` takes first.

    Raises:
        fault: Names ``where``, the value and what is expected there.
    """
    if isinstance(value, Text):
        return _build_text(kind, value, where, fault)
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value, where, fault)
    if origin in (tuple, collections.abc.Sequence):
        return _build_list(kind, value, where, fault)
    if origin in (dict, collections.abc.Mapping):
        if not isinstance(value, dict):
            raise fault(f"{where} must be an object, got {shown(value)}")
        item = typing.get_args(kind)[1]
        return {k: build(item, v, f"{where}.{k}", fault=fault) for k, v in value.items()}
    if origin in (types.UnionType, typing.Union):
        return _build_union(kind, value, where, fault)
    if origin is typing.Literal or (isinstance(kind, type) and issubclass(kind, StrEnum)):
        return _build_word(kind, value, where, fault)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise fault(f"{where} is {shown(value)}, but must be below 2^63")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise fault(f"{where} must be {_expected(kind)}, got {shown(value)}")
    return value


def overlay(base: Any, changes: dict[str, Any], where: str, *, fault: Fault = InputError) -> Any:
    """The dataclass instance ``base`` with some fields built anew, all at once.

    An object for a field that holds a dataclass changes that dataclass in turn, so that what is
    not named keeps its value.

    Raises:
        fault: If a field is unknown or a value is not of its type.
    """
    hints, known = typing.get_type_hints(type(base)), _fields(type(base))
    made = {}
    for key, value in changes.items():
        place = f"{where}.{key}" if where else key
        if key not in known:
            raise fault(f"unknown key {shown(place)}{did_you_mean(key, known)}")
        old = getattr(base, key)
        if dataclasses.is_dataclass(old) and isinstance(value, dict):
            made[key] = overlay(old, value, place, fault=fault)
        else:
            made[key] = build(hints[key], value, place, fault=fault)
    return dataclasses.replace(base, **made)


def _fields(kind: Any) -> dict[str, Any]:
    """What a document may set of a dataclass."""
    return {f.name: f for f in dataclasses.fields(kind) if f.init}


def _build_text(kind: Any, value: Text, where: str, fault: Fault) -> Any:
    """The first reading of a typed word that fits, a string only where nothing else does."""
    readings: list[Any] = []
    if value.text.lower() == "none":
        readings.append(None)
    with contextlib.suppress(InputError):
        readings.append(parse_toml(f"value = {value.text}", where=where)["value"])
    readings.append(value.text)
    for reading in readings:
        with contextlib.suppress(fault):
            return build(kind, reading, where, fault=fault)
    return build(kind, readings[0], where, fault=fault)


def _build_list(kind: Any, value: Any, where: str, fault: Fault) -> tuple[Any, ...]:
    """A tuple of one type throughout, or, as in ``tuple[str, int]``, of one type a place."""
    if not isinstance(value, list):
        raise fault(f"{where} must be a list, got {shown(value)}")
    items = typing.get_args(kind)
    if typing.get_origin(kind) is not tuple or items[-1] is Ellipsis:
        items = items[:1] * len(value)
    if len(items) != len(value):
        raise fault(f"{where} must be a list of {len(items)}, got {shown(value)}")
    pairs = enumerate(zip(items, value, strict=True))
    return tuple(build(item, v, f"{where}[{i}]", fault=fault) for i, (item, v) in pairs)


def _build_word(kind: Any, value: Any, where: str, fault: Fault) -> Any:
    members: Any = kind if isinstance(kind, type) else typing.get_args(kind)
    known = list(members)
    if value not in known or (isinstance(value, bool) and bool not in map(type, known)):
        words = [str(word) for word in known]
        hint = did_you_mean(value if isinstance(value, str) else shown(value), words)
        raise fault(f"{where}: unknown value {shown(value)}{hint}")
    return kind(value) if isinstance(kind, type) else value


def _build_union(kind: Any, value: Any, where: str, fault: Fault) -> Any:
    """The option that takes ``value``; an object can only be the dataclass among them."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    optional = len(options) < len(typing.get_args(kind))
    if optional and (value is None or (value == "none" and str not in options)):
        return None  # TOML has no null
    if isinstance(value, dict):
        options = [o for o in options if dataclasses.is_dataclass(o)] or options
    for option in options[:-1]:
        with contextlib.suppress(fault):
            return build(option, value, where, fault=fault)
    return build(options[-1], value, where, fault=fault)


def _build_dataclass(kind: type, value: Any, where: str, fault: Fault) -> Any:
    if not isinstance(value, dict):
        raise fault(f"{where} must be an object, got {shown(value)}")
    hints, known = typing.get_type_hints(kind), _fields(kind)
    for key in value:
        if key not in known:
            raise fault(f"{where}: unknown field {shown(key)}{did_you_mean(key, known)}")
    missing = [
        name
        for name, f in known.items()
        if name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise fault(f"{where}: missing {', '.join(missing)}")
    made = {k: build(hints[k], v, f"{where}.{k}", fault=fault) for k, v in value.items()}
    return kind(**made)


def _expected(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
