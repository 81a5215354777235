"""What the rounds of a shape say, and when they may not be reported at all."""

import math
from typing import Any

from harness.figures import interval, ratio, round_ms

__all__ = ["MAX_LOSSY_GAP", "MAX_OVER_FLOOR", "refusal", "summarise"]

MAX_LOSS_GAP = 1e-3
# Of our lossy setting to our exact one: against faults, not for quality. AdaGrad's first step is
# as long for a small gradient as for a large one, so the second loss, about 1.8, hangs on what
# rounding leaves of small ones; without its dense gradients it would be 1.1 less.
MAX_LOSSY_GAP = 0.2
MAX_OVER_FLOOR = 1.2  # beyond, the report says what stands between
NUM_LOSSES = 10
MAX_NIC_SHARE = 1.06


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
            found["speedups"][f"{ours}/{theirs}"] = ratio(times[theirs], times[ours])
    return found


def _megabytes(rounds: list[dict[str, Any]]) -> float | None:
    """Sent a host and step, the mean over hosts."""
    if rounds[0]["nic"][0] is None:
        return None
    steps = sum(len(r["ms"]) for r in rounds)
    hosts = len(rounds[0]["nic"])
    sent: int = sum(host[0] for r in rounds for host in r["nic"])
    return sent / hosts / steps / 1e6
