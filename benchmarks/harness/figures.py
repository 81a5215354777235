"""What rounds and seeds say: medians with intervals, and paired differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

__all__ = ["Difference", "Interval", "interval", "paired", "ratio", "round_ms"]

COVERAGE: Final = 0.95
# Student's t, two-sided 95 %, for 1 to 29 degrees of freedom
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median over rounds and where the true one lies with probability ``coverage`` at least."""

    low: float
    mid: float
    high: float
    coverage: float

    def told(self, digits: int) -> str:
        """As ``0.96 [0.94, 1.00]``."""
        return f"{self.mid:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def interval(values: Sequence[float]) -> Interval:
    """The sample median and the narrowest pair of order statistics that covers the true median.

    For n independent rounds of any distribution the k-th smallest and k-th largest enclose the
    median with probability 1 - 2 P(Binomial(n, 1/2) < k). k is the largest with 95 %; below six
    rounds there is none, and smallest and largest stand with what they cover (five: 93.75 %).
    """
    ordered, n = sorted(values), len(values)
    k = max([1, *(k for k in range(1, n // 2 + 1) if _covers(n, k) >= COVERAGE)])
    return Interval(
        low=ordered[k - 1], mid=median(ordered), high=ordered[-k], coverage=_covers(n, k)
    )


def _covers(n: int, k: int) -> float:
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / float(2**n)


def ratio(values: Sequence[float], over: Sequence[float]) -> Interval:
    """Of ``values / over``, round by round, so that a drift of the machine meets both."""
    return interval([a / b for a, b in zip(values, over, strict=True)])


def round_ms(ms: list[float]) -> float:
    """ms/step of a round: the mean of its steps without the first.

    The first finds cold caches, another contestant having run before; it is left out for all. A
    mean, because a schedule may make every other step longer; medians are taken over rounds.
    """
    return fmean(ms[1:])


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
