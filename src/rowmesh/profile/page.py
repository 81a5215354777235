"""A profile as one HTML page that needs nothing else: no network, no script."""

import html
from collections.abc import Sequence
from typing import Any, Final

from rowmesh.profile.curves import Curve, draw_curves
from rowmesh.profile.figures import SHARES
from rowmesh.profile.result import Profile
from rowmesh.profile.tallies import bin_names

__all__ = ["percent", "render_page"]

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --grid: #ddd; --faint: #666; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #161616; --grid: #3a3a3a; --faint: #9a9a9a; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; fill: none; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: right; padding: .2rem .55rem; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; } p, li { max-width: 46rem; }
.faint { color: var(--faint); } i { display: inline-block; width: .8em; height: .8em; }
"""
_ALL: Final = "all tables"


def render_page(profile: Profile) -> str:
    """The page: coverage curves of every table and of all together, and tables of the numbers."""
    curves = [
        Curve(table.name, *profile.curve(table), _colour(i, len(profile.tables)))
        for i, table in enumerate(profile.tables)
    ]
    whole = Curve(_ALL, *profile.curve(), "var(--ink)", is_bold=True)
    found, title = profile.figures, profile.title
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>rowmesh profile: {title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Which rows are asked for</h1>\n<p>{title}.</p>",
            *_sentences(found),
            "<h2>Coverage</h2>",
            draw_curves([*curves, whole]),
            _coverage(found, [*curves, whole]),
            "<h2>Accesses of a batch</h2>",
            _accesses(found),
            "<h2>How often a distinct row repeats in a step</h2>",
            '<p class="faint">All ranks together; share of the distinct rows.</p>',
            _repeats(found),
            "</body></html>\n",
        ]
    )


def _sentences(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{percent(found['steady_share'])} of the rows seen are in more than 95 % of the batches "
        f"and take {percent(found['steady_requests_share'])} of the requests.",
        f"Rows of one more batch that were not seen before: {percent(found['unseen_share'])}.",
        f"Of a rank's next rows {percent(found['reuse_share'])} are in its own running batch, and "
        f"the running step updates {percent(found['collision_share'])} of them.",
    ]
    lines += [
        f"With copies of the {pair['copies']:,} hottest rows, {percent(pair['share'])} of the rest."
        for pair in found["collisions_with_copies"]
        if pair["copies"]
    ]
    return ["<ul>", *(f"<li>{line}</li>" for line in lines), "</ul>"]


def _coverage(found: dict[str, Any], curves: Sequence[Curve]) -> str:
    heads = ["table", *(f"{x:.1%} of rows" for x in SHARES), *(f"{x:.1%} of seen" for x in SHARES)]
    lines = []
    for curve in curves:
        own = found if curve.is_bold else found["tables"][curve.name]
        swatch = f'<i style="background:{curve.colour}"></i> {html.escape(curve.name)}'
        shares = [*own["coverage"]["all"], *own["coverage"]["seen"]]
        lines.append([swatch, *map(percent, shares)])
    return _table(heads, lines)


def _accesses(found: dict[str, Any]) -> str:
    heads = [
        *("table", "rows", "rows seen", "requests", "distinct", "bag, mean", "bag, longest"),
        *("in 95 % of batches", "their requests", "unseen", "reused", "collide", "count error"),
    ]
    lines = [
        [
            html.escape(name),
            f"{own['rows']:,}",
            f"{own['seen_rows']:,.0f}",
            f"{own['requests']:,.1f}",
            f"{own['distinct']:,.1f}",
            "-" if own["pooling_mean"] is None else f"{own['pooling_mean']:.2f}",
            f"{own['pooling_max']:,}",
            percent(own["steady_share"]),
            percent(own["steady_requests_share"]),
            percent(own["unseen_share"]),
            percent(own["reuse_share"]),
            percent(own["collision_share"]),
            f"{own['count_error']:,}",
        ]
        for name, own in found["tables"].items()
    ]
    return _table(heads, lines)


def _repeats(found: dict[str, Any]) -> str:
    lines = [
        [html.escape(name), *map(percent, own["repeat_histogram"])]
        for name, own in found["tables"].items()
    ]
    return _table(["table", *map(html.escape, bin_names())], lines)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{c}</td>" for c in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _colour(i: int, number: int) -> str:
    return f"hsl({360 * i // number} 65% 50%)"


def percent(share: float | None) -> str:
    """``12.3 %``, or ``-`` where nothing is known."""
    return "-" if share is None else f"{100 * share:.1f} %"
