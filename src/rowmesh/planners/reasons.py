"""Why each unit got its option: the best other one, and what the choice saves."""

from collections.abc import Sequence

import numpy as np

from rowmesh.cost import expect_table
from rowmesh.placement import Why
from rowmesh.placement.memory import RuleState
from rowmesh.planners.greedy import Greedy
from rowmesh.planners.options import Unit
from rowmesh.planners.tally import Placed, Tally
from rowmesh.topology import Topology

__all__ = ["explain"]


def explain(
    greedy: Greedy, tally: Tally, placed: Sequence[tuple[Unit, Placed]], state: RuleState
) -> list[Why]:
    """A reason for every unit, all others as planned; tables kept together share theirs."""
    cost, found = tally.cost(), []
    for number, (unit, where) in enumerate(placed):
        tally.take(where)
        other = greedy.best_other(number, where)
        instead = None if other is None else tally.cost_with(other)
        tally.put(where)
        word = where.draft.option.word
        if other is None or instead is None:
            found.append(Why(chosen=word))
            continue
        sent = [_mean_sent(unit, p, tally.topology, state) for p in (where, other)]
        found.append(
            Why(
                chosen=word,
                runner_up=other.draft.option.word,
                bytes_saved=sent[1] - sent[0],
                seconds_saved=instead.busiest - cost.busiest,
            )
        )
    return found


def _mean_sent(unit: Unit, placed: Placed, topology: Topology, state: RuleState) -> float:
    """Bytes that leave a rank because of the unit; mean over ranks."""
    tables = placed.draft.option.place_all(unit.tables, placed.ranks)
    loads = [
        expect_table(table, accesses, topology=topology, state=state)
        for table, accesses in zip(tables, unit.accesses, strict=True)
    ]
    return float(np.mean([load.sent_host + load.sent_cross for load in loads]) * len(loads))
