"""Whether hosts merge the requests of their ranks: if a step is shorter so."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from rowmesh.errors import InputError, PlanError, did_you_mean
from rowmesh.placement import Copies, Exchange, MeshShape, Plan
from rowmesh.placement.groups import Groups, can_merge
from rowmesh.planners.groups import choose_groups, evaluate
from rowmesh.planners.placing import LEAST_GAIN, Problem

__all__ = ["choose_merged", "merge_all", "parse_merge"]

_WORDS: Final = ("auto", "off", "on")


def parse_merge(word: str) -> str:
    """``auto``, ``off`` or ``on``.

    Raises:
        InputError: If it is another word.
    """
    if word not in _WORDS:
        raise InputError(f"unknown merge {word!r}{did_you_mean(word, _WORDS)}")
    return word


def choose_merged(
    problem: Problem,
    meshes: Sequence[MeshShape],
    *,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Plan:
    """The plan of `choose_groups` with merged requests, or without if a step is as short so.

    With ``auto`` it is planned without and with: merged requests may make hot rows, or copies of
    small tables, needless. They are merged if a step is at least 2.5 % shorter so. Dense layers not
    being known, it is planned with only if merging what is planned without gains as much.

    Raises:
        PlanError: As `choose_groups`; or requests are to be merged and cannot be.
    """
    if problem.merge == "off" or not _may_merge(problem, meshes):
        if problem.merge == "on":
            raise PlanError(_cannot_merge(problem))
        return choose_groups(problem, meshes, on_progress=on_progress)
    flat = choose_groups(problem, meshes, on_progress=lambda done: on_progress(done / 2))
    most = evaluate(flat, problem).step_s * (1.0 - LEAST_GAIN)
    if problem.merge == "auto" and problem.cost is None:  # all that is compared then: its links
        screened = (merge_all(flat), merge_all(flat.without_hot_rows()))
        if all(evaluate(plan, problem).step_s > most for plan in screened):
            return flat
    wishes = replace(problem.wishes, merged=True)
    again = choose_groups(
        replace(problem, wishes=wishes),
        meshes,
        on_progress=lambda done: on_progress((1 + done) / 2),
    )
    tried = [plan for plan in (again, merge_all(flat)) if _merges(plan)]
    if not tried and problem.merge == "on":  # small tables are copied, unless their split is said
        if wishes.split == "auto" and wishes.exchange != "pooled":
            wishes = replace(wishes, split="row_wise", exchange="rows")
            tried = [choose_groups(replace(problem, wishes=wishes), meshes)]
        if not any(_merges(plan) for plan in tried):
            raise PlanError(_cannot_merge(problem))
    best = min(tried, key=lambda plan: evaluate(plan, problem).step_s, default=flat)
    return flat if problem.merge == "auto" and evaluate(best, problem).step_s > most else best


def _merges(plan: Plan) -> bool:
    return any(table.merged for table in plan.tables)


def _may_merge(problem: Problem, meshes: Sequence[MeshShape]) -> bool:
    """Whether some mesh has groups whose hosts have several ranks to merge for."""
    world = problem.topology.world
    groups = (Groups(world=world, size=mesh.group, layout=mesh.layout) for mesh in meshes)
    return any(can_merge(one, problem.topology) for one in groups)


def _cannot_merge(problem: Problem) -> str:
    return (
        f"no requests can be merged: that takes hosts of several ranks (here "
        f"{problem.topology.hosts} x {problem.topology.local}), and tables of exchange rows "
        f"with dedup, in shard groups of several whole hosts"
    )


def merge_all(plan: Plan) -> Plan:
    """``plan`` with the requests of all tables merged where they can be, and host-first sums."""
    topology = plan.mesh.topology
    tables = [
        replace(
            table,
            merged=table.exchange is Exchange.ROWS
            and table.dedup
            and table.rest.copies is Copies.GROUP
            and can_merge(plan.groups(table), topology),
        )
        for table in plan.tables
    ]
    found = replace(plan, tables=tuple(tables))
    return replace(found, tree="host-first") if _merges(found) else found
