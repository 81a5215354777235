"""Results of shapes on disk: a long race may be cut into sittings."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rowmesh.errors import InputError

from .shapes import Shape

__all__ = ["check_stored", "is_stored", "store", "stored_files"]


def store(out: Path, shape: Shape, result: dict[str, Any], *, session: dict[str, Any]) -> None:
    """``OUT/NAME.json``, whole or not at all."""
    order = [shape.hosts * shape.local, shape.hosts, -(shape.bytes_per_s or 0), shape.pooling]
    whole = {"order": [*order, shape.alpha], "shape": dataclasses.asdict(shape), **result}
    aside = out / f"{shape.name}.part"
    aside.write_text(json.dumps(whole | {"session": session}))
    aside.rename(out / f"{shape.name}.json")


def stored_files(out: Path) -> list[Path]:
    """One a shape, in the order in which shapes were first stored."""
    return sorted(out.glob("*.json"), key=lambda path: json.loads(path.read_text())["order"])


def is_stored(out: Path, shape: Shape, session: dict[str, Any]) -> bool:
    """Whether there is a result of this code, settings and machine; a refusal is none.

    Raises:
        InputError: If there is one of others.
    """
    path = out / f"{shape.name}.json"
    return path.exists() and _is_of(path, session)


def check_stored(out: Path, session: dict[str, Any], *, todo: Iterable[Shape]) -> None:
    """A report has one header: all it shows must be of one code, its settings and its machine.

    Args:
        out: Where the results are.
        session: What is about to run, or would.
        todo: Shapes whose results are to be replaced.

    Raises:
        InputError: Naming a result of another code, settings or machine.
    """
    replaced = {shape.name for shape in todo}
    for path in stored_files(out):
        if path.stem not in replaced:
            _is_of(path, session)


def _is_of(path: Path, session: dict[str, Any]) -> bool:
    stored = json.loads(path.read_text())
    if "refused" in stored:
        return False
    for key in ("code", "settings", "machine"):
        was, now = stored["session"][key], session[key]
        if was != now:
            raise InputError(
                f"{path} is of other {key} ({was}, now {now}; commit "
                f"{stored['session']['commit']}): race its shape with --again, or give another "
                f"--out"
            )
    return True
