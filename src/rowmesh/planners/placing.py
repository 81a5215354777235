"""`Problem`: what is to be planned; `place_tables`: its splits and ranks for one mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rowmesh.cost import DenseCost, Load, Rates, plan_time
from rowmesh.placement import Plan, Sync, TablePlan, Why
from rowmesh.placement.memory import RuleState
from rowmesh.planners.constraints import Constraints
from rowmesh.planners.greedy import Greedy
from rowmesh.planners.options import Wishes, enumerate_units
from rowmesh.planners.reasons import explain
from rowmesh.planners.tally import Placed, Tally
from rowmesh.stats import Stats
from rowmesh.topology import Topology

__all__ = ["LEAST_GAIN", "Placement", "Problem", "explained", "place_tables"]

LEAST_GAIN = 0.025  # of a step: less is within the error of the cost model


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is to be planned: the arguments of `plan_tables`.

    Args:
        tables: Not yet placed.
        topology: Of all ranks.
        stats: Of their accesses.
        dense: Elements of each dense bucket.
        wishes, constraints: To obey.
        rates: Of the cluster.
        state: Of the update rule.
        limit: Bytes a rank may hold, if known.
        hot: Hot rows; None for as many as make a step shortest.
        cost: Of the dense layers, if known.
        sync: Of replicas.
        depth: Batches begun at a time.
        merge: Whether hosts merge requests: auto, off, on.
    """

    tables: tuple[TablePlan, ...]
    topology: Topology
    stats: Stats
    dense: tuple[int, ...]
    wishes: Wishes
    constraints: Constraints
    rates: Rates
    state: RuleState
    limit: int | None
    hot: int | None
    cost: DenseCost | None
    sync: Sync
    depth: int = 1
    merge: str = "auto"

    @property
    def tree(self) -> str:
        """Of the plan's sums."""
        return "host-first" if self.topology.hosts > 1 and self.topology.local > 1 else "flat"

    def step_s(self, plan: Plan, cost: DenseCost) -> float:
        """Seconds of a step of ``plan``."""
        accesses = self.stats.tables
        return plan_time(plan, accesses, rates=self.rates, cost=cost, state=self.state).total_s


class Placement:
    """Units on their ranks; why they are there is found out when it is asked for."""

    def __init__(self, greedy: Greedy, tally: Tally, placed: Sequence[Placed]) -> None:
        self._greedy, self._tally, self._placed = greedy, tally, placed

    def with_small_copied(self) -> "Placement":
        """The same, but for small tables that are then data-parallel."""
        return Placement(self._greedy, self._tally, self._greedy.copy_small(self._placed))

    def tables(self) -> dict[str, TablePlan]:
        """Every table on its ranks, by name."""
        return {
            table.name: table
            for unit, where in zip(self._greedy.units, self._placed, strict=True)
            for table in where.draft.option.place_all(unit.tables, where.ranks)
        }

    def reasons(self) -> dict[str, Why]:
        """Why every table is where it is, by name."""
        self._greedy.refill(self._placed)
        found = explain(self._greedy, self._tally, self._placed)
        return {
            table.name: why
            for unit, why in zip(self._greedy.units, found, strict=True)
            for table in unit.tables
        }


def place_tables(
    problem: Problem,
    tables: Sequence[TablePlan],
    topology: Topology,
    *,
    fixed: Load,
    on_progress: Callable[[float], None],
) -> Placement:
    """``tables`` of a problem on a mesh that need not be all of its ranks.

    Args:
        problem: Its constraints and rates are those of the mesh.
        tables: Some of its own.
        topology: Of the mesh.
        fixed: What its ranks send whatever is placed.
        on_progress: Called with the share of the work done.

    Raises:
        InputError: If a table has no statistics.
        PlanError: If no placement obeys the constraints, or fits the memory.
    """
    units = enumerate_units(
        tables,
        topology,
        accesses=problem.stats.tables,
        wishes=problem.wishes,
        constraints=problem.constraints,
    )
    tally = Tally(topology, rates=problem.rates, limit=problem.limit, fixed=fixed)
    state = problem.state.at_depth(problem.depth)
    greedy = Greedy(units, tally, state=state, on_progress=on_progress)
    return Placement(greedy, tally, greedy.place())


def explained(tables: Sequence[TablePlan], reasons: dict[str, Why]) -> tuple[TablePlan, ...]:
    """The tables with their reasons."""
    return tuple(replace(table, why=reasons[table.name]) for table in tables)
