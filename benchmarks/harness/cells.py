"""Results on disk, a file a cell: what was stopped goes on where it was."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rowmesh.errors import InputError
from rowmesh.files import write_whole

from .machine import describe_code, describe_run

__all__ = ["Cells", "find", "store"]


def store(path: Path, found: Any, *, asked: Mapping[str, Any], about: Any = None) -> None:
    """A JSON file, whole or not at all: what was found, beside all that it depends on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"asked": asked, "about": about, "found": found}) + "\n")


def find(path: Path, asked: Mapping[str, Any]) -> Any:
    """What is stored there of just that; None if it is of another kind, half written or absent."""
    try:
        stored = json.loads(path.read_text())
        return stored["found"] if stored["asked"] == asked else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one report, which has one header: all are of one code, settings and machine.

    Args:
        folder: Of the files; made when the first is stored.
        asked: What all of them depend on.
        about: What the report says of the run besides.
    """

    folder: Path
    asked: Mapping[str, Any]
    about: Mapping[str, Any]

    @classmethod
    def of(cls, out: Path, settings: Mapping[str, Any], **about: Any) -> "Cells":
        """Of this code on this machine with such settings, in the folder ``out``."""
        plain = json.loads(json.dumps(settings, default=str))
        return cls(out, {**describe_code(), "settings": plain}, describe_run() | about)

    def find(self, name: str) -> Any:
        """What is stored under a name; None if nothing, or what was refused: it is made again.

        Raises:
            InputError: If it is of another code, other settings or another machine.
        """
        path = self.folder / f"{name}.json"
        return self._read(path)["found"] if path.exists() and self._is_same(path) else None

    def check(self, *, but: Collection[str] = ()) -> None:
        """All that is stored will be reported.

        Args:
            but: Names of cells that are to be replaced.

        Raises:
            InputError: Naming a cell of another code, settings or machine.
        """
        for path in self._paths():
            if path.stem not in but:
                self._is_same(path)

    def store(self, name: str, found: Any) -> None:
        """A cell, in the place of an earlier one of that name."""
        store(self.folder / f"{name}.json", found, asked=self.asked, about=self.about)

    def every(self) -> list[dict[str, Any]]:
        """All that is stored: ``asked``, ``about`` and ``found`` of each."""
        return [self._read(path) for path in self._paths()]

    def header(self) -> str:
        """When, of which commit and where the stored cells were made, and their settings."""
        abouts = [cell["about"] for cell in self.every()] or [self.about]
        dates = sorted({about["date"] for about in abouts})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        commits = ", ".join(dict.fromkeys(str(about["commit"]) for about in abouts))
        flags = " ".join(f"{key}={value}" for key, value in self.asked["settings"].items())
        return f"{when}; commit {commits}; {self.asked['machine']}; {flags}."

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"))

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            stored: dict[str, Any] = json.loads(path.read_text())
            return {key: stored[key] for key in ("asked", "about", "found")}
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} is no result of this kind: give another --out") from None

    def _is_same(self, path: Path) -> bool:
        stored = self._read(path)
        if "refused" in stored["found"]:
            return False
        for key, now in self.asked.items():
            was = stored["asked"].get(key)
            if was != now:
                raise InputError(
                    f"{path} is of other {key} ({was}, now {now}; commit "
                    f"{stored['about']['commit']}): run it with --again, or give another --out"
                )
        return True
