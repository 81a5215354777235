"""Why each unit got its option: the best other one, and what the choice saves."""

from collections.abc import Sequence

from rowmesh.placement import Why
from rowmesh.planners.greedy import Greedy
from rowmesh.planners.tally import Placed, Tally

__all__ = ["explain"]


def explain(greedy: Greedy, tally: Tally, placed: Sequence[Placed]) -> list[Why]:
    """A reason for every unit, all others as planned; tables kept together share theirs."""
    cost, found = tally.cost(), []
    for number, where in enumerate(placed):
        with tally.without(where):
            other = greedy.best_other(number, where)
            instead = None if other is None else tally.cost_with(other)
        word = where.draft.option.word
        if other is None or instead is None:
            found.append(Why(chosen=word))
            continue
        found.append(
            Why(
                chosen=word,
                runner_up=other.draft.option.word,
                bytes_saved=other.draft.sent - where.draft.sent,
                seconds_saved=instead.busiest - cost.busiest,
            )
        )
    return found
