"""Paired differences of codecs to fp32 beside the spread of fp32 over seeds, as Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from harness.figures import Difference, paired
from harness.pages import table, word

from .runs import CONTROL

__all__ = ["Verdict", "judge", "markdown"]

Runs = Sequence[Mapping[str, Any]]
HOW = """\
Real ranks over loopback: codecs act on what crosses the wire, so at two ranks on about half of the
rows and gradients, on all sums of hot rows and dense layers; more ranks cross more. All arms of a
seed share samples, their order, initial values and the plan (row-wise, 64 hot rows) and differ by
the codec alone. A seed has initial values and training samples (or their order) of its own; truth
and held-out samples are the same for all seeds. Learning rates fall to 0 in a line; the grid
multiplies both of them.

* best rate: of the arm's own grid, by mean NE.
* loss: 100 (NE / NE of fp32 - 1), each arm at its best rate, paired by seed: mean [95 % interval of
  Student's t], and the standard error. Positive is worse than fp32.
* spread: standard deviation of fp32's own NE over seeds, in % of its mean.
* within: the mean loss is at most the spread; "throughout": so is the upper end of the interval.
* The control rounds every gradient to -1, 0 or 1 times the largest number of its tensor before it
  is sent; if it does not lose more than the spread, the data is no test.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """An arm beside fp32 on one set, each at its best rate; ``spread`` and losses are in %."""

    arm: str
    rate: float
    ne: float
    loss: Difference
    spread: float

    @property
    def is_within(self) -> bool:
        """The mean loss is at most the spread (false if a run diverged)."""
        return self.loss.mean <= self.spread

    @property
    def is_within_throughout(self) -> bool:
        """All of its interval is."""
        return self.loss.high <= self.spread


def judge(runs: Runs) -> list[Verdict]:
    """One verdict an arm of the runs of one set, fp32 first, with a loss of 0."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    base = _values(runs, "fp32", _best_rate(runs, "fp32"))
    spread = 100.0 * stdev(base) / fmean(base)
    found = []
    for arm in arms:
        rate = _best_rate(runs, arm)
        values = _values(runs, arm, rate)
        loss = paired(values, base)
        found.append(Verdict(arm=arm, rate=rate, ne=fmean(values), loss=loss, spread=spread))
    return found


def _values(runs: Runs, arm: str, rate: float, key: str = "ne") -> list[Any]:
    mine = [run for run in runs if (run["arm"], run["rate"]) == (arm, rate)]
    return [run[key] for run in sorted(mine, key=lambda run: int(run["seed"]))]


def _best_rate(runs: Runs, arm: str) -> float:
    rates = sorted({run["rate"] for run in runs if run["arm"] == arm})
    means = {rate: fmean(_values(runs, arm, rate)) for rate in rates}
    return min(means, key=lambda rate: math.inf if math.isnan(means[rate]) else means[rate])


def markdown(document: Mapping[str, Any]) -> str:
    """The page."""
    about = document["about"]
    lines = [
        "# What codecs do to quality",
        "",
        f"{about['date']}; commit {about['commit']}; torch {about['torch']}; {about['machine']}; "
        f"{about['ranks']} ranks; seeds {', '.join(map(str, about['seeds']))}.",
        *("", "```", about["command"], "```", ""),
        HOW,
    ]
    for name, note in document["sets"].items():
        runs = [run for run in document["runs"] if run["set"] == name]
        lines += [f"## {name}", "", note, ""]
        if runs:
            lines += [*_section(runs), ""]
    return "\n".join(lines)


def _section(runs: Runs) -> list[str]:
    verdicts = judge(runs)
    spread = verdicts[0].spread
    heads = ["arm", "label", "MB", "best rate", "NE", "loss %", "standard error", "within"]
    rows = []
    for verdict in verdicts:
        first = next(run for run in runs if run["arm"] == verdict.arm)
        is_base = verdict.arm == "fp32"
        words = [word(verdict.is_within), word(verdict.is_within_throughout)]
        rows.append(
            [
                verdict.arm,
                first["exactness"],
                f"{first['mb_step']:.3f}",
                f"{verdict.rate:g}",
                f"{verdict.ne:.5f}",
                "" if is_base else str(verdict.loss),
                "" if is_base else f"{verdict.loss.error:.3f}",
                *([""] * 2 if is_base else words),
            ]
        )
    return [
        *table([*heads, "throughout"], rows),
        "",
        _sentence(verdicts),
        f"Spread of fp32 over seeds: {spread:.3f} %, its NE: {_list(_base(runs))}.",
        *_truth(runs),
        "",
        "Loss % at each rate (against fp32 at the same rate), then by tenths of the held-out",
        "samples, those with the rarest rows first, at the best rates:",
        "",
        *_by_rate(runs, verdicts),
        "",
        *_by_decile(runs, verdicts),
    ]


def _base(runs: Runs) -> list[float]:
    return _values(runs, "fp32", _best_rate(runs, "fp32"))


def _sentence(verdicts: Sequence[Verdict]) -> str:
    codecs = [v for v in verdicts if v.arm not in ("fp32", CONTROL)]
    worse = [v.arm for v in codecs if not v.is_within]
    told = "NE of every codec is" if not worse else f"NE of all codecs but {', '.join(worse)} is"
    (control,) = (v for v in verdicts if v.arm == CONTROL)
    tests = "loses more, as it must" if not control.is_within else "does NOT lose more: no test"
    return f"**{told} within the seeds' spread of fp32; the control {tests}.**"


def _truth(runs: Runs) -> list[str]:
    if runs[0]["bayes_ne"] is None:
        return []
    known = ", ".join(
        f"{v.arm} {fmean(_values(runs, v.arm, v.rate, 'mean_kl')):.5f}" for v in judge(runs)
    )
    return [f"NE of the truth itself: {runs[0]['bayes_ne']:.5f}; mean KL(p* || p): {known}."]


def _by_rate(runs: Runs, verdicts: Sequence[Verdict]) -> list[str]:
    rates = sorted({run["rate"] for run in runs})
    rows = [["fp32, NE", *(f"{fmean(_values(runs, 'fp32', rate)):.5f}" for rate in rates)]]
    for verdict in verdicts[1:]:
        losses = [paired(_values(runs, verdict.arm, r), _values(runs, "fp32", r)) for r in rates]
        rows.append([verdict.arm, *map(str, losses)])
    return table(["arm", *(f"rate {rate:g}" for rate in rates)], rows)


def _by_decile(runs: Runs, verdicts: Sequence[Verdict]) -> list[str]:
    base = _values(runs, "fp32", verdicts[0].rate, "ne_deciles")
    rows = []
    for verdict in verdicts[1:]:
        mine = _values(runs, verdict.arm, verdict.rate, "ne_deciles")
        cells = []
        for tenth in range(10):
            pairs = [(m[tenth], b[tenth]) for m, b in zip(mine, base, strict=True)]
            known = [100.0 * (m / b - 1.0) for m, b in pairs if m is not None and b is not None]
            cells.append(f"{fmean(known):+.2f}" if known else "")
        rows.append([verdict.arm, *cells])
    return table(["arm", *(str(tenth + 1) for tenth in range(10))], rows)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.5f}" for value in values)
