"""A trace's summary as text, at most 100 columns wide."""

from rowmesh.topology import Link
from rowmesh.trace.summary import CommunicationRow, Summary

__all__ = ["format_summary"]

_NAME, _CELL = 26, 12  # columns; longer names are cut


def format_summary(summary: Summary) -> str:
    """Three blocks: phases of a step, communication, bytes by edge."""
    parts = [_head(summary), _phases(summary)]
    if len(summary.communication) > 1:
        parts.append(_communication(summary))
    if summary.sent_mb:
        parts.append(_bytes(summary))
    return "\n\n".join(parts)


def _head(summary: Summary) -> str:
    first, last, num = summary.steps[0], summary.steps[-1], len(summary.steps)
    where = f"{summary.ranks} ranks" if summary.ranks > 1 else "1 rank"
    where += f" on {summary.hosts} hosts" if summary.hosts > 1 else ""
    lines = [
        f"trace of steps {first} to {last} on {where}",
        f"ms a step: median of {num} steps, mean of ranks; only in a single step do rows add up",
    ]
    if summary.is_full:
        lines.append("a rank had too many events: later steps were not recorded")
    return "\n".join(lines)


def _phases(summary: Summary) -> str:
    lines = [_line("phase", "ms", "waiting", "slowest", "which is")]
    for row in summary.phases:
        times = (row.ms, row.waiting_ms, row.slowest_ms)
        cells = [f"{ms:.3f}" for ms in times]
        lines.append(_line(row.name, *cells, f"rank {row.slowest_rank}"))
    return "\n".join(lines)


def _communication(summary: Summary) -> str:
    lines = [_line("communication", "in flight", "exposed", "hidden")]
    for row in summary.communication:
        times = (row.in_flight_ms, row.exposed_ms, row.hidden_ms)
        lines.append(_line(_name_of(row), *(f"{ms:.3f}" for ms in times)))
    return "\n".join(lines)


def _name_of(row: CommunicationRow) -> str:
    if not row.lane:
        return "all lanes"
    return f"  {row.exchange}" if row.exchange else f"lane {row.lane}"


def _bytes(summary: Summary) -> str:
    links = (Link.HOST.value, Link.CROSS.value)
    lines = [_line("sent, MB a rank and step", "in host", "across")]
    for edge, sent in summary.sent_mb.items():
        lines.append(_line(edge, *(f"{sent.get(link, 0.0):.4f}" for link in links)))
    totals = [sum(sent.get(link, 0.0) for sent in summary.sent_mb.values()) for link in links]
    lines.append(_line("all edges", *(f"{total:.4f}" for total in totals)))
    return "\n".join(lines)


def _line(name: str, *cells: str) -> str:
    return f"{name[:_NAME]:<{_NAME}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
