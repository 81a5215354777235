"""Hot rows on every rank: what they cover, and step time over their number beside the model.

Coverage is counted on the data sets that are found and on synthetic clicks with Criteo's tables,
beside the paper's figures. Every curve runs plans without hot rows, with k of them, with the
model's own k and with all rows copied, in turn on the same hosts and batches. Curves need root and
iproute2 and take about an hour; let nothing else run. What is done is stored in OUT/, and the
report is OUT.md, OUT.json and OUT.svg.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness.cells import Cells
from benchmarks.harness.hosts import measure_on_hosts
from benchmarks.harness.machine import say
from benchmarks.harness.options import Report, parse
from benchmarks.harness.pages import check_out, write_page
from papers.p2res.coverage import measure_coverage
from papers.p2res.curves import Curves
from papers.p2res.report import curve_name, draw_curves, render_report, summarise

__all__ = ["main"]

COMMAND = "python -m papers p2res"
PARTS = ("coverage", "curves")
QUICK = {
    "shapes": ((1, 2),),
    "rates": ("200mbit",),
    "alphas": (1.2,),
    "dedup": (False,),
    "cap": 500,
    "dim": 8,
    "batch": 64,
    "points": 4,
    "rounds": 1,
    "parts": ("curves",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is reported."""

    parts: Annotated[tuple[str, ...], "coverage needs no root", PARTS] = PARTS
    data: Annotated[Path, "folder of clicks, movietweetings, sequences for coverage"] = Path(
        "../shared/data"
    )


def main(words: Sequence[str]) -> None:
    """Count, measure, write the report."""
    report, choice, asked = parse(
        words, Report, Choice, Curves, command="python -m papers p2res", about=__doc__, quick=QUICK
    )
    check_out(report.out)
    cells = Cells.of(report.out, dataclasses.asdict(asked))
    coverage, cases = [], []
    if "coverage" in choice.parts:
        say("coverage")
        coverage = list(
            measure_coverage(choice.data, asked.alphas, batch=asked.batch, on_missing=say)
        )
    if "curves" in choice.parts:
        cases = list(measure_on_hosts(asked, cells, again=report.again, describe=_sentence))
    picture = draw_curves(cases) if cases else None
    page = render_report(cases, coverage, picture=f"{report.out.name}.svg")
    found = {"about": cells.header(), "coverage": coverage, "cases": cases}
    write_page(report.out, page, found, header=cells.header(), picture=picture)
    if report.json:
        print(json.dumps({"coverage": coverage, "curves": [summarise(case) for case in cases]}))
    else:
        print(f"written to {report.out}.md and .json")


def _sentence(case: dict[str, Any]) -> str:
    found = summarise(case)
    return (
        f"{curve_name(case)}: {found['cold_ms']:,.0f} ms without hot rows, "
        f"{found['model_ms']:,.0f} with the model's {found['model_k']:,}, "
        f"{found['best_ms']:,.0f} with the best {found['best_k']:,}"
    )
