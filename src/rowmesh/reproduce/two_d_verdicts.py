"""What the quality figures must show, and whether they do."""

from dataclasses import dataclass

from rowmesh.reproduce.two_d_figures import Difference, Figures

__all__ = ["CONTROL", "SCALED", "Verdict", "judge"]

CONTROL, SCALED = "weights c=1", "weights c=M"
_LEAST_LOSS, _NEAR = 0.5, 0.1  # % of NE


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A demand, the figure, and whether the figure fulfils it; the interval may say less."""

    demand: str
    figure: str
    holds: bool
    holds_throughout: bool

    def __str__(self) -> str:
        interval = "yes" if self.holds_throughout else "no"
        answer = "yes" if self.holds else "NO"
        return f"{self.demand}: {self.figure}: {answer} (the whole interval: {interval})"


def judge(figures: Figures, groups: int) -> list[Verdict]:
    """The three demands on ``groups`` groups.

    At the smallest rate c = 1, the control, loses at least 0.5 % of NE and c = M is within 0.1 %,
    either way; at each arm's best rate no arm but the control is worse than full by over 0.1 %.
    The mean decides; whether all of its 95 % interval agrees is said too.
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
            demand=f"M = {groups}, lr {lr:g}: the control c = 1 loses at least {_LEAST_LOSS} %",
            figure=f"{control} %",
            holds=control.mean >= _LEAST_LOSS,
            holds_throughout=control.low >= _LEAST_LOSS,
        ),
        Verdict(
            demand=f"M = {groups}, lr {lr:g}: c = M is within {_NEAR} % of full",
            figure=f"{scaled} %",
            holds=abs(scaled.mean) <= _NEAR,
            holds_throughout=_is_near(scaled),
        ),
        Verdict(
            demand=f"M = {groups}, best rates: no other arm is worse by over {_NEAR} %",
            figure=f"worst is {worst}, {others[worst]} %",
            holds=all(d.mean <= _NEAR for d in others.values()),
            holds_throughout=all(d.high <= _NEAR for d in others.values()),
        ),
    ]


def _is_near(difference: Difference) -> bool:
    return difference.low >= -_NEAR and difference.high <= _NEAR
