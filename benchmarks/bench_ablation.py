"""What each part of the step is worth: added one after the other, and some taken out again.

::

    python benchmarks/bench_ablation.py --out REPORT

On emulated hosts (root and iproute2; a shape of one host needs neither), for each shape: from
whole tables pooled by their owners to rows, dedup, requests merged in hosts, batches begun ahead
and codecs; then the exact step without compiled kernels, without shared memory inside hosts, and
with torch's matrix products. All are alive at once and run in turn, round by round; each round
some steps are timed and some traced. Run nothing else meanwhile.
"""

import argparse
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from racing.contestants import Entry
from racing.in_turn import add_turn_flags, figures, report_turns
from racing.judge import Interval, interval
from racing.shapes import Shape

FIRST = "whole tables, pooled"
WITHOUT = {  # taken out of the exact step by the environment
    "without compiled kernels": "ROWMESH_NATIVE",
    "without shared memory": "ROWMESH_SHARED_MEMORY",
    "with torch's products": "ROWMESH_PRODUCTS",
}


def main() -> None:
    """Every shape, then the report."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add_turn_flags(p, shapes="1x2,2x1@1gbit,2x1@200mbit,2x2@200mbit")
    report_turns(
        p.parse_args(),
        title=[
            "# What each part of the step is worth",
            "A line adds to the one above it; int8, with and without change the exact step, a batch"
            " ahead. Ratios are taken round by round. Exposed: communication during which a rank "
            "could only wait.",
        ],
        entries_of=lambda shape, topology: entries_of(shape),
        describe=describe,
    )


def entries_of(shape: Shape) -> list[Entry]:
    """Settings in the order of the table; what a shape has no use for is left out."""
    rows = ("--plan", "row_wise", "--exchange", "rows")
    merge = ("--merge", "on" if shape.hosts > 1 and shape.local > 1 else "off")
    flat, exact = (*rows, "--merge", "off", "--depth"), (*rows, *merge, "--depth", "2")
    whole = ("--plan", "table_wise", "--exchange", "pooled", "--merge", "off", "--depth", "1")
    found = {
        FIRST: whole,
        "rows by row-wise owners": (*flat, "1", "--no-dedup"),
        "+ dedup": (*flat, "1"),
        **({"+ merged in hosts": (*rows, *merge, "--depth", "1")} if merge[1] == "on" else {}),
        "+ a batch begun ahead": exact,
        "+ bf16 on the wire": (*exact, "--codecs", "bf16"),
        "int8 but for dense bf16": (*exact, "--codecs", "int8,dense=bf16"),
    }
    entries = [Entry(role="ours", name=name, flags=flags) for name, flags in found.items()]
    for name, variable in WITHOUT.items():
        if variable != "ROWMESH_SHARED_MEMORY" or shape.local > 1:
            word = "torch" if variable == "ROWMESH_PRODUCTS" else "0"
            entries.append(Entry(role="ours", name=name, flags=exact, env=((variable, word),)))
    return entries


def describe(result: Mapping[str, Any]) -> list[str]:
    """A table with a line for every setting, over the first and over what it changes."""
    rounds, names = result["rounds"], list(result["plans"])
    found = {name: figures(rounds, name) for name in names}
    exact = "+ a batch begun ahead"
    lines = [f"## {result['shape']}", ""]
    lines.append("| setting | ms/step | over the first | over what it changes | exposed ms | MB |")
    lines.append("| --- | --: | --: | --: | --: | --: |")
    for number, name in enumerate(names):
        is_variant = name in WITHOUT or name.startswith("int8")
        before = exact if is_variant else names[max(number - 1, 0)]
        ms = found[name]["ms"]
        cells = [
            name,
            _told(interval(ms), 0),
            _told(_ratio(ms, found[FIRST]["ms"]), 2),
            _told(_ratio(ms, found[before]["ms"]), 2) if number else "",
            _told(interval(found[name]["exposed"]), 0),
            f"{fmean(found[name]['mb']):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    exact_bytes = all(turn[name]["bytes_are_exact"] for turn in rounds for name in names)
    return [*lines, "", f"Bytes as predicted in every round: {'yes' if exact_bytes else 'NO'}."]


def _ratio(ms: list[float], before: list[float]) -> Interval:
    return interval([a / b for a, b in zip(ms, before, strict=True)])


def _told(found: Interval, digits: int) -> str:
    return f"{found.mid:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


if __name__ == "__main__":
    main()
