"""The report of FlexShard as Markdown."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.figures import interval
from benchmarks.harness.pages import table

__all__ = ["case_name", "render_flexshard", "summarise_case"]

_EXCHANGED = ("ids", "rows", "backward")


def case_name(case: dict[str, Any]) -> str:
    """As ``2x2 200mbit no dedup``."""
    dedup = "dedup" if case["dedup"] else "no dedup"
    return f"{case['hosts']}x{case['local']} {case['rate']} {dedup}"


def summarise_case(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every plan: MB a host sends to others in exchanges and in sums, cuts, times."""
    first = case["rows"][0]
    found = []
    for row in case["rows"]:
        exchanged = _exchanged(row)
        synced = row["mb_across"].get("hot gradients", 0.0)
        synced += row["mb_across"].get("dense", 0.0) - first["mb_across"].get("dense", 0.0)
        found.append(
            {
                "plan": row["name"],
                "rows": row["rows"],
                "host_rows": row["host_rows"],
                "memory": row["mb_a_rank"] / first["mb_a_rank"],
                "all_to_all_mb": exchanged,
                "sync_mb": synced,
                "inside_mb": sum(row["mb_inside"].values()),
                "cut": _cut(exchanged, _exchanged(first)),
                "cut_with_sync": _cut(exchanged + synced, _exchanged(first)),
                "cut_from_merged": _cut(exchanged + synced, case["merged_mb"]),
                "in_flight_ms": row["in_flight_ms"],
                "exposed_ms": row["exposed_ms"],
                "median_ms": row["median_ms"],
                "step_ms": interval(row["ms"]).told(0),
                "told_ms": row["told_ms"],
                "bytes_are_exact": row["bytes_are_exact"],
            }
        )
    return found


def _cut(part: float, whole: float) -> float:
    """Nothing is cut where nothing crosses: on one host."""
    return 1.0 - part / whole if whole else 0.0


def _exchanged(row: dict[str, Any]) -> float:
    return sum(float(row["mb_across"].get(edge, 0.0)) for edge in _EXCHANGED)


def render_flexshard(cases: Sequence[dict[str, Any]], drifts: Sequence[dict[str, Any]]) -> str:
    """All cases, then drift, as Markdown."""
    lines = [
        "# FlexShard: tiers of a sequence table",
        "",
        "The paper: over 85 % less global all-to-all traffic, almost 6 times lower communication",
        "latency, no additional memory. Here: MB that a host sends to others in a step, in",
        "exchanges (ids, rows, gradients) and to add up gradients of copies (sync); cuts against",
        "row-wise of the same table. Memory is that of the fullest rank, relative to row-wise,",
        "within which nothing can be copied. In flight: milliseconds of a step with any message",
        "under way; exposed: of these, those in which a rank does nothing but wait.",
        "",
    ]
    if cases:
        lines += [f"Batches begun at a time: {cases[0]['depth']}.", ""]
    for case in cases:
        lines += _render_case(case, cases)
    if drifts:
        lines += _render_drift(drifts)
    return "\n".join(lines)


def _render_case(case: dict[str, Any], cases: Sequence[dict[str, Any]]) -> list[str]:
    found = summarise_case(case)
    rows = [
        [
            *(f["plan"], f"{f['rows']:,}", f"{f['host_rows']:,}", f"{f['memory']:.2f}x"),
            *(f"{f['all_to_all_mb']:.2f}", f"{f['cut']:.1%}"),
            *(f"{f['sync_mb']:.2f}", f"{f['cut_with_sync']:.1%}", f"{f['inside_mb']:.2f}"),
            *(f"{f['in_flight_ms']:,.0f}", f"{f['exposed_ms']:,.0f}", f["step_ms"]),
            f"{f['told_ms']:,.0f}",
            "exact" if f["bytes_are_exact"] else "DIFFER",
        ]
        for f in found
    ]
    heads = ["plan", "rows everywhere", "per host", "memory", "all-to-all MB", "cut", "sync MB"]
    heads += ["cut with sync", "inside MB", "in flight ms", "exposed ms", "step ms", "told ms"]
    lines = [f"## {case_name(case)}", "", *table([*heads, "bytes"], rows)]
    lines += ["", f"Row-wise merged per host, by formula: {case['merged_mb']:.2f} MB."]
    for other in cases:
        same = all(other[key] == case[key] for key in ("hosts", "local", "rate"))
        if same and other["dedup"] and not case["dedup"]:
            whole = summarise_case(other)[0]["all_to_all_mb"]
            cuts = ", ".join(f"{f['plan']} {_cut(f['all_to_all_mb'], whole):.1%}" for f in found)
            lines.append(f"Cuts against row-wise with dedup ({whole:.2f} MB): {cuts}.")
    return [*lines, ""]


def _render_drift(drifts: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for drift in drifts:
        cells = []
        for key in ("cross_mb", "late_rows"):
            fixed, refresh, oracle = (
                drift["policies"][name][key] for name in ("fixed", "refresh", "oracle")
            )
            cells += [f"{fixed:,.2f}", f"{refresh:,.2f}", f"{oracle:,.2f}"]
            cells.append(f"{refresh / oracle - 1.0:+.1%}")
        hosts, local = drift["shape"]
        about = [f"{hosts}x{local}", "yes" if drift["dedup"] else "no"]
        about.append("forward" if drift["hidden"] else "time")
        rows.append([*about, f"{drift['drift_every']}, {drift['refresh']}", *cells])
    heads = ["hosts", "dedup", "tiers by", "drift, refresh (steps)", "MB fixed"]
    heads += ["refresh", "oracle", "over oracle", "late fixed", "refresh", "oracle", "over oracle"]
    return [
        "## Drift",
        "",
        "Every so many steps 5 % of the hottest ids change places with colder ones. MB that a host",
        "sends across in a step, and late rows of a rank (asked for, not copied, updated by the",
        "step before): with tiers of the first batches, chosen again from the last 32 batches, and",
        "chosen from the batches to come.",
        "",
        *table(heads, rows, left=4),
        "",
    ]
