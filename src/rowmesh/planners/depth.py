"""How many batches are begun at a time: what makes a step shortest."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from rowmesh.errors import InputError, PlanError
from rowmesh.placement import MeshShape, Plan
from rowmesh.placement.rules import MAX_DEPTH
from rowmesh.planners.merging import choose_merged
from rowmesh.planners.placing import Problem

__all__ = ["choose_depth", "parse_depth"]

# Less than of other choices: what is begun ahead also hides what the model does not know.
_LEAST_GAIN = 0.005


def parse_depth(value: str | int) -> int | None:
    """A number as it is, ``auto`` is None.

    Raises:
        InputError: If it is neither, or out of range.
    """
    if value == "auto":
        return None
    text = str(value)
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= number <= MAX_DEPTH:
        raise InputError(f"depth {value!r}: say auto, or a number of batches from 1 to {MAX_DEPTH}")
    return number


def choose_depth(
    problem: Problem,
    meshes: Sequence[MeshShape],
    depth: int | None,
    *,
    on_progress: Callable[[float], None],
) -> Plan:
    """The plan of `choose_merged` at the given depth, or at the one whose step is shortest.

    Depths 1 and 2 are planned each for itself, since hot rows are worth more where the rest can
    be fetched ahead. Depth 2 is not taken for a gain below 0.5 %, nor where it does not fit, since
    look-ahead remembers every row. None is deeper: by the model that hides no more, and more rows
    are late, since more steps are unfinished.

    Raises:
        PlanError: As `choose_merged`.
    """
    if depth is not None:
        return choose_merged(replace(problem, depth=depth), meshes, on_progress=on_progress)
    ahead = replace(problem, depth=2)
    if problem.cost is None or problem.topology.world == 1:
        if problem.topology.hosts > 1:
            with contextlib.suppress(PlanError):
                return choose_merged(ahead, meshes, on_progress=on_progress)
        return choose_merged(problem, meshes, on_progress=on_progress)
    best = choose_merged(problem, meshes, on_progress=lambda share: on_progress(share / 2))
    try:
        second = choose_merged(
            ahead, meshes, on_progress=lambda share: on_progress((1 + share) / 2)
        )
    except PlanError:
        return best
    least = problem.step_s(best, problem.cost) * (1.0 - _LEAST_GAIN)
    return second if problem.step_s(second, problem.cost) < least else best
