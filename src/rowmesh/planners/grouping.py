"""A plan in shard groups of one size and layout: each size of group is a mesh of its own."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rowmesh.cost import expect_dense
from rowmesh.cost.load import Load
from rowmesh.errors import PlanError
from rowmesh.placement import Copies, MeshShape, Plan, TablePlan, Tier
from rowmesh.placement.groups import Groups, can_merge
from rowmesh.placement.memory import bytes_per_rank, state_bytes
from rowmesh.planners.placing import LEAST_GAIN, Placement, Problem, explained, place_tables
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
    found = _place(problem, mesh, sizes, on_progress)
    spread: list[Grouped] = []
    whole: list[Grouped] = []
    may_copy_all = _may_copy_all(problem, mesh)
    if problem.wishes.split == "auto" and (problem.hot != 0 or problem.cost is not None):
        spread = _place_by("row_wise", problem, mesh, sizes)
    if problem.wishes.split == "auto" and problem.cost is not None:
        whole = _place_by("table_wise", problem, mesh, sizes)
        if may_copy_all:
            whole += _place_by("data_parallel", problem, mesh, sizes)
    cold = _best([*found, *spread, *whole], problem)
    best = _with_faster_tree(cold, problem)
    if problem.hot == 0:
        return best
    # The rest of tables with hot rows is best spread over all ranks.
    plans = [cold.explained(), *(one.explained() for one in spread if one is not cold)]
    if best is not cold:
        plans.insert(0, best.explained())
    hot = HotRows(
        plans,
        problem.stats.without_rows_of(problem.constraints.placed),
        rates=problem.rates,
        cost=problem.cost or NO_DENSE,
        state=problem.state,
        limit=problem.limit,
        everything=may_copy_all,
    )
    return Grouped(hot.choose(problem.hot))


def _check(problem: Problem, mesh: MeshShape, sizes: dict[str, int]) -> None:
    """Whether the sizes are possible: the rules of a plan, with every table on rank 0."""
    alone = (Tier(ranks=(0,)),)
    tables = [replace(t, tiers=alone, group=sizes[t.name]) for t in problem.tables]
    Plan(mesh=mesh, tables=tuple(tables), dense=problem.dense, sync=problem.sync).validate()


def _best(found: Sequence[Grouped], problem: Problem) -> Grouped:
    """The first, unless another's step is at least 2.5 % shorter, dense layers being known."""
    cost = problem.cost
    if cost is None:
        return found[0]
    steps = [problem.step_s(grouped.plan, cost) for grouped in found]
    least = min(steps)
    return found[steps.index(least)] if least < steps[0] * (1.0 - LEAST_GAIN) else found[0]


def _may_copy_all(problem: Problem, mesh: MeshShape) -> bool:
    """Whether every table may be whole on every rank: nothing that is asked for says otherwise."""
    wishes = problem.wishes
    is_free = wishes.split == "auto" and wishes.exchange != "pooled" and problem.merge != "on"
    return is_free and problem.constraints.may_copy_all and mesh.group == problem.topology.world


def _with_faster_tree(grouped: Grouped, problem: Problem) -> Grouped:
    """The same with flat sums, if a step is at least 2.5 % shorter so.

    Host-first sums cross once for a host, but go through its memory twice, which nothing hides.
    Merged requests need them.
    """
    plan, cost = grouped.plan, problem.cost
    if cost is None or plan.tree == "flat" or any(table.merged for table in plan.tables):
        return grouped
    flat = replace(plan, tree="flat").validate()
    least = problem.step_s(plan, cost) * (1.0 - LEAST_GAIN)
    return replace(grouped, plan=flat) if problem.step_s(flat, cost) < least else grouped


def _place_by(
    split: str, problem: Problem, mesh: MeshShape, sizes: dict[str, int]
) -> list[Grouped]:
    """All tables by one split, exactly; nothing if pins or memory forbid it."""
    exchange = problem.wishes.exchange
    if split in ("row_wise", "data_parallel") and exchange == "auto":
        exchange = "rows"
    wishes = replace(problem.wishes, split=split, exchange=exchange, allow_inexact=False)
    with contextlib.suppress(PlanError):
        return _place(replace(problem, wishes=wishes), mesh, sizes, lambda share: None)[:1]
    return []


def _place(
    problem: Problem, mesh: MeshShape, sizes: dict[str, int], on_progress: Callable[[float], None]
) -> list[Grouped]:
    """All tables as the search places them with small ones copied, and without that."""
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
    placed: list[dict[str, TablePlan]] = [{}, {}]
    placements: list[list[Placement]] = [[], []]
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
            limit=_room(problem, plan, placed[0]),
        )
        load = Load(fixed.values[:, :size], fixed.kinds)
        found = place_tables(inside, mine, shape, fixed=load, on_progress=on_progress)
        for number, way in enumerate((found.with_small_copied(), found)):
            placements[number].append(way)
            for name, table in way.tables().items():
                own = None if size == mesh.group else size
                placed[number][name] = replace(_move(table, groups), group=own)
    return [
        Grouped(
            replace(plan, tables=tuple(by_name[t.name] for t in problem.tables)).validate(),
            tuple(ways),
        )
        for by_name, ways in zip(placed, placements, strict=True)
    ]


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
