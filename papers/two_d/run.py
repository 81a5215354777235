"""Shard groups: what they send, what a step takes, and what stepping apart does to quality.

bytes: by link class, imbalance and memory of every size and layout, and of syncs; a minute. speed:
step time of each on emulated hosts, beside the cost model; needs root and iproute2, and that
nothing else runs; about 10 minutes. quality: virtual ranks in one process train on planted data,
where rare rows matter, and on clicks; not timed, 5 seeds take about 20 minutes on 2 cores. What is
done is stored in OUT/, and the report is OUT.md and OUT.json: when it is started again with the
same --out it goes on where it was, and parts that are not asked for stay as they were.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness.cells import Cells
from benchmarks.harness.hosts import measure_on_hosts
from benchmarks.harness.machine import say
from benchmarks.harness.options import Report, parse
from benchmarks.harness.pages import check_out, write_page
from papers.two_d.arms import Quality
from papers.two_d.counted import count_groups, count_sync
from papers.two_d.quality import measure_runs, prove_gradients, runs_of
from papers.two_d.quality_report import render_quality, summarise_quality
from papers.two_d.speed import Speed
from papers.two_d.speed_report import judge_speed, render_bytes, render_speed
from rowmesh.errors import check_range

__all__ = ["main", "run_bytes", "write_report"]

COMMAND = "python -m papers two_d"
PARTS = ("bytes", "speed", "quality")
QUICK = {
    "seeds": (11, 12),
    "groups": (2, 4),
    "periods": (4,),
    "sets": ("planted",),
    "steps": 30,
    "shapes": ((1, 2),),
    "syncs": ("gradients", "weights:2"),
    "cap": 500,
    "dim": 8,
    "batch": 64,
    "rounds": 1,
}
_LARGE = (8, 8)  # where whole tables are uneven
_TITLE = "# 2D sparse parallelism: groups of ranks, each with a copy of the tables"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is reported."""

    parts: Annotated[tuple[str, ...], "speed needs root", PARTS] = PARTS
    workers: Annotated[int, "processes that train"] = 2

    def __post_init__(self) -> None:
        check_range("workers", self.workers, 1)


def main(words: Sequence[str]) -> None:
    """Count, time, train, and write the report after each."""
    kinds = (Report, Choice, Quality, Speed)
    report, choice, quality, speed = parse(
        words, *kinds, command="python -m papers two_d", about=__doc__, quick=QUICK
    )
    if "quality" in choice.parts:
        runs_of(quality)  # complains before hours have passed
    check_out(report.out)
    found: dict[str, Any] = {}
    if "bytes" in choice.parts:
        say("bytes")
        found["bytes"] = run_bytes(speed, large=(2, 2) if report.quick else _LARGE)
        write_report(report.out, found)
    if "speed" in choice.parts:
        found["speed"] = _run_speed(speed, report)
        write_report(report.out, found)
    if "quality" in choice.parts:
        if "clicks" in quality.sets and not quality.clicks.is_dir():
            say(f"{quality.clicks} is not there: no run on clicks; name their folder by --clicks")
        found["quality"] = _run_quality(quality, report, workers=choice.workers)
        write_report(report.out, found)
    verdicts = found.get("quality", {}).get("verdicts", {})
    if report.json:
        print(json.dumps(verdicts))
        return
    for name, members in verdicts.items():
        for verdict in members:
            print(f"{name}: {verdict['verdict']}")
    print(f"written to {report.out}.md and .json")


def run_bytes(what: Speed, *, large: tuple[int, int] = _LARGE) -> dict[str, Any]:
    """The part that is counted: by link class, imbalance, memory; touched rows beside all.

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


def _run_speed(what: Speed, report: Report) -> dict[str, Any]:
    """The part that is timed."""
    cells = Cells.of(report.out / "speed", dataclasses.asdict(what))
    cases = list(measure_on_hosts(what, cells, again=report.again, describe=_sentence))
    about = cells.header()
    setting = {name: getattr(what, name) for name in ("alpha", "batch", "rounds", "depth", "steps")}
    verdicts = [judge_speed(case) for case in cases]
    return {"about": about, "setting": setting, "cases": cases, "verdicts": verdicts}


def _sentence(case: dict[str, Any]) -> str:
    verdict = judge_speed(case)
    shape = f"{case['hosts']}x{case['local']} at {case['rate']}"
    return f"{shape}: best {verdict['best']}, the model's choice {verdict['chosen']}"


def _run_quality(what: Quality, report: Report, *, workers: int) -> dict[str, Any]:
    """The quality part: all runs, the proof of mode gradients, verdicts."""
    runs = measure_runs(
        runs_of(what), report.out / "runs", workers=workers, again=report.again, on_run=_say_some
    )
    proof = prove_gradients(what) if "planted" in what.sets else None
    return {"verdicts": summarise_quality(runs), "gradients": proof, "runs": runs}


def write_report(out: Path, found: Mapping[str, Any]) -> None:
    """``OUT.json`` and ``OUT.md``: a section for every part of `PARTS` that was measured.

    Parts that are not in ``found`` stay as they were in ``OUT.json``.
    """
    found = _earlier(out.with_name(out.name + ".json")) | dict(found)
    sections = [_TITLE, ""]
    for part, render in (("bytes", render_bytes), ("speed", render_speed)):
        if part in found:
            sections.append(render(found[part]))
    if "quality" in found:
        quality = found["quality"]
        sections.append(render_quality(quality["runs"], quality["gradients"]))
    write_page(out, "\n".join(sections), found)


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _say_some(done: int, total: int, name: str) -> None:
    """A line for about every twentieth run."""
    if name == "stored" or done % max(total // 20, 1) == 0:
        say(f"{done} of {total} runs: {name}")
