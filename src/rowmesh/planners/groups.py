"""Which shard groups: every size and layout is planned, and the one with the shortest step wins."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rowmesh.cost import (
    Load,
    bucket_sizes,
    expect_dense,
    expect_sync,
    expect_tables,
    imbalance,
    step_seconds,
)
from rowmesh.errors import InputError, PlanError, did_you_mean
from rowmesh.placement import MeshShape, Plan, Sync, Tier
from rowmesh.placement.memory import bytes_per_rank, state_bytes, tier_bytes
from rowmesh.placement.why import GroupCandidate, GroupsChoice
from rowmesh.planners.grouping import Grouped, plan_in_groups
from rowmesh.planners.placing import Problem
from rowmesh.topology import Topology

__all__ = [
    "LAYOUTS",
    "choose_groups",
    "evaluate",
    "list_meshes",
    "parse_groups",
    "parse_layout",
    "parse_sync",
]

LAYOUTS: Final = ("contiguous", "strided")
_MODES: Final = ("gradients", "weights", "moments-first")
_FORMS: Final = ("sparse", "dense")
_GIB = float(1 << 30)
_MOST_PLACED = 1000  # tables x candidates; with more only some sizes are tried


def parse_groups(groups: str | int) -> str | int:
    """``off``, ``auto``, or the number of ranks in a group.

    Raises:
        InputError: If it is neither.
    """
    if groups in ("off", "auto"):
        return groups
    is_number = isinstance(groups, int) and not isinstance(groups, bool)
    if (is_number or (isinstance(groups, str) and groups.isdecimal())) and int(groups) > 0:
        return int(groups)
    raise InputError(f"groups {groups!r}: say off, auto, or the number of ranks in a shard group")


def parse_layout(layout: str) -> tuple[str, ...]:
    """The layouts that ``auto``, ``contiguous`` or ``strided`` allows.

    Raises:
        InputError: If it is none of them.
    """
    if layout not in ("auto", *LAYOUTS):
        raise InputError(f"unknown layout {layout!r}{did_you_mean(layout, ('auto', *LAYOUTS))}")
    return LAYOUTS if layout == "auto" else (layout,)


def parse_sync(text: str) -> Sync:
    """``gradients``, ``weights:4`` (every 4 steps), ``weights:4:dense``, ``moments-first:4``.

    Raises:
        InputError: If a word is unknown, or the period is no number from 1.
    """
    mode, *more = text.split(":")
    form = more.pop() if len(more) == 2 else "sparse"
    for word, known, what in ((mode, _MODES, "sync"), (form, _FORMS, "form of a sync")):
        if word not in known:
            raise InputError(f"unknown {what} {word!r}{did_you_mean(word, known)}")
    if len(more) > 1 or not all(number.isdecimal() and int(number) for number in more):
        raise InputError(
            f"sync {text!r}: say mode, mode:period or mode:period:dense, with a period from 1"
        )
    period = int(more[0]) if more else 1
    if mode == "gradients" and (period > 1 or form == "dense"):
        raise InputError(
            f"sync {text!r}: gradients are synced every step, of touched rows; say weights or "
            f"moments-first"
        )
    return Sync(mode=mode, period=period, form=form)  # type: ignore[arg-type]


def list_meshes(topology: Topology, *, groups: str | int, layout: str) -> list[MeshShape]:
    """Every mesh that is asked for: larger groups first, contiguous before strided.

    One group, and groups of one rank, are the same in both layouts.

    Raises:
        InputError: If a word is unknown.
    """
    world, local = topology.world, topology.local
    wanted, layouts = parse_groups(groups), parse_layout(layout)
    sizes = [n for n in range(world, 0, -1) if not world % n and not (n % local and local % n)]
    if wanted != "auto":
        sizes = [world if wanted == "off" else int(wanted)]
    found = []
    for size in sizes:
        for one in layouts[:1] if size in (1, world) else layouts:
            found.append(
                MeshShape(hosts=topology.hosts, local=local, group=size, layout=one)  # type: ignore[arg-type]
            )
    return found


@dataclass(frozen=True, slots=True)
class _Tried:
    """What became of one mesh."""

    mesh: MeshShape
    candidate: GroupCandidate
    grouped: Grouped | None = None
    error: PlanError | None = None


def choose_groups(
    problem: Problem,
    meshes: Sequence[MeshShape],
    *,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Plan:
    """The plan with the shortest step of all meshes; larger groups win ties, then contiguous.

    With more than 1,000 tables x meshes only one group, groups of a host, of one rank and of a
    size between are tried, and the other layout for the best of them.

    Raises:
        PlanError: If no mesh can be planned: what the first says.
    """
    coarse = _thin(meshes, problem)
    count = len(coarse) + (len(coarse) < len(meshes))
    tried = [
        _attempt(problem, mesh, functools.partial(_share, on_progress, number, count))
        for number, mesh in enumerate(coarse)
    ]
    if len(coarse) < len(meshes):
        size = _best(tried).mesh.group
        more = functools.partial(_share, on_progress, len(coarse), count)
        others = [mesh for mesh in meshes if mesh.group == size and mesh not in coarse]
        tried += [_attempt(problem, mesh, more) for mesh in others]
    winner = _best(tried)
    assert winner.grouped is not None
    plan = winner.grouped.explained()
    if len(meshes) == 1:
        return plan
    candidates = tuple(
        replace(one.candidate, is_chosen=one is winner)
        for one in sorted(tried, key=lambda one: meshes.index(one.mesh))
    )
    return replace(plan, groups_choice=GroupsChoice(candidates=candidates))


def _share(on_progress: Callable[[float], None], number: int, count: int, share: float) -> None:
    on_progress((number + share) / count)


def _thin(meshes: Sequence[MeshShape], problem: Problem) -> list[MeshShape]:
    if len(problem.tables) * len(meshes) <= _MOST_PLACED:
        return list(meshes)
    world, local = problem.topology.world, problem.topology.local
    sizes = sorted({mesh.group for mesh in meshes}, reverse=True)
    between = [n for n in sizes if min(sizes[0], local) < n < world]
    kept = {sizes[0], sizes[-1], *between[len(between) // 2 :][:1]} | ({local} & set(sizes))
    first = {mesh.group: mesh for mesh in reversed(meshes)}  # contiguous, if both are asked for
    return [mesh for mesh in meshes if mesh.group in kept and first[mesh.group] is mesh]


def _best(tried: Sequence[_Tried]) -> _Tried:
    planned = [one for one in tried if one.grouped is not None]
    if not planned:
        first = tried[0].error
        assert first is not None
        if len(tried) == 1:
            raise first
        sizes = ", ".join(str(n) for n in dict.fromkeys(one.mesh.group for one in tried))
        raise PlanError(
            f"no plan in shard groups of {sizes} ranks; of {tried[0].mesh.group}: {first}"
        )
    least = min(one.candidate.step_s for one in planned)
    near = [one for one in planned if one.candidate.step_s <= least * (1.0 + 1e-9)]
    return min(near, key=lambda one: (-one.mesh.group, one.mesh.layout))


def _attempt(problem: Problem, mesh: MeshShape, on_progress: Callable[[float], None]) -> _Tried:
    try:
        grouped = plan_in_groups(problem, mesh, on_progress=on_progress)
    except PlanError as error:
        least, note = _least_bytes(problem, mesh), f"no plan: {error}"
        if problem.limit is not None and least > problem.limit:
            most = f"{problem.limit / _GIB:.4f}"
            note = f"does not fit: needs {least / _GIB:.4f} GiB on a rank or more, which has {most}"
        failed = GroupCandidate(size=mesh.group, layout=mesh.layout, memory_bytes=least, note=note)
        return _Tried(mesh, failed, error=error)
    return _Tried(mesh, evaluate(grouped.plan, problem), grouped)


def _least_bytes(problem: Problem, mesh: MeshShape) -> int:
    """What a rank holds if every table is spread evenly over its group."""
    sizes = problem.constraints.group_sizes(problem.tables, mesh.group)
    whole = Tier(ranks=(0,))
    held = (
        tier_bytes(replace(t, tiers=(whole,)), whole, state=problem.state)[0] / sizes[t.name]
        for t in problem.tables
    )
    return int(sum(held))


def evaluate(plan: Plan, problem: Problem) -> GroupCandidate:
    """What a plan sends, holds and takes on the whole topology."""
    topology, rates, state = problem.topology, problem.rates, problem.state
    accesses = problem.stats.tables
    tables = expect_tables(plan, accesses, state=state, rates=rates)
    sync = expect_sync(plan, accesses, state=state, rates=rates)
    dense = expect_dense(sum(bucket_sizes(plan)), topology=topology, tree=plan.tree)
    total: Load = tables + dense + sync
    step_s = step_seconds(total, topology=topology, rates=rates)
    if problem.cost is not None:
        step_s = problem.step_s(plan, problem.cost)
    exchange = tables + dense
    return GroupCandidate(
        size=plan.mesh.group,
        layout=plan.mesh.layout,
        host_bytes=float(exchange.sent_host.mean()),
        cross_bytes=float(exchange.sent_cross.mean()),
        sync_host_bytes=float(sync.sent_host.mean()),
        sync_cross_bytes=float(sync.sent_cross.mean()),
        work_imbalance=imbalance(total.work),
        bytes_imbalance=imbalance(total.sent_host + total.sent_cross),
        memory_bytes=max(bytes_per_rank(plan, **state_bytes(state)), default=0),
        step_s=step_s,
    )
