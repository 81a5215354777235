"""What the rounds of a shape say, and when they may not be reported at all."""

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

__all__ = ["Interval", "interval", "refusal", "round_ms", "summarise"]

MAX_LOSS_GAP = 1e-3
NUM_LOSSES = 10
MAX_NIC_SHARE = 1.06
COVERAGE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median over rounds and where the true one lies with probability ``coverage`` at least."""

    low: float
    mid: float
    high: float
    coverage: float


def interval(values: list[float]) -> Interval:
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


def round_ms(ms: list[float]) -> float:
    """ms/step of a round: the mean of its steps without the first.

    The first finds cold caches, another contestant having run before; it is left out for all. A
    mean, because a schedule may make every other step longer; medians are taken over rounds.
    """
    return fmean(ms[1:])


def refusal(result: dict[str, Any]) -> str | None:
    """Why the shape must not be reported, or None.

    Refused are losses that differ by more than 1e-3 in the first ten steps (or are not numbers),
    bytes that were not predicted, and a ledger that is not within [NIC / 1.06, NIC] on any host
    with a link.
    """
    ours, theirs = _first_losses(result)
    is_short = min(len(ours), len(theirs)) < NUM_LOSSES
    if is_short or not all(map(math.isfinite, (*ours, *theirs))):
        return f"the first {NUM_LOSSES} losses are not {NUM_LOSSES} numbers: {ours} and {theirs}"
    gap = _loss_gap(result)
    if gap > MAX_LOSS_GAP:
        return (
            f"the first {NUM_LOSSES} losses differ by up to {gap:.2e} (limit {MAX_LOSS_GAP:.0e}): "
            f"the two do not train the same model"
        )
    if not all(r["ours"]["bytes_are_exact"] for r in result["rounds"]):
        return "rowmesh sent other bytes than rm.predict says"
    for host, (nic, ledger) in enumerate(_bytes_of_ours(result)):
        if nic is not None and not ledger <= nic <= MAX_NIC_SHARE * ledger:
            return (
                f"host {host} sent {nic} bytes where the ledger says {ledger}: the NIC must be "
                f"within 1 and {MAX_NIC_SHARE} times the ledger"
            )
    return None


def _first_losses(result: dict[str, Any]) -> tuple[list[float], list[float]]:
    ours, theirs = (result["entries"][role]["losses"] for role in ("ours", "theirs"))
    return ours[:NUM_LOSSES], theirs[:NUM_LOSSES]


def _loss_gap(result: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(*_first_losses(result), strict=True))


def _bytes_of_ours(result: dict[str, Any]) -> list[tuple[int | None, int]]:
    """(sent on the NIC, in the ledger) of every host over all rounds."""
    rounds = [r["ours"] for r in result["rounds"]]
    found: list[tuple[int | None, int]] = []
    for host in range(result["shape"]["hosts"]):
        nics = [r["nic"][host] for r in rounds]
        nic = None if None in nics else sum(n[0] for n in nics)
        found.append((nic, sum(r["ledger"][host] for r in rounds)))
    return found


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Figures of the report: medians with intervals, ratios paired by round, bytes, floor."""
    shape, rounds = result["shape"], result["rounds"]
    world = shape["hosts"] * shape["local"]
    found: dict[str, Any] = {}
    times = {role: [round_ms(r[role]["ms"]) for r in rounds] for role in result["entries"]}
    for role, values in times.items():
        ms = interval(values)
        found[role] = {
            "ms": ms,
            "samples_s": result["batch"] * world / ms.mid * 1e3,
            "megabytes": _megabytes([r[role] for r in rounds]),
        }
        if role != "ours":
            paired = [a / b for a, b in zip(times["ours"], values, strict=True)]
            found[role]["ratio"] = interval(paired)
    found["over_floor"] = found["ours"]["ms"].mid / result["floor"]["ms"]
    found["loss_gap"] = _loss_gap(result)
    return found


def _megabytes(rounds: list[dict[str, Any]]) -> float | None:
    """Sent a host and step, the mean over hosts."""
    if rounds[0]["nic"][0] is None:
        return None
    steps = sum(len(r["ms"]) for r in rounds)
    hosts = len(rounds[0]["nic"])
    sent: int = sum(host[0] for r in rounds for host in r["nic"])
    return sent / hosts / steps / 1e6
