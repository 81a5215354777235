"""The runs of a data set in pairs: differences of normalised entropy, and what they must show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.harness.figures import Difference, paired
from benchmarks.harness.pages import word

__all__ = ["CONTROL", "SCALED", "Figures", "Verdict", "judge"]

CONTROL, SCALED = "weights c=1", "weights c=M"
_LEAST_LOSS, _NEAR = 0.5, 0.1  # % of NE


class Figures:
    """The runs of one data set, by arm and learning rate, in the order of seeds.

    Args:
        runs: What `measure_runs` gives, of one set.
    """

    def __init__(self, runs: Sequence[Mapping[str, Any]]) -> None:
        self.name = str(runs[0]["set"])
        self._runs: dict[tuple[int, str, float], list[Mapping[str, Any]]] = {}
        for run in sorted(runs, key=lambda run: int(run["seed"])):
            self._runs.setdefault((run["groups"], run["arm"], run["lr"]), []).append(run)
        self.rates = sorted({lr for _, _, lr in self._runs})
        self.seeds = [run["seed"] for run in self._runs[1, "full", self.rates[0]]]

    def arms(self, *, period_1: bool = True) -> list[tuple[int, str]]:
        """(M, arm) of all arms but full; of those that sync every step, or of the others."""
        found = dict.fromkeys((groups, arm) for groups, arm, _ in self._runs if groups > 1)
        return [
            (groups, arm)
            for groups, arm in found
            if (self._first(groups, arm)["period"] == 1) == period_1
        ]

    def _first(self, groups: int, arm: str) -> Mapping[str, Any]:
        return next(runs[0] for (m, a, _), runs in self._runs.items() if (m, a) == (groups, arm))

    def rates_of(self, groups: int, arm: str) -> list[float]:
        """The learning rates at which an arm ran."""
        return [lr for lr in self.rates if (groups, arm, lr) in self._runs]

    def values(self, key: str, groups: int, arm: str, lr: float) -> list[Any]:
        """One figure of an arm, a value a seed."""
        return [run[key] for run in self._runs[groups, arm, lr]]

    def loss(self, groups: int, arm: str, lr: float) -> Difference:
        """% of NE that an arm loses to full model parallelism at the same learning rate."""
        full = self.values("ne", 1, "full", lr)
        return paired(self.values("ne", groups, arm, lr), full)

    def best_rate(self, groups: int, arm: str) -> float:
        """The learning rate at which the mean NE of an arm is least."""
        found = {lr: fmean(self.values("ne", groups, arm, lr)) for lr in self.rates_of(groups, arm)}
        return min(found, key=lambda lr: math.inf if math.isnan(found[lr]) else found[lr])

    def loss_at_best(self, groups: int, arm: str) -> Difference:
        """% of NE that an arm loses to full, each at its own best rate."""
        full = self.values("ne", 1, "full", self.best_rate(1, "full"))
        mine = self.values("ne", groups, arm, self.best_rate(groups, arm))
        return paired(mine, full)

    def decile_losses(self, groups: int, arm: str, lr: float) -> list[float | None]:
        """Mean % of NE lost on each tenth of the held-out samples, rarest rows first."""
        mine, full = self._deciles("ne_deciles", groups, arm, lr)
        return [
            _over(m, f, lambda x, y: 100.0 * (x / y - 1.0)) for m, f in zip(mine, full, strict=True)
        ]

    def moment_ratios(self, groups: int, arm: str, lr: float) -> list[float | None]:
        """Geometric mean of v over full's v on each tenth of the rows, rarest first."""
        mine, full = self._deciles("log_moments", groups, arm, lr)
        found = [_over(m, f, lambda x, y: x - y) for m, f in zip(mine, full, strict=True)]
        return [None if ratio is None else math.exp(ratio) for ratio in found]

    def _deciles(self, key: str, groups: int, arm: str, lr: float) -> tuple[Any, Any]:
        """Of an arm and of full: for every decile the values of all seeds."""
        mine, full = self.values(key, groups, arm, lr), self.values(key, 1, "full", lr)
        return zip(*mine, strict=True), zip(*full, strict=True)


def _over(mine: Any, full: Any, difference: Any) -> float | None:
    pairs = [(m, f) for m, f in zip(mine, full, strict=True) if m is not None and f is not None]
    return fmean(difference(m, f) for m, f in pairs) if pairs else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A demand on M groups, the figure, and whether it fulfils the demand.

    The mean decides; ``holds_throughout`` says whether all of its 95 % interval does.
    """

    groups: int
    demand: str
    figure: str
    holds: bool
    holds_throughout: bool

    def __str__(self) -> str:
        return (
            f"M = {self.groups}, {self.demand}: {word(self.holds)}, {self.figure} "
            f"(all of the interval: {word(self.holds_throughout)})"
        )


def judge(figures: Figures, groups: int) -> list[Verdict]:
    """The three demands on ``groups`` groups.

    At the smallest rate c = 1, the control, loses at least 0.5 % of NE and c = M is within 0.1 %,
    either way; at each arm's best rate no arm but the control is worse than full by over 0.1 %.
    """
    lr = figures.rates[0]
    control, scaled = figures.loss(groups, CONTROL, lr), figures.loss(groups, SCALED, lr)
    others = {
        arm: figures.loss_at_best(groups, arm)
        for m, arm in figures.arms()
        if m == groups and arm != CONTROL
    }
    worst = max(others, key=lambda arm: others[arm].mean)
    return [
        Verdict(
            groups=groups,
            demand=f"lr {lr:g}: control c = 1 loses at least {_LEAST_LOSS} %",
            figure=str(control),
            holds=control.mean >= _LEAST_LOSS,
            holds_throughout=control.low >= _LEAST_LOSS,
        ),
        Verdict(
            groups=groups,
            demand=f"lr {lr:g}: c = M within {_NEAR} % of full",
            figure=str(scaled),
            holds=abs(scaled.mean) <= _NEAR,
            holds_throughout=_is_near(scaled),
        ),
        Verdict(
            groups=groups,
            demand=f"best rates: others at most {_NEAR} % worse",
            figure=f"{others[worst]} {worst.removeprefix('weights ')}",
            holds=all(d.mean <= _NEAR for d in others.values()),
            holds_throughout=all(d.high <= _NEAR for d in others.values()),
        ),
    ]


def _is_near(difference: Difference) -> bool:
    return difference.low >= -_NEAR and difference.high <= _NEAR
