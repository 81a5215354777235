"""The report of a race: Markdown, JSON and the plot, from the stored shapes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from .judge import Interval, refusal, summarise
from .plot import draw
from .shapes import Shape

__all__ = ["label_of", "markdown", "write_report"]

CAUTION = """\
Both train the same DLRM on the same ids from the same initial weights with the same optimiser.
All contestants of a shape are alive at once and run one at a time in turn; the first step of a
round is left out. Ranks of all hosts share this machine's cores: compare within a line, not lines.
[What may be claimed from such figures](../../docs/measuring.md).

* ms/step: median over rounds of the mean of a round, and the interval of the median [low, high].
* forecast: what the cost model says of ours, from `rowmesh calibrate` on these hosts; the bytes of
  every step were predicted exactly, or the shape would have been refused.
* ratio: ours / theirs, paired by round, median [low, high]; below 1 rowmesh is faster.
* MB: sent by a host's NIC, a step, the mean over hosts.
* floor: the least time and bytes of an exact step (formula in benchmarks/racing/floor.py),
  from the ids, the link rate and a dense step measured between the rounds. Homes are chosen
  without knowing the ids: rows placed to suit these batches would send less, and so might a home
  that moves, a bag half pooled and half rows, and lossy numbers, all outside this floor.
"""
NO_CODEC = "Here is no lossy setting of rowmesh: its exact one is beside TorchRec's lossy one."


def write_report(results: list[dict[str, Any]], out: Path) -> None:
    """``OUT.md``, ``OUT.json`` and ``OUT.svg``. Refused shapes are named, with no figures.

    Args:
        results: As stored: a shape's result, or its shape and why it was refused.
        out: The path without a suffix.
    """
    good = [r for r in results if "refused" not in r]
    for result in good:  # a stored file is not believed: the rules are applied again
        reason = refusal(result)
        if reason is not None:
            raise ValueError(f"{label_of(result)}: {reason}")
    summaries = [summarise(result) for result in good]
    document = {
        "shapes": [r | {"summary": _plain(s)} for r, s in zip(good, summaries, strict=True)],
        "refused": [{k: r[k] for k in ("shape", "refused")} for r in results if "refused" in r],
    }
    _write(out, ".json", json.dumps(document, indent=1) + "\n")
    _write(out, ".md", markdown(results, plot=f"{out.name}.svg"))
    if good:
        rows = [(label_of(r), s, r["floor"]["ms"]) for r, s in zip(good, summaries, strict=True)]
        _write(out, ".svg", draw(rows, title="ms/step, median and interval over rounds"))


def label_of(result: dict[str, Any]) -> str:
    """``2x1 200mbit p20 α1.2``."""
    shape = Shape(**result["shape"])
    rate = f" {shape.rate}" if shape.rate else ""
    return f"{shape.hosts}x{shape.local}{rate} p{shape.pooling} α{shape.alpha:g}"


def markdown(results: list[dict[str, Any]], *, plot: str) -> str:
    """The page: what ran, times, bytes and floors, settings, refusals."""
    good = [r for r in results if "refused" not in r]
    refused = [r for r in results if "refused" in r]
    lines = ["# rowmesh beside TorchRec", ""]
    if good:
        lines += [_what_ran(good), "", CAUTION]
        if not any("ours_lossy" in r["entries"] for r in good):
            lines += [NO_CODEC, ""]
        lines += [f"![ms/step of every shape]({plot})", ""]
        pairs = [(r, summarise(r)) for r in good]
        lines += ["## Time", "", *_times(pairs), "", "## Bytes and floor", "", *_bytes(pairs), ""]
        lines += ["## Settings that the trials chose", "", *_settings(pairs), ""]
    if refused:
        lines += ["## Refused", ""]
        lines += [f"* {label_of(r)}: {_short(r['refused'])}" for r in refused]
        lines.append("")
    return "\n".join(lines)


def _short(reason: str) -> str:
    """Who, and a contestant's last words."""
    lines = reason.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def _what_ran(good: list[dict[str, Any]]) -> str:
    of = good[0]["session"]
    coverage = min(summarise(r)["ours"]["ms"].coverage for r in good)
    dates = sorted({r["session"]["date"] for r in good})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    entries = good[0]["entries"]
    versions = entries["ours"]["versions"] | entries["theirs"]["versions"]
    names = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    return (
        f"{when}; commit {of['commit']}; {names}; {of['machine']}. "
        f"{len(good[0]['rounds'])} rounds of "
        f"{len(good[0]['rounds'][0]['ours']['ms'])} steps; intervals cover {coverage:.1%}. "
        f"Tables capped at {of['settings']['cap']:g} rows, dim {of['settings']['dim']}, batch "
        f"{of['settings']['batch']} a rank.\n\n```\n{of['command']}\n```"
    )


def _times(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    columns = ["ours", "ours_lossy", "theirs", "theirs_lossy"]
    names = ["rowmesh ms", "rowmesh lossy ms", "TorchRec ms", "TorchRec lossy ms"]
    shown = [c for c in columns if any(c in s for _, s in pairs)]
    heads = ["shape", *(n for c, n in zip(columns, names, strict=True) if c in shown)]
    heads.insert(2, "forecast")
    rows = []
    for result, found in pairs:
        cells = [_range(found[c]["ms"], 0) if c in found else "" for c in shown]
        cells.insert(1, f"{result['forecast_ms']['total']:.0f}")
        ratios = [_range(found[c]["ratio"], 2) for c in ("theirs", "theirs_lossy")]
        rows.append([label_of(result), *cells, *ratios])
    return _table([*heads, "ratio, exact", "ratio, lossy"], rows)


def _bytes(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    heads = ["shape", "samples/s ours", "theirs", "lossy", "MB ours", "theirs", "lossy"]
    rows = []
    for result, found in pairs:
        roles = ("ours", "theirs", "theirs_lossy")
        speeds = [f"{found[r]['samples_s']:,.0f}" for r in roles]
        sent = [_number(found[r]["megabytes"]) for r in roles]
        floor = [_number(result["floor"]["megabytes"]), f"{result['floor']['ms']:.0f}"]
        rows.append([label_of(result), *speeds, *sent, *floor, f"{found['over_floor']:.2f}"])
    return _table([*heads, "least MB", "floor ms", "ours / floor"], rows)


def _settings(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    rows = []
    for result, found in pairs:
        names = [result["entries"][r]["name"] for r in ("ours", "theirs", "theirs_lossy")]
        rows.append([label_of(result), *names, f"{found['loss_gap']:.0e}"])
    return _table(["shape", "rowmesh", "TorchRec", "TorchRec lossy", "loss gap"], rows)


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(heads) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows)]


def _range(value: Interval, digits: int) -> str:
    return f"{value.mid:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _plain(summary: Any) -> Any:
    if dataclasses.is_dataclass(summary) and not isinstance(summary, type):
        return dataclasses.asdict(summary)
    if isinstance(summary, dict):
        return {key: _plain(value) for key, value in summary.items()}
    return summary


def _write(out: Path, suffix: str, text: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + suffix).write_text(text)
