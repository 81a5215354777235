"""`rowmesh` as real processes: started by itself, or as the ranks of a launcher."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TINY = ["data.batch_size=64", "data.cap=500", "model.dim=4", "training.tensorboard=false"]


def settings(*more: str) -> list[str]:
    """``--set`` for a run of a second or so, and for ``more``."""
    return [word for item in (*TINY, *more) for word in ("--set", item)]


def environment(**more: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    return ours | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"} | more


def start(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """``rowmesh`` with these arguments, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rowmesh.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **({"env": environment()} | options),
    )


def start_ranks(
    arguments: Sequence[str], *, ranks: int, **options: Any
) -> list["subprocess.Popen[str]"]:
    """``rowmesh`` as each of the ranks that a launcher would start, without the launcher."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    world |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [
        start(*arguments, env=environment(**world, RANK=str(r), LOCAL_RANK=str(r)), **options)
        for r in range(ranks)
    ]


def finish(process: "subprocess.Popen[str]", *, timeout: float = 90) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; the process group is killed if it does not end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    return process.returncode, out, err
