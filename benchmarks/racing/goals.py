"""What the race must show: how many times as fast as TorchRec, shape by shape."""

from dataclasses import dataclass
from typing import Any

from harness.figures import Interval
from harness.shapes import Shape, parse_shapes

from .judge import MAX_OVER_FLOOR

__all__ = ["GOALS", "Goal", "Verdict", "goal_shapes", "judge_goals", "roles_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """At a shape, role ``ours`` is to be ``least`` times as fast as role ``theirs``."""

    shape: Shape
    ours: str
    theirs: str
    least: float


def _goals(layout: str, *wanted: tuple[str, str, float], pooling: int = 1) -> list[Goal]:
    (shape,) = parse_shapes(layout, pooling=str(pooling), alpha="1.05")
    return [Goal(shape=shape, ours=ours, theirs=of, least=x) for ours, of, x in wanted]


GOALS: tuple[Goal, ...] = (
    *_goals("1x2", ("ours", "theirs", 1.25)),
    *_goals("2x1@1gbit", ("ours", "theirs", 2.0)),
    *_goals(
        "2x1@200mbit",
        ("ours", "theirs", 3.0),
        ("ours_lossy", "theirs_plain", 6.0),
        ("ours_lossy", "theirs_lossy", 2.8),
    ),
    *_goals(
        "2x2@200mbit",
        ("ours", "theirs", 2.7),
        ("ours_lossy", "theirs_plain", 4.5),
        ("ours_lossy", "theirs_lossy", 2.0),
    ),
    *_goals("2x2@200mbit", ("ours", "theirs", 1.6), pooling=20),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A goal and what was found: how many times as fast, paired by round; ours over the floor."""

    goal: Goal
    found: Interval
    over_floor: float

    @property
    def holds(self) -> bool:
        """The median decides."""
        return self.found.mid >= self.goal.least

    @property
    def holds_throughout(self) -> bool:
        """All of the interval reaches the goal."""
        return self.found.low >= self.goal.least

    @property
    def is_near_floor(self) -> bool:
        """At most 1.2 times the floor of an exact step."""
        return self.over_floor <= MAX_OVER_FLOOR


def goal_shapes() -> list[Shape]:
    """Those of the goals, each once."""
    return list(dict.fromkeys(goal.shape for goal in GOALS))


def roles_of(shape: Shape) -> set[str]:
    """Who must run at a shape for its goals to be judged."""
    found = {role for g in GOALS if g.shape == shape for role in (g.ours, g.theirs)}
    return found | {"ours", "theirs"}


def judge_goals(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Verdict]:
    """Verdicts on the goals whose shapes are among ``pairs`` of result and summary."""
    of_shape = {Shape(**result["shape"]): found for result, found in pairs}
    return [
        Verdict(
            goal=goal,
            found=of_shape[goal.shape]["speedups"][f"{goal.ours}/{goal.theirs}"],
            over_floor=of_shape[goal.shape][goal.ours]["over_floor"],
        )
        for goal in GOALS
        if goal.shape in of_shape
        and f"{goal.ours}/{goal.theirs}" in of_shape[goal.shape]["speedups"]
    ]
