"""Recipes: files that give a `RunConfig`, and its written form.

A recipe is a TOML file, whose tables are the parts of `RunConfig`; a Python file with a function
``recipe() -> RunConfig``; or the config.json of an earlier run. What a file does not say keeps
its default.
"""

import dataclasses
import importlib.util
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rowmesh.data import (
    ItemSequences,
    ParquetClicks,
    Source,
    SyntheticClicks,
    SyntheticSequences,
)
from rowmesh.errors import InputError, did_you_mean
from rowmesh.train.config import RunConfig
from rowmesh.typed import Text, build, overlay

__all__ = ["config_to_json", "find_recipe", "load_recipe", "parse_overrides"]

_SOURCES: Final[dict[str, type]] = {
    "parquet": ParquetClicks,
    "sequences": ItemSequences,
    "synthetic": SyntheticClicks,
    "synthetic_sequences": SyntheticSequences,
}
_FROM_RECIPE = "recipe"
_SHIPPED = Path(__file__).parent.parent / "recipes"
_SUFFIXES = (".toml", ".py", ".json")


def find_recipe(name: str) -> Path:
    """The file ``name``, or the recipe of that name that comes with rowmesh.

    Raises:
        InputError: If there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = {p.stem: p for p in sorted(_SHIPPED.glob("*")) if p.suffix in _SUFFIXES}
    if name in shipped:
        return shipped[name]
    raise InputError(f"no recipe {name!r}, neither a file nor a name{did_you_mean(name, shipped)}")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a recipe and ``key=value`` overrides describe.

    Args:
        path: A file, or the name of a recipe that comes with rowmesh.
        overrides: As ``training.steps=100``: keys are fields of `RunConfig` and its parts, values
            are TOML (``[64, 32]``, ``true``, ``1e-3``), ``none``, or plain words for strings.

    Raises:
        InputError: If the file cannot be read, a key is unknown or a value not of its type.
    """
    path = find_recipe(str(path))
    changes = parse_overrides(overrides)
    try:
        if path.suffix == ".py":
            config = _apply(_run_python(path), changes)
        else:
            document = _read_document(path)
            if not isinstance(document.get("data", {}), Mapping):
                raise InputError(f"data must be a table of settings, got {document['data']!r}")
            if "data" in document:
                document["data"] = _data_of_recipe(document["data"])
            config = _apply(RunConfig(), _merge(document, changes))
    except InputError as error:
        raise InputError(f"recipe {path}: {error}") from None
    return dataclasses.replace(config, recipe=config.recipe or str(path.resolve()))


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["a.b=1"]`` as ``{"a": {"b": Text("1")}}``.

    Raises:
        InputError: If one is not ``key=value``, or names a part and a field of it.
    """
    found: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{item!r} is not key=value, as in training.steps=100")
        *parts, last = key.strip().split(".")
        place: Any = found
        for part in parts:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or isinstance(place.get(last), dict):
            raise InputError(f"{item!r} does not go with the other values set")
        place[last] = Text(text.strip())
    return found


def config_to_json(config: RunConfig) -> str:
    """The resolved run; `load_recipe` gives an equal one from it.

    Data of a class that only a Python recipe knows is written as a reference to that recipe.
    """
    kinds = {kind: name for name, kind in _SOURCES.items()}
    document = {
        f.name: _plain(getattr(config, f.name))
        for f in dataclasses.fields(config)
        if f.name != "data"
    }
    if type(config.data) in kinds:
        data = {"kind": kinds[type(config.data)], **_plain(config.data)}
    else:
        data = {"kind": _FROM_RECIPE, "file": config.recipe}
    return json.dumps({"data": data, **document}, indent=2) + "\n"


def _plain(value: Any) -> Any:
    """Dataclasses as dicts of what their constructors take, enums as words."""
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def _read_document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"must be an object, got {type(document).__name__}")
    return document


def _run_python(path: Path) -> RunConfig:
    name = f"rowmesh_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look for their module
    try:
        spec.loader.exec_module(module)
        make = getattr(module, "recipe", None)
        if not callable(make):
            raise InputError("has no function recipe() that returns a RunConfig")
        config = make()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"failed with {type(error).__name__}: {error}") from error
    if not isinstance(config, RunConfig):
        raise InputError(f"recipe() must return a RunConfig, got {type(config).__name__}")
    return config


def _data_of_recipe(data: Any) -> Any:
    """The data that a stored run took from a Python recipe; anything else as it is."""
    if not isinstance(data, dict) or data.get("kind") != _FROM_RECIPE:
        return data
    file = Path(str(data.get("file")))
    if not file.is_file():
        raise InputError(f"its data comes from the recipe {file}, which is not there any more")
    return _run_python(file).data


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, object by object; a source that is made already takes them."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = _merge(old, value)
        elif isinstance(value, dict) and dataclasses.is_dataclass(old):
            merged[key] = overlay(old, value, key)
        else:
            merged[key] = value
    return merged


def _apply(base: RunConfig, document: dict[str, Any]) -> RunConfig:
    document = dict(document)
    data = document.pop("data", {})
    config: RunConfig = overlay(base, document, "")
    if isinstance(data, dict):
        data = _make_source(base.data, data)
    elif not hasattr(data, "batches"):
        raise InputError(f"data must be an object, got {data!r}")
    return dataclasses.replace(config, data=data)


def _make_source(base: Source, table: dict[str, Any]) -> Source:
    """``base`` with the fields of ``table``, or a new source if that names another kind."""
    fields = dict(table)
    kind = fields.pop("kind", None)
    kind = kind.text if isinstance(kind, Text) else kind
    if kind is not None and kind not in _SOURCES:
        raise InputError(f"unknown data.kind {kind!r}{did_you_mean(str(kind), _SOURCES)}")
    if kind is not None and type(base) is not _SOURCES[kind]:
        made: Source = build(_SOURCES[kind], fields, "data")
        return made
    if fields and not dataclasses.is_dataclass(base):
        raise InputError(f"{type(base).__name__} of this recipe has no settings: change the recipe")
    changed: Source = overlay(base, fields, "data") if fields else base
    return changed
