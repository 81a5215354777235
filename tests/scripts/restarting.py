"""A program of one's own in which a rank kills itself, in three attempts each time another way."""

import os
import signal
import sys
from pathlib import Path

import torch

import rowmesh as rm

FOLDER = Path(sys.argv[1])


def number_of_start(rank: str) -> int:
    """How often this rank has been started."""
    file = FOLDER / f"starts-{rank}"
    number = len(file.read_text()) if file.exists() else 0
    file.write_text("x" * (number + 1))
    return number


def main() -> None:
    rank = os.environ["RANK"]
    number = number_of_start(rank)
    if rank == "1" and number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh = rm.init_mesh(timeout_s=60.0)
    found = mesh.total(torch.tensor([float(mesh.rank)]))
    if (rank == "0" and number == 1) or (rank == "1" and number == 2):
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.total(found)
    (FOLDER / f"sum-{rank}").write_text(str(float(found)))


if __name__ == "__main__":
    main()
