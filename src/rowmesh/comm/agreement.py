"""All ranks go on, or all raise the same sentence."""

from collections.abc import Callable
from typing import TypeVar

from rowmesh import errors
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, RowmeshError

__all__ = ["agree", "attempt", "on_rank_0"]

T = TypeVar("T")


def attempt(work: Callable[[], T]) -> tuple[T | None, RowmeshError | None]:
    """What ``work`` returns, or the `RowmeshError` it raises; a file that cannot be read or
    written is an `InputError`."""
    try:
        return work(), None
    except RowmeshError as error:
        return None, error
    except OSError as error:
        return None, InputError(f"{error.filename}: {error.strerror}")


def agree(
    mesh: Mesh | None,
    value: T,
    problem: RowmeshError | None,
    *,
    on_failure: Callable[[str], str] = lambda kind: "",
) -> list[T]:
    """``value`` of every rank, in rank order, if none has a problem.

    Args:
        mesh: None for a model that is not sharded: this process is then the only rank.
        value: Of this rank; pickled.
        problem: Of this rank.
        on_failure: Called on every rank with the name of the problem's type before it is raised;
            what rank 0's call returns is added to the sentence.

    Raises:
        RowmeshError: On all ranks, the problem of the lowest rank that has one.

    Collective:
        All ranks.
    """
    mine = None if problem is None else (type(problem).__name__, str(problem))
    everyone = [(value, mine)] if mesh is None else mesh.gather_objects((value, mine))
    found = [(rank, theirs) for rank, (_, theirs) in enumerate(everyone) if theirs is not None]
    if not found:
        return [value for value, _ in everyone]
    rank, (name, sentence) = found[0]
    kind: type[RowmeshError] = getattr(errors, name, InputError)
    text = sentence if len(everyone) == 1 else f"rank {rank}: {sentence}"
    hint = on_failure(name)
    raise kind(text + (hint if mesh is None else mesh.gather_objects(hint)[0]))


def on_rank_0(mesh: Mesh, work: Callable[[], T]) -> T:
    """What ``work`` gives on rank 0, on every rank.

    Raises:
        RowmeshError: What rank 0 raised, on every rank, in its words.

    Collective:
        All ranks. The value is pickled.
    """
    outcome = attempt(work) if mesh.rank == 0 else None
    found = mesh.gather_objects(outcome)[0]
    value: T
    value, problem = found
    if problem is not None:
        raise problem
    return value
