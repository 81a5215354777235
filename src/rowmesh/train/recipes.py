"""Recipes: files that give a `RunConfig`, and its written form.

A recipe is a TOML file, whose tables are the parts of `RunConfig`; a Python file with a function
``recipe() -> RunConfig``; or the config.json of an earlier run. What a file does not say keeps
its default.

Only a Python recipe that somebody names runs code; a document that names one does not.
"""

import dataclasses
import importlib.util
import json
import sys
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
from rowmesh.errors import InputError, did_you_mean, shown
from rowmesh.files import parse_json, parse_toml, read_text
from rowmesh.train.choices import check_choices, settle_choices
from rowmesh.train.config import RunConfig
from rowmesh.train.planning import PlanConfig
from rowmesh.typed import Text, build, overlay

__all__ = [
    "config_to_json",
    "find_recipe",
    "load_plan_settings",
    "load_recipe",
    "parse_overrides",
]

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


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, data_from: str | None = None
) -> RunConfig:
    """The run that a recipe and ``key=value`` overrides describe.

    What an override chooses beats what the recipe chose instead, as steps the epochs.

    Args:
        path: A file, or the name of a recipe that comes with rowmesh.
        overrides: As ``training.steps=100``: keys are fields of `RunConfig` and its parts, values
            are TOML (``[64, 32]``, ``true``, ``1e-3``), ``none``, or plain words for strings.
        data_from: The Python recipe that makes the data, if ``path`` is the config.json of a run
            that took its data from one; it is run.

    Raises:
        InputError: If the file cannot be read, a key is unknown or a value not of its type, two
            settings exclude each other, or the data comes from a recipe and it is not given.
    """
    path = find_recipe(str(path))
    given = _parse_pairs(overrides)
    try:
        if path.suffix == ".py":
            base = _run_python(path)
            config = _apply(base, _nested(settle_choices(base, given)))
        else:
            document = _read_document(path)
            changes = _nested(settle_choices(document, given))
            if "data" in document:
                document["data"] = _data_of(document["data"], path, data_from)
            config = _apply(RunConfig(), _merge(document, changes))
    except InputError as error:
        raise InputError(f"recipe {path}: {error}") from None
    return dataclasses.replace(config, recipe=config.recipe or str(path.resolve()))


def load_plan_settings(path: str | Path) -> PlanConfig:
    """The part ``plan`` of the config.json of a run; nothing else of it is read."""
    part = _read_document(Path(path)).get("plan", {})
    found: PlanConfig = overlay(PlanConfig(), part, "plan")
    return found


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["a.b=1"]`` as ``{"a": {"b": Text("1")}}``.

    Raises:
        InputError: If one is not ``key=value``, or names a part and a field of it.
    """
    return _nested(_parse_pairs(overrides))


def _parse_pairs(overrides: Sequence[str]) -> dict[str, Text]:
    found = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{item!r} is not key=value, as in training.steps=100")
        found[key.strip()] = Text(text.strip())
    return found


def _nested(given: Mapping[str, Text]) -> dict[str, Any]:
    """Dotted keys as objects in objects."""
    found: dict[str, Any] = {}
    for key, text in given.items():
        *parts, last = key.split(".")
        place: Any = found
        for part in parts:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or isinstance(place.get(last), dict):
            raise InputError(f"'{key}={text.text}' does not go with the other values set")
        place[last] = text
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
        data = {"kind": _FROM_RECIPE, "file": config.recipe, "settings": _plain_words(config.data)}
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


def _plain_words(data: Source) -> dict[str, Any]:
    """Those fields of a dataclass that are one word or number; `--set` may have changed them."""
    plain = _plain(data)
    fields = plain if isinstance(plain, dict) else {}
    return {k: v for k, v in fields.items() if isinstance(v, str | int | float | None)}


def _read_document(path: Path) -> dict[str, Any]:
    is_json = path.suffix == ".json"
    try:
        document = (parse_json if is_json else parse_toml)(read_text(path), where="it")
    except InputError as error:
        raise InputError(f"cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"must be an object, got {type(document).__name__}")
    for part in ("data", "plan"):
        if not isinstance(document.get(part, {}), dict):
            raise InputError(f"{part} must be a table of settings, got {shown(document[part])}")
    if not is_json:  # config.json says all, also what does not count
        check_choices(document)
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


def _data_of(data: dict[str, Any], path: Path, recipe: str | None) -> Any:
    """The data that a stored run took from the Python recipe ``recipe``; any other as it is."""
    if data.get("kind") != _FROM_RECIPE:
        if recipe is not None:
            raise InputError(f"its data comes from no Python recipe: leave out {recipe}")
        return data
    file = str(data.get("file"))
    if recipe is None:
        raise InputError(
            f"its data comes from the Python recipe {file}, and only a recipe that is named runs "
            f"code: give {file} in its place, or, to resume, rowmesh train {file} --folder "
            f"{path.parent} --resume"
        )
    made = _run_python(_find_python(recipe)).data
    then, now = data.get("settings", {}), _plain_words(made)
    if not isinstance(then, dict):
        raise InputError(f"data.settings must be an object, got {shown(then)}")
    changed = {key: value for key, value in then.items() if now.get(key, value) != value}
    return overlay(made, changed, "data") if changed else made


def _find_python(name: str) -> Path:
    """`find_recipe`, if it is one in Python.

    Raises:
        InputError: If it is not.
    """
    path = find_recipe(name)
    if path.suffix != ".py":
        raise InputError(f"{name} is no Python recipe, from which the data of this run comes")
    return path


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
    if kind is not None and (not isinstance(kind, str) or kind not in _SOURCES):
        raise InputError(f"unknown data.kind {shown(kind)}{did_you_mean(shown(kind), _SOURCES)}")
    if kind is not None and type(base) is not _SOURCES[kind]:
        made: Source = build(_SOURCES[kind], fields, "data")
        return made
    if fields and not dataclasses.is_dataclass(base):
        raise InputError(f"{type(base).__name__} of this recipe has no settings: change the recipe")
    changed: Source = overlay(base, fields, "data") if fields else base
    return changed
