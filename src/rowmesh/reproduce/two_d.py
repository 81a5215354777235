"""2D sparse parallelism again: what shard groups do to quality, and what they cost."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rowmesh.errors import InputError
from rowmesh.files import check_target, write_whole
from rowmesh.reproduce.two_d_bytes import count_groups, count_sync
from rowmesh.reproduce.two_d_quality import measure_runs, prove_gradients, runs_of
from rowmesh.reproduce.two_d_report import render_quality, summarise_quality
from rowmesh.reproduce.two_d_sets import Quality
from rowmesh.reproduce.two_d_speed import Speed, measure_speed, steps_of
from rowmesh.reproduce.two_d_speed_report import judge_speed, render_bytes, render_speed

__all__ = ["PARTS", "open_folder", "run_bytes", "run_quality", "run_speed", "write_report"]

PARTS = ("bytes", "speed", "quality")
_LARGE = (8, 8)  # where whole tables are uneven
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
    """
    runs = measure_runs(runs_of(what), out / "runs", workers=workers, on_run=on_run)
    proof = prove_gradients(what) if "planted" in what.sets else None
    return {"verdicts": summarise_quality(runs), "gradients": proof, "runs": runs}


def run_bytes(what: Speed, *, large: tuple[int, int] = _LARGE) -> dict[str, Any]:
    """The part that is counted: by link class, imbalance, memory; sparse syncs beside dense.

    The first is counted on a ``large`` shape too.
    """
    setting = {"cap": what.cap, "dim": what.dim, "alpha": what.alpha, "batch": what.batch // 4}
    of_sync = setting | {"cap": 10 * what.cap, "batch": what.batch}
    return {
        "setting": setting,
        "groups": count_groups([*what.shapes, large], **setting),  # type: ignore[arg-type]
        "sync_setting": of_sync,
        "sync": count_sync(what.shapes, **of_sync),  # type: ignore[arg-type]
    }


def run_speed(what: Speed, *, on_stage: Callable[[str], None]) -> dict[str, Any]:
    """The part that is timed, on emulated hosts.

    Raises:
        InputError: Where emulated hosts are not permitted.
        LabError: If ranks fail.
    """
    cases = list(measure_speed(what, on_stage=on_stage))
    names = ("alpha", "batch", "rounds", "depth")
    setting = {name: getattr(what, name) for name in names} | {"steps": steps_of(what)}
    return {"setting": setting, "cases": cases, "verdicts": [judge_speed(c) for c in cases]}


def write_report(out: Path, found: Mapping[str, Any]) -> None:
    """``report.json`` and ``report.md``: a section for every part of `PARTS` that was measured.

    Parts that are not in ``found`` stay as an earlier reproduction into the folder left them.
    """
    found = _earlier(out / "report.json") | dict(found)
    sections = [_TITLE, ""]
    for part, render in (("bytes", render_bytes), ("speed", render_speed)):
        if part in found:
            sections.append(render(found[part]))
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
