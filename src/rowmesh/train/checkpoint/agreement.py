"""All ranks go on, or all raise the same sentence."""

from collections.abc import Callable
from typing import TypeVar

from rowmesh import errors
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, RowmeshError

__all__ = ["Problem", "agree", "attempt"]

T = TypeVar("T")
Problem = RowmeshError | None


def attempt(work: Callable[[], T]) -> tuple[T | None, Problem]:
    """What ``work`` returns, or the `RowmeshError` it raises."""
    try:
        return work(), None
    except RowmeshError as error:
        return None, error


def agree(
    mesh: Mesh,
    value: T,
    problem: Problem,
    *,
    on_failure: Callable[[str], str] = lambda kind: "",
) -> list[T]:
    """``value`` of every rank, if none has a problem.

    Args:
        mesh: Of the ranks.
        value: Of this rank.
        problem: Of this rank.
        on_failure: Called on every rank with the name of the problem's type before it is raised;
            what rank 0's call returns is added to the sentence.

    Raises:
        RowmeshError: On all ranks, the problem of the lowest rank that has one.

    Collective:
        All ranks.
    """
    mine = None if problem is None else (type(problem).__name__, str(problem))
    everyone = mesh.gather_objects((value, mine))
    found = [(rank, theirs) for rank, (_, theirs) in enumerate(everyone) if theirs is not None]
    if not found:
        return [value for value, _ in everyone]
    rank, (name, sentence) = found[0]
    kind: type[RowmeshError] = getattr(errors, name, InputError)
    text = sentence if mesh.world == 1 else f"rank {rank}: {sentence}"
    hint = mesh.gather_objects(on_failure(name))[0]
    raise kind(text + hint)
