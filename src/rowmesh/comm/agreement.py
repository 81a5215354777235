"""All ranks go on, or all raise the same sentence."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rowmesh import errors
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, PlanError, RowmeshError

__all__ = ["agree", "agree_on", "attempt", "on_rank_0"]

T = TypeVar("T")
_MOST_LETTERS = 120  # of a value in a sentence


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
    edge: str | None = "counts",
    names_all: bool = True,
) -> list[T]:
    """``value`` of every rank, in rank order, if none has a problem.

    Args:
        mesh: None for a model that is not sharded: this process is then the only rank.
        value: Of this rank; pickled.
        problem: Of this rank.
        on_failure: Called on every rank with the name of the problem's type before it is raised;
            what rank 0's call returns is added to the sentence.
        edge: As for `Mesh.total`.
        names_all: Whether the sentence names the rank also if every rank has a problem.

    Raises:
        RowmeshError: On all ranks, the problem of the lowest rank that has one.

    Collective:
        All ranks.
    """
    mine = None if problem is None else (type(problem).__name__, str(problem))
    everyone = [(value, mine)] if mesh is None else mesh.gather_objects((value, mine), edge=edge)
    found = [(rank, theirs) for rank, (_, theirs) in enumerate(everyone) if theirs is not None]
    if not found:
        return [value for value, _ in everyone]
    rank, (name, sentence) = found[0]
    kind: type[RowmeshError] = getattr(errors, name, InputError)
    is_common = len(everyone) == 1 or (not names_all and len(found) == len(everyone))
    text = sentence if is_common else f"rank {rank}: {sentence}"
    hint = on_failure(name)
    raise kind(text + (hint if mesh is None else mesh.gather_objects(hint)[0]))


def agree_on(
    mesh: Mesh,
    parts: Mapping[str, str] | None,
    problem: RowmeshError | None,
    *,
    way_out: str,
    value: T,
) -> list[T]:
    """As `agree`; and every rank must give the same ``parts``.

    Digests of them travel, and only if these differ the parts themselves.

    Args:
        mesh: Of all ranks.
        parts: What ranks must be alike in, by what it is called in a sentence, in one order; None
            if there is a problem.
        problem: Of this rank.
        way_out: What to do if they are not; ends the sentence.
        value: As for `agree`; it may differ.

    Raises:
        PlanError: On all ranks, the first part that differs, and where.
        RowmeshError: As `agree`.

    Collective:
        All ranks. The bytes are not in the ledger.
    """
    digest = hashlib.sha256(json.dumps(list((parts or {}).items())).encode()).hexdigest()
    everyone = agree(mesh, (digest, value), problem, edge=None, names_all=False)
    if len({digest for digest, _ in everyone}) > 1:
        difference = _first_difference(mesh.gather_objects(parts or {}, edge=None))
        raise PlanError(f"ranks disagree: {difference}: {way_out}")
    return [value for _, value in everyone]


def _first_difference(parts: Sequence[Mapping[str, str]]) -> str:
    """Where ranks differ from rank 0, as part of a sentence."""
    for what in dict.fromkeys(what for mine in parts for what in mine):
        found = [_shorten(mine.get(what, "not there")) for mine in parts]
        full = [mine.get(what) for mine in parts]
        for rank, text in enumerate(full):
            if text != full[0]:
                return f"{what} is {found[0]} on rank 0 and {found[rank]} on rank {rank}"
    return "the same things come in another order"


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


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
