"""Results of shapes on disk: a long race may be cut into sittings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rowmesh.errors import InputError

from .shapes import Shape

__all__ = ["is_stored", "store", "stored_files"]


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
    """Whether there is a result of this code and these settings; a refusal is none.

    Raises:
        InputError: If there is one of other code or settings.
    """
    path = out / f"{shape.name}.json"
    if not path.exists():
        return False
    stored = json.loads(path.read_text())
    for key in ("code", "settings"):
        was, now = stored["session"][key], session[key]
        if was != now and "refused" not in stored:
            raise InputError(
                f"{path} is of other {key} ({was}, now {now}; commit "
                f"{stored['session']['commit']}): give --again, or another --out"
            )
    return "refused" not in stored
