"""Whether hosts merge the requests of their ranks: if a step is shorter so."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from rowmesh.errors import InputError, PlanError, did_you_mean
from rowmesh.placement import Copies, Exchange, MeshShape, Plan
from rowmesh.placement.groups import can_merge
from rowmesh.planners.groups import choose_groups, evaluate
from rowmesh.planners.placing import Problem

__all__ = ["choose_merged", "merge_all", "parse_merge"]

_WORDS: Final = ("auto", "off", "on")
_LEAST_GAIN: Final = 0.025  # of a step: less is within the error of the model


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

    With ``auto`` it is planned without first, and again with all exchanges of rows merged if
    merging those of the first plan, with its hot rows or without any, makes a step at least 2.5 %
    shorter: merged requests may make hot rows needless.

    Raises:
        PlanError: As `choose_groups`; or requests are to be merged and cannot be.
    """
    share = 0.5 if problem.merge != "off" else 1.0
    flat = choose_groups(problem, meshes, on_progress=lambda done: on_progress(share * done))
    merged = merge_all(flat)
    if problem.merge == "on" and merged == flat:
        raise PlanError(
            f"no requests can be merged: that takes hosts of several ranks (here "
            f"{problem.topology.hosts} x {problem.topology.local}), and tables of exchange rows "
            f"with dedup, in shard groups of several whole hosts"
        )
    if problem.merge == "off" or merged == flat:
        return flat
    most = evaluate(flat, problem).step_s * (1.0 - _LEAST_GAIN)
    screened = (merged, merge_all(flat.without_hot_rows()))
    if problem.merge == "auto" and all(evaluate(p, problem).step_s > most for p in screened):
        return flat
    wishes = replace(problem.wishes, merged=True)
    again = choose_groups(
        replace(problem, wishes=wishes),
        meshes,
        on_progress=lambda done: on_progress((1 + done) / 2),
    )
    tried = [*([again] if any(table.merged for table in again.tables) else []), merged]
    best = min(tried, key=lambda plan: evaluate(plan, problem).step_s)
    return flat if problem.merge == "auto" and evaluate(best, problem).step_s > most else best


def merge_all(plan: Plan) -> Plan:
    """``plan`` with the requests of all tables merged where they can be."""
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
    return replace(plan, tables=tuple(tables))
