"""What the rounds of a shape say, and when they may not be reported at all."""

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

__all__ = [
    "MAX_LOSSY_GAP",
    "MAX_OVER_FLOOR",
    "Interval",
    "interval",
    "refusal",
    "round_ms",
    "summarise",
]

MAX_LOSS_GAP = 1e-3
# Of our lossy setting to our exact one: against faults, not for quality. AdaGrad's first step is
# as long for a small gradient as for a large one, so the second loss, about 1.8, hangs on what
# rounding leaves of small ones; without its dense gradients it would be 1.1 less.
MAX_LOSSY_GAP = 0.2
MAX_OVER_FLOOR = 1.2  # beyond, the report says what stands between
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

    Refused are losses of exact settings that differ from ours by more than 1e-3 in the first ten
    steps (or are not numbers), losses of our lossy setting that differ from our exact one's by
    more than 0.2, bytes of ours that were not predicted, and a ledger of ours that is not within
    [NIC / 1.06, NIC] on any host with a link. What TorchRec's lossy setting loses is reported.
    """
    limits = {"theirs": MAX_LOSS_GAP, "theirs_plain": MAX_LOSS_GAP, "ours_lossy": MAX_LOSSY_GAP}
    for role in (role for role in limits if role in result["entries"]):
        ours, others = _first_losses(result, "ours"), _first_losses(result, role)
        is_short = min(len(ours), len(others)) < NUM_LOSSES
        if is_short or not all(map(math.isfinite, (*ours, *others))):
            return (
                f"the first {NUM_LOSSES} losses of ours and {role} are not {NUM_LOSSES} numbers: "
                f"{ours} and {others}"
            )
        gap = _loss_gap(result, role)
        if gap > limits[role]:
            return (
                f"the first {NUM_LOSSES} losses differ by up to {gap:.2e} between ours and {role} "
                f"(limit {limits[role]:.0e}): the two do not train the same model"
            )
    for role in (role for role in ("ours", "ours_lossy") if role in result["entries"]):
        reason = _wrong_bytes(result, role)
        if reason is not None:
            return reason
    return None


def _wrong_bytes(result: dict[str, Any], role: str) -> str | None:
    if not all(r[role]["bytes_are_exact"] for r in result["rounds"]):
        return "rowmesh sent other bytes than rm.predict says" + f" ({role})" * (role != "ours")
    for host, (nic, ledger) in enumerate(_bytes_of(result, role)):
        if nic is not None and not ledger <= nic <= MAX_NIC_SHARE * ledger:
            return (
                f"host {host} sent {nic} bytes where the ledger of {role} says {ledger}: the NIC "
                f"must be within 1 and {MAX_NIC_SHARE} times the ledger"
            )
    return None


def _first_losses(result: dict[str, Any], role: str) -> list[float]:
    found: list[float] = result["entries"][role]["losses"][:NUM_LOSSES]
    return found


def _loss_gap(result: dict[str, Any], role: str) -> float:
    """Of a setting to our exact one, the largest of the first ten."""
    losses = zip(_first_losses(result, "ours"), _first_losses(result, role), strict=False)
    return max(abs(a - b) for a, b in losses)


def _bytes_of(result: dict[str, Any], role: str) -> list[tuple[int | None, int]]:
    """(sent on the NIC, in the ledger) of every host over all rounds."""
    rounds = [r[role] for r in result["rounds"]]
    found: list[tuple[int | None, int]] = []
    for host in range(result["shape"]["hosts"]):
        nics = [r["nic"][host] for r in rounds]
        nic = None if None in nics else sum(n[0] for n in nics)
        found.append((nic, sum(r["ledger"][host] for r in rounds)))
    return found


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Figures of the report: medians with intervals, speed-ups paired by round, bytes, floor.

    ``speedups``: for each of ours and each of theirs, theirs / ours, as ``ours/theirs_plain``:
    above 1 rowmesh is faster. ``over_floor`` of our lossy setting, too, is over the floor of exact
    steps, below which it may be.
    """
    shape, rounds = result["shape"], result["rounds"]
    world = shape["hosts"] * shape["local"]
    found: dict[str, Any] = {"speedups": {}}
    times = {role: [round_ms(r[role]["ms"]) for r in rounds] for role in result["entries"]}
    for role, values in times.items():
        ms = interval(values)
        found[role] = {
            "ms": ms,
            "samples_s": result["batch"] * world / ms.mid * 1e3,
            "megabytes": _megabytes([r[role] for r in rounds]),
            "over_floor": ms.mid / result["floor"]["ms"],
            "loss_gap": _loss_gap(result, role),
        }
    for ours in (role for role in times if role.startswith("ours")):
        for theirs in (role for role in times if role.startswith("theirs")):
            paired = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
            found["speedups"][f"{ours}/{theirs}"] = interval(paired)
    return found


def _megabytes(rounds: list[dict[str, Any]]) -> float | None:
    """Sent a host and step, the mean over hosts."""
    if rounds[0]["nic"][0] is None:
        return None
    steps = sum(len(r["ms"]) for r in rounds)
    hosts = len(rounds[0]["nic"])
    sent: int = sum(host[0] for r in rounds for host in r["nic"])
    return sent / hosts / steps / 1e6
