"""Work that one rank does for all, with one outcome on all ranks, errors included."""

from collections.abc import Callable
from typing import Any, TypeVar

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, RowmeshError

__all__ = ["on_rank_0"]

T = TypeVar("T")


def on_rank_0(mesh: Mesh, work: Callable[[], T]) -> T:
    """What ``work`` gives on rank 0, on every rank.

    Raises:
        InputError, PlanError: What rank 0 raised, on every rank. A file that cannot be read or
            written is an `InputError`.

    Collective:
        All ranks. The value is pickled.
    """
    outcome: Any = None
    if mesh.rank == 0:
        try:
            outcome = (work(), None)
        except OSError as error:
            outcome = (None, InputError(f"{error.filename}: {error.strerror}"))
        except RowmeshError as error:
            outcome = (None, error)
    value: T
    value, problem = mesh.gather_objects(outcome)[0]
    if problem is not None:
        raise problem
    return value
