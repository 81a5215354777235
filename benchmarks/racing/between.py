"""What stands between a step of ours and the floor, from the trace after the rounds."""

from typing import Any

from .judge import MAX_OVER_FLOOR

__all__ = ["describe_bound", "describe_gap", "describe_step"]

LEAST_MS = 0.5  # of a phase or an exchange that is named
DENSE = ("dense forward", "backward", "dense update")
BOUNDS = {"link_ms": "the link", "dense_ms": "the dense layers", "path_ms": "the path of a row"}


def describe_step(trace: dict[str, Any]) -> str:
    """Phases of a traced step with what they wait; then communication that was exposed, by kind.

    Every figure is the mean over ranks of medians over steps.
    """
    *phases, step = trace["phases"]
    named = [_phase(row) for row in phases if row["ms"] >= LEAST_MS]
    every, *rows = trace["communication"]
    kinds = sorted((r for r in rows if r["exchange"]), key=lambda r: -r["exposed_ms"])
    told = [f"{r['exchange']} {r['exposed_ms']:.0f}" for r in kinds if r["exposed_ms"] >= LEAST_MS]
    return (
        f"step {step['ms']:.0f} ms: {', '.join(named)}; exposed {every['exposed_ms']:.0f} of "
        f"{every['in_flight_ms']:.0f} ms in flight" + f" ({', '.join(told)})" * bool(told)
    )


def _phase(row: dict[str, Any]) -> str:
    waiting = f" ({row['waiting_ms']:.0f} waiting)" * (row["waiting_ms"] >= LEAST_MS)
    return f"{row['name']} {row['ms']:.0f}{waiting}"


def describe_bound(floor: dict[str, float]) -> str:
    """Which of the three bounds the floor is."""
    return BOUNDS[max(BOUNDS, key=lambda name: floor[name])]


def describe_gap(result: dict[str, Any], found: dict[str, Any]) -> str | None:
    """For a shape over 1.2 floors, where the rest of the time went; None for one that is not.

    A traced step is waits, dense layers and everything else a rank computes; what of the dense
    layers is above their step alone is processor time that messages and other ranks took.
    """
    floor, trace = result["floor"], result.get("traces", {}).get("ours")
    over = found["ours"]["over_floor"]
    if over <= MAX_OVER_FLOOR:
        return None
    head = f"{over:.2f} floors of {floor['ms']:.0f} ms ({describe_bound(floor)})"
    if trace is None:
        return f"{head}; no trace"
    *phases, step = trace["phases"]
    waits = step["waiting_ms"]
    dense = sum(row["ms"] - row["waiting_ms"] for row in phases if row["name"] in DENSE)
    rest = step["ms"] - waits - dense
    return (
        f"{head}: a traced step of {step['ms']:.0f} ms waits {waits:.0f}, spends {dense:.0f} on "
        f"dense layers (alone {floor['dense_ms']:.0f}) and {rest:.0f} on other work"
    )
