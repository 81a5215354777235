"""One rank's complaint before anything changes becomes the same error on all ranks."""

from typing import TypeVar

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError

__all__ = ["agree"]

T = TypeVar("T")


def agree(mesh: Mesh | None, complaint: InputError | None, note: T) -> list[T]:
    """Every rank's ``note``, in rank order, if no rank has a complaint.

    Args:
        mesh: None for a model that is not sharded: this process is then the only rank.
        complaint: What is wrong with this rank's arguments, or None.
        note: What the other ranks should know.

    Raises:
        InputError: On all ranks, with the sentence of the first rank that complains.

    Collective:
        All ranks.
    """
    if mesh is None or mesh.world == 1:
        if complaint is not None:
            raise complaint
        return [note]
    everyone = mesh.gather_objects((None if complaint is None else str(complaint), note))
    for rank, (sentence, _) in enumerate(everyone):
        if sentence is not None:
            raise InputError(f"rank {rank}: {sentence}")
    return [note for _, note in everyone]
