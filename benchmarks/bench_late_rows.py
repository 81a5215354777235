"""Do hot rows pay at depth 2? Late rows, exposed communication, bytes and memory, with and without.

::

    python benchmarks/bench_late_rows.py --out REPORT

On emulated hosts (root and iproute2), for each shape: all tables row-wise without hot rows (k = 0,
dedup alone, as in papers/p2res), the same with a few fixed k, and what the planner
chooses (auto), all two batches deep, alive at once and in turn, round by round; each round some
steps are timed and some traced. Prints and writes what is asked of hot rows with verdicts. Run
nothing else meanwhile. Tables that auto puts whole on every rank count as memory of their own.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.contestants import Entry
from harness.figures import interval, ratio
from harness.options import Parser, one_sentence
from harness.pages import table, word
from harness.turns import Rounds, add_turn_flags, figures, report_turns

COLD, AUTO = "k = 0", "auto"
COUNTED = 16  # batches of statistics, for all plans alike
LEAST_GAIN = 0.025  # of a step: what the planner calls a gain
LIMITS = {"late": 3.0, "exposed": 0.7, "bytes": 1.1, "memory": 0.02}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One thing that is asked, the figure, and whether it is so."""

    asked: str
    figure: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.asked}: {word(self.holds)}, {self.figure}"


def main() -> None:
    """Every shape, then the report."""
    args = parse_args()
    report_turns(
        args,
        title=["# Hot rows two batches deep", "Rows: of all ranks together, a step."],
        entries_of=lambda shape, topology: [entries_of(args.hot, topology)],
        describe=describe,
    )


def parse_args() -> argparse.Namespace:
    """The flags; the model's defaults are the race's."""
    p = Parser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add_turn_flags(p, shapes="2x1@200mbit,2x2@200mbit")
    p.add_argument("--hot", type=int, nargs="*", default=[256, 1024, 4096, 16384], help="fixed k")
    return p.parse_args()


def entries_of(fixed: Sequence[int], topology: Path) -> list[Entry]:
    """Row-wise ones that differ by their hot rows, and what the planner chooses freely."""
    common = ("--depth", "2", "--counted", str(COUNTED), "--topology", str(topology))
    fixed_split = ("--plan", "row_wise", "--exchange", "rows")
    tiers = {COLD: "off"} | {f"k = {k}": f"hot:{k}" for k in fixed}
    free = Entry(role="ours", name=AUTO, flags=("--plan", "auto", *common, "--tiers", "auto"))
    cold, *hot = (
        Entry(role="ours", name=name, flags=(*fixed_split, *common, "--tiers", word))
        for name, word in tiers.items()
    )
    return [cold, free, *hot]


def ahead_rows(rounds: Rounds, name: str, kind: str) -> float:
    """``early`` or ``late`` rows a step, of all ranks, from the first round to the last.

    Not of single rounds: a batch that is being begun when the rows are read may count to either.
    """
    first, last = (rounds[i][name]["ahead_rows"] for i in (0, -1))
    return float(last[kind] - first[kind]) / (last["step"] - first["step"])


def judge(result: Mapping[str, Any]) -> list[Verdict]:
    """The four things asked of hot rows; or, if the planner takes none, whether that is right."""
    rounds, plan = result["rounds"], result["plans"][AUTO]
    if plan["hot_rows"] + plan["host_rows"] == 0:
        return [_none_is_right(result)]
    cold, hot = figures(rounds, COLD), figures(rounds, AUTO)
    rows = {name: ahead_rows(rounds, name, "late") for name in (COLD, AUTO)}
    fewer = _over(rows[COLD], rows[AUTO])
    exposed = interval([_over(b, a) for a, b in zip(cold["exposed"], hot["exposed"], strict=True)])
    mb = interval([_over(b, a) for a, b in zip(cold["mb"], hot["mb"], strict=True)])
    share = plan["hot_share"]
    return [
        Verdict(
            asked=f"late rows at least {LIMITS['late']:g}x fewer than with dedup alone",
            figure=f"{fewer:.2f} ({rows[COLD]:,.0f} and {rows[AUTO]:,.0f})",
            holds=fewer >= LIMITS["late"],
        ),
        Verdict(
            asked=f"exposed communication at most {LIMITS['exposed']:g}x",
            figure=f"{exposed.told(2)}",
            holds=exposed.mid <= LIMITS["exposed"],
        ),
        Verdict(
            asked=f"bytes across hosts at most {LIMITS['bytes']:g}x",
            figure=f"{mb.mid:.3f}",
            holds=mb.mid <= LIMITS["bytes"],
        ),
        Verdict(
            asked=f"hot memory at most {LIMITS['memory']:.0%} of the tables",
            figure=f"{share:.2%} on a rank (whole tables besides: {plan['whole_share']:.2%})",
            holds=share <= LIMITS["memory"],
        ),
    ]


def _none_is_right(result: Mapping[str, Any]) -> Verdict:
    """No fixed k has a step that is shorter than that of k = 0 by more than the planner's gain."""
    rounds = result["rounds"]
    cold = figures(rounds, COLD)["ms"]
    ratios = {
        name: ratio(figures(rounds, name)["ms"], cold)
        for name in result["plans"]
        if name not in (COLD, AUTO)
    }
    told = ", ".join(f"{n} {r.told(3)}" for n, r in ratios.items())
    return Verdict(
        asked="auto picks k = 0, and no k of the sweep is faster",
        figure=f"ms over k = 0: {told or 'no k was tried'}",
        holds=bool(ratios) and all(r.mid >= 1 - LEAST_GAIN for r in ratios.values()),
    )


def _over(a: float, b: float) -> float:
    return a / b if b else math.inf if a else 1.0


def describe(result: Mapping[str, Any]) -> list[str]:
    """A table of the plans, then the verdicts."""
    heads = ["plan", "hot rows", "a host's", "memory", "whole tables", "ms/step"]
    heads += ["late rows", "early", "exposed ms", "MB a host"]
    rows = []
    for name, plan in result["plans"].items():
        found = figures(result["rounds"], name)
        ms, exposed = interval(found["ms"]), interval(found["exposed"])
        cells = [
            name,
            f"{plan['hot_rows']:,}",
            f"{plan['host_rows']:,}",
            f"{plan['hot_share']:.2%}",
            f"{plan['whole_share']:.2%}",
            ms.told(0),
            *(f"{ahead_rows(result['rounds'], name, kind):,.0f}" for kind in ("late", "early")),
            exposed.told(0),
            f"{fmean(found['mb']):.2f}",
        ]
        rows.append(cells)
    exact = all(turn[n]["bytes_are_exact"] for turn in result["rounds"] for n in result["plans"])
    lines = [f"## {result['shape']}", "", *table(heads, rows)]
    lines += ["", f"Bytes as predicted in every round: {word(exact)}.", ""]
    return [*lines, *(f"* {verdict}" for verdict in judge(result))]


if __name__ == "__main__":
    with one_sentence():
        main()
