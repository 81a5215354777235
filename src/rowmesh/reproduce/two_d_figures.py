"""Paired differences of normalised entropy with their intervals, and what they amount to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

__all__ = ["Difference", "Figures", "paired"]

# Student's t, two-sided 95 %, for 1 to 29 degrees of freedom
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The mean of paired differences, its standard error, and the ends of its 95 % interval."""

    mean: float
    error: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired(found: Sequence[float], base: Sequence[float]) -> Difference:
    """Of ``100 * (found / base - 1)``, pair by pair: 2 to 30 pairs.

    The interval is mean +- t * error, error = standard deviation / sqrt(pairs), t Student's with
    pairs - 1 degrees of freedom. All are nan if a value is: a run diverged.
    """
    values = [100.0 * (f / b - 1.0) for f, b in zip(found, base, strict=True)]
    middle = fmean(values)
    error = math.sqrt(
        math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1) / len(values)
    )
    width = _T[len(values) - 2] * error
    return Difference(mean=middle, error=error, low=middle - width, high=middle + width)


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
