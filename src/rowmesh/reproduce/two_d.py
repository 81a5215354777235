"""2D sparse parallelism again: what shard groups do to quality, and what they cost."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rowmesh.errors import InputError
from rowmesh.files import check_target, write_whole
from rowmesh.reproduce.two_d_quality import measure_runs, prove_gradients, runs_of
from rowmesh.reproduce.two_d_report import render_quality, summarise_quality
from rowmesh.reproduce.two_d_sets import Quality

__all__ = ["PARTS", "open_folder", "run_quality", "write_report"]

PARTS = ("quality",)
_TITLE = "# 2D sparse parallelism: groups of ranks, each with a copy of the tables"


def open_folder(out: Path) -> None:
    """Make the folder of a reproduction.

    Raises:
        InputError: If it cannot be made or takes no files.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out}: {error.strerror}; name another") from None
    for name in ("report.md", "report.json"):
        check_target(out / name, what="the report", way_out="give --out another folder")


def run_quality(
    what: Quality, out: Path, *, workers: int, on_run: Callable[[int, int, str], None]
) -> dict[str, Any]:
    """The quality part: all runs, the proof of mode gradients, verdicts.

    Runs are stored in ``out/runs``, so that a reproduction that was stopped goes on there.

    Raises:
        InputError: If there is nothing to train: clicks alone were asked for, and are not there.
    """
    asked = runs_of(what)
    if not asked:
        raise InputError(f"sets {', '.join(what.sets)}: no data found at {what.clicks}")
    runs = measure_runs(asked, out / "runs", workers=workers, on_run=on_run)
    proof = prove_gradients(what) if "planted" in what.sets else None
    return {"verdicts": summarise_quality(runs), "gradients": proof, "runs": runs}


def write_report(out: Path, found: Mapping[str, Any]) -> None:
    """``report.json`` and ``report.md``: a section for every part of `PARTS` that was measured.

    Parts that are not in ``found`` stay as an earlier reproduction into the folder left them.
    """
    found = _earlier(out / "report.json") | dict(found)
    sections = [_TITLE, ""]
    if "quality" in found:
        quality = found["quality"]
        sections.append(render_quality(quality["runs"], quality["gradients"]))
    write_whole(out / "report.json", json.dumps(found, indent=1) + "\n")
    write_whole(out / "report.md", "\n".join(sections))


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
