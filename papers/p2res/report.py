"""The report of P2RES as Markdown and as pictures of time over k."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.harness.figures import interval
from benchmarks.harness.pages import percent, table
from papers.p2res.coverage import PUBLISHED

__all__ = ["curve_name", "draw_curves", "render_report", "summarise"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 520, 240, 60, 36
_EDGES = ("ids", "rows", "backward", "hot gradients", "dense")  # others are a few bytes
_TEXT = 'font-family="sans-serif" font-size="11" fill="currentColor"'


def summarise(case: dict[str, Any]) -> dict[str, Any]:
    """What a curve shows: times at k = 0, at the model's k, at the best, with all rows copied."""
    rows = {row["name"]: row for row in case["rows"]}
    times = [row["median_ms"] for row in case["rows"]]
    best = min(case["rows"], key=lambda row: row["median_ms"])
    model = next(row for row in case["rows"] if row["is_model"])
    return {
        "curve": curve_name(case),
        "cold_ms": rows["cold"]["median_ms"],
        "all_ms": rows["all"]["median_ms"],
        "model_k": model["rows"],
        "model_ms": model["median_ms"],
        "best_k": best["rows"],
        "best_ms": best["median_ms"],
        "above_best": model["median_ms"] / best["median_ms"] - 1.0,
        "spread": max(times) / min(times),
        "gain": rows["cold"]["median_ms"] / model["median_ms"],
        "coverage": case["model"]["coverage"],
        "collide_cold": rows["cold"]["collide"],
        "collide_model": model["collide"],
        "bytes_are_exact": all(row["bytes_are_exact"] for row in case["rows"]),
    }


def curve_name(case: dict[str, Any]) -> str:
    """As ``2x2 200mbit alpha 1.2 no dedup``."""
    dedup = "dedup" if case["dedup"] else "no dedup"
    return f"{case['hosts']}x{case['local']} {case['rate']} alpha {case['alpha']} {dedup}"


def render_report(
    cases: Sequence[dict[str, Any]], coverage: Sequence[dict[str, Any]], *, picture: str
) -> str:
    """Coverage and all curves as Markdown: a line each, then each curve by itself."""
    parts = ["# P2RES: hot rows on every rank", ""]
    if coverage:
        parts += _render_coverage(coverage)
    if cases:
        parts += [*_render_summary(cases, picture), *(_render_curve(case) for case in cases)]
    return "\n".join(parts)


def _render_coverage(coverage: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table: a line a data set, after those that the paper states."""
    keys = ("hot_2", "hot_13", "steady", "steady_take", "unseen")
    heads = ["data", "samples a batch", "rows seen", "hottest 2.2 %", "hottest 13 %"]
    heads += ["steady rows", "they take", "unseen", "collide", "with copies"]
    rows = [
        [paper["data"], "-", "-", *(paper.get(key, "-") for key in keys), "-", "-"]
        for paper in PUBLISHED
    ]
    for found in coverage:
        shares = {pair["copies"]: pair["share"] for pair in found["collisions"]}
        shown = [*(found[key] for key in keys), *(shares.get(copies) for copies in (0, 10_000))]
        counts = [f"{found['samples']:,}", f"{found['seen_rows']:,.0f}"]
        rows.append([found["data"], *counts, *map(percent, shown)])
    return [
        "## Coverage",
        "",
        "Of 100 batches: what the hottest 2.2 % and 13 % of the rows seen take of all requests;",
        "rows in more than 95 of the batches, and what they take; the rows of one more batch that",
        "the 100 did not have (the paper: under 1 %); the rows of a batch that the step before",
        "updates, without copies, and of the rest with copies of the 10,000 hottest.",
        "",
        *table(heads, rows),
        "",
    ]


def _render_summary(cases: Sequence[dict[str, Any]], picture: str) -> list[str]:
    rows = []
    for f in map(summarise, cases):
        collide = f"{percent(f['collide_cold'])} to {percent(f['collide_model'])}"
        rows.append(
            [
                f["curve"],
                *(f"{f[key]:,.0f}" for key in ("cold_ms", "all_ms")),
                *(f"{f[key]:,.0f}" for key in ("model_k", "model_ms", "best_k", "best_ms")),
                *(f"{f['above_best']:+.1%}", f"{f['spread']:.2f}", f"{f['gain']:.2f}"),
                *(f"{f['coverage']:.0%}", collide),
            ]
        )
    heads = ["curve", "none", "all rows", "model's k", "its ms", "best k", "its ms", "above best"]
    heads += ["max / min", "none / model", "covered", "collide"]
    exact = all(summarise(case)["bytes_are_exact"] for case in cases)
    said = "to the byte on every plan" if exact else "NOT on every plan"
    return [
        "## Time over hot rows",
        "",
        f"![time over hot rows]({picture})",
        "",
        "Milliseconds of a step, medians over rounds in which all plans of a curve take turns,",
        f"with the intervals of the medians; {cases[0]['depth']} batches begun at a time.",
        "Beside the best of the measured plans: the number of hot rows that the model chose.",
        "Collide: of a batch's rows to fetch, those that the step before updates, without and with",
        "the model's hot rows.",
        "",
        *table(heads, rows),
        "",
        f"`rm.predict` and the ledgers agree {said}.",
        "",
    ]


def _render_curve(case: dict[str, Any]) -> str:
    """A Markdown table of one curve."""
    edges = [e for e in _EDGES if any(row["mb_across"].get(e) for row in case["rows"])]
    rows = []
    for row in sorted(case["rows"], key=lambda row: int(row["rows"])):
        mark = {"all": " (all)", "cold": " (none)"}.get(row["name"], "")
        mark += " **(model)**" if row["is_model"] else ""
        sent = [
            *(row["mb_across"].get(edge, 0.0) for edge in edges),
            sum(row["mb_across"].values()),
        ]
        rows.append(
            [
                f"{row['rows']:,}{mark}",
                row["sums"] or "-",
                f"{row['mb_a_rank']:,.1f}",
                *(f"{mb:,.2f}" for mb in sent),
                *(percent(row["collide"]), f"{row['told_ms']:,.0f}"),
                interval(row["ms"]).told(0),
                "exact" if row["bytes_are_exact"] else "DIFFER",
            ]
        )
    heads = ["hot rows", "sums", "MB a rank holds"]
    heads += [*(f"MB a host sends: {edge}" for edge in edges), "all"]
    heads += ["collide", "told ms", "ms [interval]", "bytes"]
    return "\n".join([f"### {curve_name(case)}", "", *table(heads, rows), ""])


def draw_curves(cases: Sequence[dict[str, Any]]) -> str:
    """An SVG: a panel a curve, ms over hot rows, measured and told, the model's k marked."""
    columns = 2
    lines = -(-len(cases) // columns)
    width, height = columns * _WIDTH, lines * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" color="#222"><rect width="100%" height="100%" '
        f'fill="#fff"/>'
    ]
    for number, case in enumerate(cases):
        at = f"translate({_WIDTH * (number % columns)}, {_HEIGHT * (number // columns)})"
        parts += [f'<g transform="{at}">', *_panel(case), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(case: dict[str, Any]) -> list[str]:
    rows = sorted(case["rows"], key=lambda row: row["rows"])
    top: float = 1.1 * max(max(row["median_ms"], row["told_ms"]) for row in rows)
    most = math.log1p(max(row["rows"] for row in rows))

    def x(count: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 20) * math.log1p(count) / most

    def y(ms: float) -> float:
        return _HEIGHT - 40 - (_HEIGHT - 40 - _TOP) * ms / top

    parts = [
        f'<text x="{_LEFT}" y="20" {_TEXT} font-weight="bold">{escape(curve_name(case))}</text>'
    ]
    for ms in (0.0, top / 2, top / 1.1):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(ms):.1f}" y2="{y(ms):.1f}" '
            f'stroke="#ddd"/><text x="{_LEFT - 6}" y="{y(ms) + 4:.1f}" {_TEXT} '
            f'text-anchor="end">{ms:,.0f}</text>'
        )
    for key, colour, dash in (("told_ms", "#999", "4 3"), ("median_ms", "#0b6e4f", "none")):
        points = " ".join(f"{x(row['rows']):.1f},{y(row[key]):.1f}" for row in rows)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
    for row in rows:
        chosen = row["is_model"]
        parts.append(
            f'<circle cx="{x(row["rows"]):.1f}" cy="{y(row["median_ms"]):.1f}" '
            f'r="{6 if chosen else 3}" fill="{"#c8553d" if chosen else "#0b6e4f"}"/>'
            f'<text x="{x(row["rows"]):.1f}" y="{_HEIGHT - 24}" {_TEXT} font-size="9" '
            f'text-anchor="middle">{_short(row["rows"])}</text>'
        )
    caption = "hot rows; ms measured (green), told (grey), the model's choice (red)"
    return [*parts, f'<text x="{_LEFT}" y="{_HEIGHT - 8}" {_TEXT}>{caption}</text>']


def _short(count: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.0f}{letter}"
    return str(count)
