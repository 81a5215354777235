"""A run that saves, goes on, and is killed at a chosen point inside its second save."""

import os
import resource
import signal
import sys
from typing import Any

import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from tests.test_checkpoint import make_case, start, state_of, train

POINTS = ["bytes", "written", "metadata", "rename", "replacing"]


def progress(mesh: Mesh, folder: str, point: str | None = None) -> Any:
    """Two steps, save; two more, and a second save that ends at ``point``."""
    case = make_case(mesh.world)
    model, optimizer = start(mesh, case)
    checkpoints = rm.Checkpoints(folder)
    batches = case.batches_of(mesh.rank)
    train(mesh, model, optimizer, batches[:2])
    checkpoints.save(2, model=model, optimizer=optimizer, mesh=mesh)
    state = state_of(model, optimizer)
    if point is not None:
        train(mesh, model, optimizer, batches[2:])
        if mesh.rank == mesh.world - 1:
            arm(point)
        step = 2 if point == "replacing" else 4
        checkpoints.save(step, model=model, optimizer=optimizer, mesh=mesh)
    return state


def arm(point: str) -> None:
    """Make this process kill itself, as from outside, once the write has come to ``point``."""
    if point == "bytes":  # the kernel stops the file at so many bytes
        signal.signal(signal.SIGXFSZ, lambda *_: die())
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    elif point in ("written", "metadata"):  # at the sync of metadata.json, or of its folder
        os.fsync = _Nth(os.fsync, 1 if point == "written" else 2)  # type: ignore[assignment]
    else:  # when the partial folder gets its name: as a new one, or in place of another
        os.rename = _Nth(os.rename, 0 if point == "rename" else 1)  # type: ignore[assignment]


class _Nth:
    """Calls the function ``number`` times, then dies instead."""

    def __init__(self, function: Any, number: int) -> None:
        self.function, self.number = function, number

    def __call__(self, *args: Any) -> Any:
        if self.number == 0:
            die()
        self.number -= 1
        return self.function(*args)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def alone(folder: str, point: str) -> None:
    """`progress` in one process without a process group."""
    torch.set_num_threads(1)
    progress(rm.init_mesh(), folder, point)


if __name__ == "__main__":
    torch.set_num_threads(1)
    progress(rm.init_mesh(), sys.argv[1], sys.argv[2])
