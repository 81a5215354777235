"""What shard groups cost, as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.figures import interval
from benchmarks.harness.pages import table, word

__all__ = ["judge_speed", "rank_correlation", "render_bytes", "render_speed"]

_BYTES = """\
## Bytes, imbalance and memory of a rank

Whole tables of Criteo's sizes ({cap:,} rows at most, {dim} columns), {batch} samples a rank, Zipf
{alpha}, gradients synced every step. MB that a rank sends in a step, mean over ranks, by `predict`:
inside its host and across, for ids, rows and gradients (exchange) and for replicas (sync).
Imbalance is the largest over the mean: bytes of the exchange, and expected seconds of work on rows.
MB of the fullest rank, with row-wise AdaGrad's state.
"""
_SYNC = """\
## One sync of weights and moments, touched rows beside all rows

Row-wise tables of Criteo's sizes, {cap:,} rows at most, {dim} columns, {batch} samples a rank, sync
every step: MB that a rank sends, by `predict`.
"""
_SPEED = """\
## Step time on emulated hosts

Tables of Criteo's sizes placed by the planner for each size and layout, {batch} samples a rank,
Zipf {alpha}; plans run in turn on the same batches, {depth} begun at a time, {rounds} rounds of
{steps} steps, medians with their intervals.
`model` is what the calibrated cost model told before. MB are what a host sends in a step, mean over
steps. Exposed is the time a rank does nothing but wait for messages.
"""


def rank_correlation(told: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's: the correlation of the places that both give; 1 if they agree on the order."""
    places = [np.argsort(np.argsort(values)) for values in (told, measured)]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def judge_speed(case: Mapping[str, Any]) -> dict[str, Any]:
    """Of one shape and rate: what the model would choose beside the best, and the correlation."""
    rows = case["rows"]
    chosen = min(rows, key=lambda row: row["told_ms"])
    best = min(rows, key=lambda row: row["median_ms"])
    return {
        "chosen": chosen["name"],
        "best": best["name"],
        "loss": chosen["median_ms"] / best["median_ms"] - 1.0,
        "correlation": rank_correlation(
            [row["told_ms"] for row in rows], [row["median_ms"] for row in rows]
        ),
        "bytes_are_exact": all(row["bytes_are_exact"] for row in rows),
    }


def render_bytes(found: Mapping[str, Any]) -> str:
    """Bytes by link class of every size and layout; then syncs of touched rows beside all rows."""
    rows = []
    for row in found["groups"]:
        mb = [row[f"{n}_{link}_mb"] for n in ("exchange", "sync") for link in ("host", "cross")]
        even = [row["bytes_imbalance"], row["work_imbalance"]]
        about = [f"{row['hosts']}x{row['local']}", row["size"], row["layout"]]
        rows.append([*about, *(f"{v:.2f}" for v in (*mb, *even)), f"{row['memory_mb']:.0f}"])
    heads = ["hosts", "N", "layout", "exchange in", "across", "sync in", "across"]
    syncs = [
        [
            *(f"{row['hosts']}x{row['local']}", row["size"], f"{row['sparse_mb']:.2f}"),
            *(f"{row['dense_mb']:,.0f}", f"{row['ratio']:.0f}"),
        ]
        for row in found["sync"]
    ]
    least = min(row["ratio"] for row in found["sync"])
    lines = [
        *(*_BYTES.format(**found["setting"]).splitlines(), ""),
        *(*table([*heads, "bytes", "work", "MB"], rows, left=3), ""),
        *(*_SYNC.format(**found["sync_setting"]).splitlines(), ""),
        *table(["hosts", "N", "touched rows", "all rows", "ratio"], syncs),
        f"\nAt least {least:.0f}x fewer bytes (100x required: {word(least >= 100)}).\n",
    ]
    return "\n".join(lines)


def render_speed(found: Mapping[str, Any]) -> str:
    """A table for every shape and rate."""
    lines = [*_SPEED.format(**found["setting"]).splitlines(), "", found["about"], ""]
    heads = ["N", "layout", "sync", "ms", "model", "exposed", "across", "of it sync", "inside"]
    for case in found["cases"]:
        rows = []
        for row in sorted(case["rows"], key=lambda row: row["median_ms"]):
            across, inside = (sum(row[key].values()) for key in ("mb_across", "mb_inside"))
            ms = [interval(row["ms"]).told(0)]
            ms += [f"{row[key]:.0f}" for key in ("told_ms", "exposed_ms")]
            of_sync = row["mb_across"].get("replica sync", 0.0)
            mb = [f"{value:.1f}" for value in (across, of_sync, inside)]
            about = [row["size"], row["layout"], row["sync"]]
            rows.append([*about, *ms, *mb, f"{row['mb_a_rank']:.0f}"])
        verdict = judge_speed(case)
        lines += [
            *(f"### {case['hosts']} hosts x {case['local']} at {case['rate']}", ""),
            *(*table([*heads, "MB"], rows, left=3), ""),
            f"The model's choice ({verdict['chosen']}) takes {verdict['loss']:.1%} longer than the "
            f"best ({verdict['best']}).",
            f"Correlation of the two orders {verdict['correlation']:.2f}; bytes of every plan as "
            f"predicted: {word(verdict['bytes_are_exact'])}.",
            "",
        ]
    return "\n".join(lines)
