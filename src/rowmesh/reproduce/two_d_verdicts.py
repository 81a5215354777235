"""What the quality figures must show, and whether they do."""

from dataclasses import dataclass

from rowmesh.reproduce.two_d_figures import Difference, Figures

__all__ = ["CONTROL", "SCALED", "Verdict", "judge", "word"]

CONTROL, SCALED = "weights c=1", "weights c=M"
_LEAST_LOSS, _NEAR = 0.5, 0.1  # % of NE


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


def word(holds: bool) -> str:
    """A verdict that fails must not be overlooked."""
    return "yes" if holds else "NO"


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
