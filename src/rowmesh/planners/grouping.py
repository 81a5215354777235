"""A plan in shard groups of one size and layout: each size of group is a mesh of its own."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from rowmesh.cost import expect_dense
from rowmesh.cost.load import Load
from rowmesh.errors import PlanError
from rowmesh.placement import Copies, MeshShape, Plan, TablePlan, Tier
from rowmesh.placement.groups import Groups, can_merge
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.planners.order import state_bytes
from rowmesh.planners.placing import Placement, Problem, explained, place_tables
from rowmesh.planners.tiers import NO_DENSE, HotRows

__all__ = ["Grouped", "plan_in_groups"]


@dataclass(frozen=True, slots=True)
class Grouped:
    """A plan, and the placements its tables come from."""

    plan: Plan
    placements: tuple[Placement, ...] = ()

    def explained(self) -> Plan:
        """The plan with the reasons of its tables, if they are not there already."""
        if not self.placements:
            return self.plan
        reasons = {n: why for found in self.placements for n, why in found.reasons().items()}
        return replace(self.plan, tables=explained(self.plan.tables, reasons))


def plan_in_groups(
    problem: Problem, mesh: MeshShape, *, on_progress: Callable[[float], None]
) -> Grouped:
    """The best plan found in shard groups of ``mesh``, with its hot rows.

    Tables pinned to groups of another size are placed apart, those of larger groups first, each in
    the memory that those before leave on the fullest rank.

    Raises:
        PlanError: If groups are not possible, no placement obeys the constraints, or none fits.
    """
    sizes = problem.constraints.group_sizes(problem.tables, mesh.group)
    _check(problem, mesh, sizes)
    cold = _place(problem, mesh, sizes, on_progress)
    if problem.hot == 0:
        return cold
    plans = [cold.explained()]
    if problem.wishes.split == "auto":
        # The rest of tables with hot rows is best spread over all ranks.
        exchange = "rows" if problem.wishes.exchange == "auto" else problem.wishes.exchange
        wishes = replace(problem.wishes, split="row_wise", exchange=exchange, allow_inexact=False)
        with contextlib.suppress(PlanError):  # pins or memory may forbid it
            spread = _place(replace(problem, wishes=wishes), mesh, sizes, lambda share: None)
            plans.append(spread.explained())
    hot = HotRows(
        plans,
        problem.stats,
        rates=problem.rates,
        cost=problem.cost or NO_DENSE,
        state=problem.state,
        limit=problem.limit,
    )
    return Grouped(hot.choose(problem.hot))


def _check(problem: Problem, mesh: MeshShape, sizes: dict[str, int]) -> None:
    """Whether the sizes are possible: the rules of a plan, with every table on rank 0."""
    alone = (Tier(ranks=(0,)),)
    tables = [replace(t, tiers=alone, group=sizes[t.name]) for t in problem.tables]
    Plan(mesh=mesh, tables=tuple(tables), dense=problem.dense, sync=problem.sync).validate()


def _place(
    problem: Problem, mesh: MeshShape, sizes: dict[str, int], on_progress: Callable[[float], None]
) -> Grouped:
    topology, world = problem.topology, problem.topology.world
    plan = Plan(
        mesh=mesh,
        tables=(),
        dense=problem.dense,
        tree=problem.tree,  # type: ignore[arg-type]
        sync=problem.sync,
        depth=problem.depth,
    )
    fixed = expect_dense(sum(problem.dense), topology=topology, tree=plan.tree)
    placed: dict[str, TablePlan] = {}
    placements = []
    for size in sorted(set(sizes.values()), reverse=True):
        groups = Groups(world=world, size=size, layout=mesh.layout)
        mine = [_with_shards(t, world) for t in problem.tables if sizes[t.name] == size]
        shape = groups.shape(topology)
        # Groups side by side on a host share its card.
        card = problem.rates.cross_bytes_per_s * shape.local / topology.local
        merged = problem.wishes.merged and can_merge(groups, topology)
        inside = replace(
            problem,
            wishes=replace(problem.wishes, merged=merged),
            constraints=problem.constraints.inside(groups, topology, [t.name for t in mine]),
            rates=replace(problem.rates, cross_bytes_per_s=card),
            limit=_room(problem, plan, placed),
        )
        load = Load(fixed.values[:, :size], fixed.kinds)
        found = place_tables(inside, mine, shape, fixed=load, on_progress=on_progress)
        placements.append(found)
        for name, table in found.tables().items():
            own = None if size == mesh.group else size
            placed[name] = replace(_move(table, groups), group=own)
    tables = tuple(placed[table.name] for table in problem.tables)
    return Grouped(replace(plan, tables=tables).validate(), tuple(placements))


def _with_shards(table: TablePlan, world: int) -> TablePlan:
    """Virtual shards are for all ranks: another size of group must not change them."""
    return replace(table, virtual_shards=max(table.virtual_shards, 16 * world))


def _room(problem: Problem, plan: Plan, placed: dict[str, TablePlan]) -> int | None:
    """Bytes that those placed so far leave on the fullest rank."""
    if problem.limit is None or not placed:
        return problem.limit
    held = replace(plan, tables=tuple(placed.values()))
    return max(0, problem.limit - max(bytes_per_rank(held, **state_bytes(problem.state))))


def _move(table: TablePlan, groups: Groups) -> TablePlan:
    """A table on places of a group as one on ranks of the first."""
    tier = table.rest
    if groups.count == 1:
        return table
    if tier.copies is Copies.WORLD:
        return replace(table, tiers=(replace(tier, ranks=tuple(range(groups.world))),))
    ranks = tuple(groups.rank(0, place) for place in tier.ranks)
    return replace(table, tiers=(replace(tier, ranks=ranks),))
