"""Tiers of a sequence table: traffic and time at budgets of memory, and tiers under drift.

A target-attention model on synthetic histories runs row-wise, with hot rows alone and with three
tiers, in turn on the same hosts and batches. Tiers need root and iproute2 and take about a quarter
of an hour; let nothing else run. What is done is stored in OUT/, and the report is OUT.md and
OUT.json.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from benchmarks.harness.cells import Cells
from benchmarks.harness.hosts import measure_on_hosts
from benchmarks.harness.machine import say
from benchmarks.harness.options import Report, parse
from benchmarks.harness.pages import check_out, write_page
from papers.flexshard.drift import Drifting, measure_drift
from papers.flexshard.report import case_name, render_flexshard, summarise_case
from papers.flexshard.tiers import Tiers

__all__ = ["main"]

COMMAND = "python -m papers flexshard"
PARTS = ("tiers", "drift")
QUICK = {
    "shapes": ((1, 2),),
    "dedup": (False,),
    "budgets": (1.25,),
    "items": 500,
    "dim": 8,
    "batch": 16,
    "rounds": 1,
    "parts": ("tiers",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is reported."""

    parts: Annotated[tuple[str, ...], "drift needs no root", PARTS] = PARTS


def main(words: Sequence[str]) -> None:
    """Simulate drift, measure tiers, write the report."""
    report, choice, asked = parse(
        words,
        Report,
        Choice,
        Tiers,
        command="python -m papers flexshard",
        about=__doc__,
        quick=QUICK,
    )
    check_out(report.out)
    cells = Cells.of(report.out, dataclasses.asdict(asked))
    drifts = []
    for dedup in asked.dedup if "drift" in choice.parts else ():
        say(f"drift, {'dedup' if dedup else 'no dedup'}")
        drifts += [measure_drift(asked, Drifting(hidden=h), dedup=dedup) for h in (0.0, 1.0)]
    cases = []
    if "tiers" in choice.parts:
        cases = list(measure_on_hosts(asked, cells, again=report.again, describe=case_name))
    found = {"about": cells.header(), "cases": cases, "drift": drifts}
    write_page(report.out, render_flexshard(cases, drifts), found, header=cells.header())
    if report.json:
        tables = {case_name(case): summarise_case(case) for case in cases}
        print(json.dumps({"tables": tables, "drift": drifts}))
    else:
        print(f"written to {report.out}.md and .json")
