"""Coverage curves as SVG: share of the rows, hottest first, against share of the requests."""

import html
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["Curve", "draw_curves"]

_WIDTH, _HEIGHT = 920, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 48
_TICKS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


class Curve(NamedTuple):
    """A named line; ``rows`` and ``requests`` are shares, ascending."""

    name: str
    rows: Sequence[float]
    requests: Sequence[float]
    colour: str
    is_bold: bool = False


def draw_curves(curves: Sequence[Curve]) -> str:
    """An ``<svg>`` element; x is logarithmic, from the smallest share of any curve to 1."""
    least = min(curve.rows[0] for curve in curves)
    decades = max(1, math.ceil(-math.log10(least) - 1e-9))
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="coverage curves">',
        *_axes(decades),
        *(_line(curve, decades) for curve in curves),
        "</svg>",
    ]
    return "\n".join(parts)


def _x(share: float, decades: int) -> float:
    place = 1.0 + math.log10(max(share, 10.0**-decades)) / decades
    return _LEFT + place * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(decades: int) -> list[str]:
    left, right, low, high = _LEFT, _WIDTH - _RIGHT, _y(0.0), _y(1.0)
    found = []
    for share in _TICKS:
        y = _y(share)
        found.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        found.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for exponent in range(-decades, 1):
        x, label = _x(10.0**exponent, decades), f"{100 * 10.0**exponent:.10g}%"
        found.append(f'<path class="grid" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        found.append(f'<text x="{x:.1f}" y="{low + 18:.1f}" text-anchor="middle">{label}</text>')
    middle = (left + right) / 2
    text = "share of the rows, hottest first; requests that go to them upwards"
    found.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{text}</text>')
    return found


def _line(curve: Curve, decades: int) -> str:
    pairs = zip(curve.rows, curve.requests, strict=True)
    points = " ".join(f"{_x(x, decades):.1f},{_y(y):.1f}" for x, y in pairs)
    width = 3 if curve.is_bold else 1.3
    return (
        f'<polyline points="{points}" fill="none" style="stroke:{curve.colour}" '
        f'stroke-width="{width}"><title>{html.escape(curve.name)}</title></polyline>'
    )
