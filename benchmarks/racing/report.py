"""The report of a race: Markdown, JSON and the plot, from the stored shapes."""

import dataclasses
from pathlib import Path
from typing import Any

from harness.pages import table, word, write_page
from harness.shapes import Shape

from .between import describe_gap, describe_step
from .goals import Verdict, judge_goals
from .judge import MAX_LOSSY_GAP, refusal, summarise
from .plot import draw

__all__ = ["label_of", "markdown", "write_report"]

CAUTION = """\
Both train the same DLRM on the same ids from the same initial weights with the same optimiser.
All contestants of a shape are alive at once and run one at a time in turn; the first step of a
round is left out. Ranks of all hosts share this machine's cores: compare within a line, not lines.
[What may be claimed from such figures](../../docs/measuring.md).

* ms/step: median over rounds of the mean of a round, and the interval of the median [low, high].
* forecast: what the cost model says of ours, from `rowmesh calibrate` on these hosts; the bytes of
  every step were predicted exactly, or the shape would have been refused.
* times as fast: theirs / ours, paired by round, median [low, high]; above 1 rowmesh is faster.
  TorchRec's "exact" and "lossy" are the best of its settings; "plain" is table-wise fp32 without
  its pipeline.
* MB: sent by a host's NIC, a step, the mean over hosts.
* floor: the least time and bytes of an exact step (formula in benchmarks/racing/floor.py),
  from the ids, the link rate and a dense step measured between the rounds. Homes are chosen
  without knowing the ids: rows placed to suit these batches would send less, and so might a home
  that moves, a bag half pooled and half rows, and lossy numbers, all outside this floor.
"""
LOSSY = f"""\
rowmesh's lossy setting is the fastest of its best exact one with bf16, or with int8 but for dense
gradients, and of what its planner takes if it may be lossy; its label is E3 (docs/exactness.md).
Its first ten losses are within {MAX_LOSSY_GAP:g} of the exact ones ("loss gap" below), or the shape
would have been refused: that finds faults; what codecs do to quality is in docs/codecs.md.
"""
BETWEEN = """\
A few steps of the exact setting, traced after the rounds (docs/trace.md): tracing makes a step a
little longer. "Exposed" is communication during which a rank could only wait.
"""
ROLES = {
    "ours": "rowmesh",
    "ours_lossy": "rowmesh lossy",
    "theirs": "TorchRec",
    "theirs_plain": "TorchRec plain",
    "theirs_lossy": "TorchRec lossy",
}
SPEEDUPS = {
    "ours/theirs": "exact / exact",
    "ours/theirs_plain": "exact / plain",
    "ours/theirs_lossy": "exact / lossy",
    "ours_lossy/theirs": "lossy / exact",
    "ours_lossy/theirs_plain": "lossy / plain",
    "ours_lossy/theirs_lossy": "lossy / lossy",
}
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]
"""Results and their summaries."""


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
    rows = [(label_of(r), s, r["floor"]["ms"]) for r, s in zip(good, summaries, strict=True)]
    picture = draw(rows, title="ms/step, median and interval over rounds") if good else None
    page = markdown(results, plot=f"{out.name}.svg")
    write_page(out, page, document, picture=picture)


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
        if any("ours_lossy" in r["entries"] for r in good):
            lines += [LOSSY]
        lines += [f"![ms/step of every shape]({plot})", ""]
        pairs = [(r, summarise(r)) for r in good]
        verdicts = judge_goals(pairs)
        if verdicts:
            lines += ["## Goals", "", *_goals(verdicts), ""]
        lines += ["## Time", "", *_times(pairs), "", "## Times as fast", "", *_speedups(pairs), ""]
        lines += ["## Bytes and floor", "", *_bytes(pairs), ""]
        lines += ["## Where a step of ours goes", "", BETWEEN, *_between(pairs), ""]
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


def _goals(verdicts: list[Verdict]) -> list[str]:
    rows = []
    for verdict in verdicts:
        goal = verdict.goal
        rows.append(
            [
                label_of({"shape": dataclasses.asdict(goal.shape)}),
                f"{ROLES[goal.ours]} / {ROLES[goal.theirs]}",
                f"{goal.least:g}x",
                verdict.found.told(2),
                word(verdict.holds),
                word(verdict.holds_throughout),
                f"{verdict.over_floor:.2f}",
                word(verdict.is_near_floor),
            ]
        )
    heads = ["shape", "who", "goal", "times as fast", "reached", "by all of the interval"]
    return table([*heads, "ours / floor", "at most 1.2"], rows)


def _shown(pairs: Pairs) -> list[str]:
    return [role for role in ROLES if any(role in found for _, found in pairs)]


def _times(pairs: Pairs) -> list[str]:
    shown = _shown(pairs)
    heads = ["shape", *(f"{ROLES[role]} ms" for role in shown)]
    heads.insert(2, "forecast")
    rows = []
    for result, found in pairs:
        cells = [found[role]["ms"].told(0) if role in found else "" for role in shown]
        cells.insert(1, f"{result['forecast_ms']['total']:.0f}")
        rows.append([label_of(result), *cells])
    return table(heads, rows)


def _speedups(pairs: Pairs) -> list[str]:
    shown = [key for key in SPEEDUPS if any(key in found["speedups"] for _, found in pairs)]
    rows = []
    for result, found in pairs:
        known = found["speedups"]
        cells = [known[key].told(2) if key in known else "" for key in shown]
        rows.append([label_of(result), *cells])
    return table(["shape", *(SPEEDUPS[key] for key in shown)], rows)


def _bytes(pairs: Pairs) -> list[str]:
    shown = _shown(pairs)
    heads = [f"MB {ROLES[role]}" for role in shown]
    rows = []
    for result, found in pairs:
        floor = result["floor"]
        sent = [_number(found[r]["megabytes"]) if r in found else "" for r in shown]
        cells = [f"{found['ours']['samples_s']:,.0f}", *sent, _number(floor["megabytes"])]
        over = f"{found['ours']['over_floor']:.2f}"
        rows.append([label_of(result), *cells, f"{floor['ms']:.0f}", over])
    return table(
        ["shape", "samples/s rowmesh", *heads, "least MB", "floor ms", "ours / floor"], rows
    )


def _between(pairs: Pairs) -> list[str]:
    lines = []
    for result, found in pairs:
        trace = result.get("traces", {}).get("ours")
        told = "no trace" if trace is None else describe_step(trace)
        lines.append(f"* {label_of(result)}: {told}.")
        gap = describe_gap(result, found)
        lines += [f"  Over the floor: {gap}."] * (gap is not None)
    return lines


def _settings(pairs: Pairs) -> list[str]:
    shown = _shown(pairs)
    rows = []
    for result, found in pairs:
        entries = result["entries"]
        names = [_setting(entries[role]) if role in entries else "" for role in shown]
        gaps = [f"{found[role]['loss_gap']:.0e}" if role in found else "" for role in shown[1:]]
        rows.append([label_of(result), *names, *gaps])
    gaps = [f"loss gap, {ROLES[role]}" for role in shown[1:]]
    return table(["shape", *(ROLES[role] for role in shown), *gaps], rows)


def _setting(entry: dict[str, Any]) -> str:
    """Its name; of ours also the label, and what the planner was free to choose."""
    words = [entry["name"]]
    plan = entry.get("plan", {})
    if "exactness" in entry:
        words.append(entry["exactness"])
    if "depth" in plan:
        words.append(f"depth {plan['depth']}")
        words += [f"{plan['hot_rows']} hot rows"] * bool(plan["hot_rows"])
        words += [f"{plan['host_rows']} rows a host"] * bool(plan["host_rows"])
        if plan["codecs"] != "none":
            words.append(_codecs(plan["codecs"]))
    return ", ".join(words)


def _codecs(text: str) -> str:
    """One word if all five edges have the same codec."""
    pairs = [pair.split(": ") for pair in text.split(", ")]
    names = {name for _, name in pairs}
    if len(pairs) == 5 and len(names) == 1:
        return f"all {names.pop()}"
    return "; ".join(": ".join(pair) for pair in pairs)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _plain(summary: Any) -> Any:
    if dataclasses.is_dataclass(summary) and not isinstance(summary, type):
        return dataclasses.asdict(summary)
    if isinstance(summary, dict):
        return {key: _plain(value) for key, value in summary.items()}
    return summary
