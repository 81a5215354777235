"""What each part of the step is worth: added one after the other, and some taken out again.

::

    python -m papers neo --out papers/neo/reports/ablation_MACHINE_DATE

On emulated hosts (root and iproute2; a shape of one host needs neither), for each shape: from
whole tables pooled by their owners to rows, dedup, requests merged in hosts, batches begun ahead
and codecs; then the exact step without shared memory inside hosts, without compiled code (kernels,
and shared memory, which is compiled too), and with torch's matrix products. Those of one list are
alive at once and run in turn, round by round; each round some steps are timed and some traced. Run
nothing else meanwhile.
"""

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness.contestants import Entry
from benchmarks.harness.figures import interval, ratio
from benchmarks.harness.options import Parser
from benchmarks.harness.pages import table, word
from benchmarks.harness.shapes import Shape
from benchmarks.harness.turns import add_turn_flags, figures, report_turns

FIRST = "whole tables, pooled"
EXACT, AGAIN = "+ a batch begun ahead", "the exact step again"
WITHOUT = {  # taken out of the exact step by the environment
    "without shared memory": "ROWMESH_SHARED_MEMORY",
    "without compiled code": "ROWMESH_NATIVE",
    "with torch's products": "ROWMESH_PRODUCTS",
}


TITLE = [
    "# What each part of the step is worth",
    "A line adds to the one above it; int8 changes the exact step, a batch ahead. The lines from "
    "the exact step again on ran in turn with it, after the others. Ratios are taken round by "
    "round. Exposed: communication during which a rank could only wait. MB: sent by a host to "
    "others.",
]


def main(words: Sequence[str]) -> None:
    """Every shape, then the report."""
    p = Parser(
        prog="python -m papers neo",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    add_turn_flags(p, shapes="1x2,2x1@1gbit,2x1@200mbit,2x2@200mbit")
    report_turns(
        p.parse_args(words),
        title=TITLE,
        entries_of=lambda shape, topology: entries_of(shape),
        describe=describe,
    )


def entries_of(shape: Shape) -> list[list[Entry]]:
    """Settings in the order of the table; what a shape has no use for is left out.

    In two lists, since four ranks of all of them do not fit the memory of a small machine: what is
    added, and what is taken out, beside the same exact step.
    """
    rows = ("--plan", "row_wise", "--exchange", "rows")
    merge = ("--merge", "on" if shape.hosts > 1 and shape.local > 1 else "off")
    flat, exact = (*rows, "--merge", "off", "--depth"), (*rows, *merge, "--depth", "2")
    whole = ("--plan", "table_wise", "--exchange", "pooled", "--merge", "off", "--depth", "1")
    found = {
        FIRST: whole,
        "rows by row-wise owners": (*flat, "1", "--no-dedup"),
        "+ dedup": (*flat, "1"),
        **({"+ merged in hosts": (*rows, *merge, "--depth", "1")} if merge[1] == "on" else {}),
        EXACT: exact,
        "+ bf16 on the wire": (*exact, "--codecs", "bf16"),
        "int8 but for dense bf16": (*exact, "--codecs", "int8,dense=bf16"),
    }
    added = [Entry(role="ours", name=name, flags=flags) for name, flags in found.items()]
    taken_out = [Entry(role="ours", name=AGAIN, flags=exact)]
    for name, variable in WITHOUT.items():
        if variable != "ROWMESH_SHARED_MEMORY" or shape.local > 1:
            word = "torch" if variable == "ROWMESH_PRODUCTS" else "0"
            taken_out.append(Entry(role="ours", name=name, flags=exact, env=((variable, word),)))
    return [added, taken_out]


def describe(result: Mapping[str, Any]) -> list[str]:
    """A table with a line for every setting, over the first and over what it changes."""
    rounds, names = result["rounds"], list(result["plans"])
    found = {name: figures(rounds, name) for name in names}
    rows = []
    for number, name in enumerate(names):
        before = AGAIN if name in WITHOUT else names[max(number - 1, 0)]
        before = EXACT if name.startswith("int8") else before
        ms, is_added = found[name]["ms"], name not in (AGAIN, *WITHOUT)
        changes = number and name != AGAIN
        rows.append(
            [
                name,
                interval(ms).told(0),
                ratio(ms, found[FIRST]["ms"]).told(2) if is_added else "",
                ratio(ms, found[before]["ms"]).told(2) if changes else "",
                interval(found[name]["exposed"]).told(0),
                f"{fmean(found[name]['mb']):.2f}",
            ]
        )
    heads = ["setting", "ms/step", "over the first", "over what it changes", "exposed ms", "MB"]
    exact = all(turn[name]["bytes_are_exact"] for turn in rounds for name in names)
    told = f"Bytes as predicted in every round: {word(exact)}."
    return [f"## {result['shape']}", "", *table(heads, rows), "", told]
