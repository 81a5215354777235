"""The plot of a race: one line a shape, a log axis of milliseconds, as plain SVG."""

import math
from html import escape
from typing import Any

__all__ = ["draw"]

SERIES = (
    ("ours", "rowmesh, exact", "#0b6e4f", "circle"),
    ("ours_lossy", "rowmesh, lossy", "#7ac7a5", "circle"),
    ("theirs", "TorchRec, exact", "#c8553d", "square"),
    ("theirs_plain", "TorchRec, plain", "#8c2f1b", "square"),
    ("theirs_lossy", "TorchRec, lossy", "#e9a23b", "diamond"),
)
LEFT, WIDTH, TOP, LINE, RIGHT = 190, 640, 64, 32, 30
TEXT = 'font-family="sans-serif" font-size="12" fill="#222"'
STEPS = (1, 2, 5)


def draw(rows: list[tuple[str, dict[str, Any], float]], *, title: str) -> str:
    """An SVG of ``rows``: a label, the summary of the shape, its floor in ms."""
    values = [floor for _, _, floor in rows]
    values += [end for _, found, _ in rows for s in _present(found) for end in _ends(found, s)]
    low, high = _limits(values)
    scale = WIDTH / (math.log(high) - math.log(low))

    def x(ms: float) -> float:
        return LEFT + (math.log(ms) - math.log(low)) * scale

    height = TOP + LINE * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" '
        f'height="{height}" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="10" y="20" {TEXT} '
        f'font-weight="bold">{escape(title)}</text>',
        *_legend({name for _, found, _ in rows for name in _present(found)}),
        *_axis(low, high, x, height),
    ]
    for number, (label, found, floor) in enumerate(rows):
        parts += _row(label, found, floor, x=x, y=TOP + LINE * number + LINE / 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _present(found: dict[str, Any]) -> list[str]:
    return [name for name, *_ in SERIES if name in found]


def _ends(found: dict[str, Any], name: str) -> tuple[float, float]:
    return found[name]["ms"].low, found[name]["ms"].high


def _limits(values: list[float]) -> tuple[float, float]:
    """The enclosing 1-2-5 steps."""
    ticks = [s * 10.0**e for e in range(-3, 8) for s in STEPS]
    low = max(t for t in ticks if t <= min(values))
    return low, min(t for t in ticks if t >= max(values) and t > low)


def _axis(low: float, high: float, x: Any, height: int) -> list[str]:
    ticks = [s * 10.0**e for e in range(-3, 8) for s in STEPS if low <= s * 10.0**e <= high]
    parts = []
    for tick in ticks:
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 4}" y2="{height - 34}" '
            f'stroke="#ddd"/><text x="{x(tick):.1f}" y="{height - 18}" {TEXT} '
            f'text-anchor="middle">{tick:g}</text>'
        )
    middle = LEFT + WIDTH / 2
    return [
        *parts,
        f'<text x="{middle}" y="{height - 3}" {TEXT} text-anchor="middle">ms/step</text>',
    ]


def _legend(names: set[str]) -> list[str]:
    parts, at = [], LEFT
    for name, text, colour, mark in SERIES:
        if name in names:
            parts.append(_mark(mark, at, 40, colour))
            parts.append(f'<text x="{at + 10}" y="44" {TEXT}>{text}</text>')
            at += 120
    parts.append(f'<line x1="{at}" x2="{at}" y1="33" y2="47" stroke="#222" stroke-width="2.5"/>')
    return [*parts, f'<text x="{at + 8}" y="44" {TEXT}>floor</text>']


def _row(label: str, found: dict[str, Any], floor: float, *, x: Any, y: float) -> list[str]:
    parts = [
        f'<text x="{LEFT - 12}" y="{y + 4}" {TEXT} text-anchor="end">{escape(label)}</text>',
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y + LINE / 2}" y2="{y + LINE / 2}" '
        f'stroke="#eee"/>',
        f'<line x1="{x(floor):.1f}" x2="{x(floor):.1f}" y1="{y - 9}" y2="{y + 9}" '
        f'stroke="#222" stroke-width="2.5"/>',
    ]
    shown = [series for series in SERIES if series[0] in found]
    for place, (name, _, colour, mark) in enumerate(shown):
        ms, at = found[name]["ms"], y + 6 * (place - (len(shown) - 1) / 2)
        parts.append(
            f'<line x1="{x(ms.low):.1f}" x2="{x(ms.high):.1f}" y1="{at}" y2="{at}" '
            f'stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_mark(mark, x(ms.mid), at, colour))
    return parts


def _mark(kind: str, x: float, y: float, colour: str) -> str:
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}"/>'
    turn = f' transform="rotate(45 {x:.1f} {y})"' if kind == "diamond" else ""
    return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5}" width="7" height="7" fill="{colour}"{turn}/>'
