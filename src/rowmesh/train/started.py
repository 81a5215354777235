"""A rank that `rowmesh.train.launch` started: what it does from its first line to its last.

It has one line to the launcher, on which it says how it ended. Nothing ever comes back on it, but
the kernel closes it when the launcher dies, in whatever way: then the rank stops as well.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from rowmesh.comm.joining import STORE_FILE
from rowmesh.comm.mesh import Mesh, init_mesh
from rowmesh.comm.status import sentence_of
from rowmesh.signals import INTERRUPTED, SIGNALS, handle, ignore, interrupt
from rowmesh.storage import keep_freed_memory

__all__ = ["Report", "exit_code", "run_rank", "settle_rank", "watch_agent"]

_BAD_INPUT, _OTHER = 2, 1
_UNATTENDED_S = 30.0  # a rank whose launcher is gone may take so long for a clean stop
_LOOK_S = 1.0  # between two looks whether torchrun's agent is there
_INPUT = ("InputError: ", "PlanError: ", "NotExecutable: ")
_LOOPBACKS = ("lo", "lo0")


@dataclass(frozen=True, slots=True)
class Report:
    """How a rank ended: what its work gave, or a sentence."""

    at: float
    code: int = 0
    sentence: str = ""
    value: Any = None


def exit_code(error: BaseException) -> int:
    """2 for bad input (`InputError`, `PlanError`), be it this rank's or a peer's; else 1."""
    sentence = sentence_of(error).removeprefix("PeerError: ")
    who, _, what = sentence.partition(" failed: ")
    is_peer = who.startswith("rank ") and who.removeprefix("rank ").isdigit()
    return _BAD_INPUT if (what if is_peer else sentence).startswith(_INPUT) else _OTHER


def settle_rank() -> None:
    """One torch thread, and freed memory is kept: for processes that are nothing but a rank."""
    torch.set_num_threads(1)
    keep_freed_memory()


def run_rank(
    work: Callable[[Mesh], Any], rank: int, ranks: int, folder: str, line: Connection
) -> None:
    """The whole life of a started rank.

    Args:
        work: What it is for.
        rank: This one.
        ranks: How many there are.
        folder: Of the launcher, closed to other users: ranks meet in a file there.
        line: To the launcher.
    """
    if line.poll():  # the launcher was stopped while it started this rank
        os._exit(INTERRUPTED)
    os.environ.update(_environment(rank, ranks, folder))
    settle_rank()
    try:
        handle(interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked since this process began
        threading.Thread(target=_watch_launcher, args=(line, rank), daemon=True).start()
        with init_mesh() as mesh:
            value = work(mesh)
        line.send(Report(time.time(), value=value if rank == 0 else None))
        ignore()
    except KeyboardInterrupt as error:
        _end(line, error, INTERRUPTED)
    except Exception as error:
        if os.environ.get("ROWMESH_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        _end(line, error, exit_code(error))


def _environment(rank: int, ranks: int, folder: str) -> dict[str, str]:
    """What torchrun tells its ranks; and that all sockets are for this machine only."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    numbers |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    found = {name: str(number) for name, number in numbers.items()}
    found[STORE_FILE] = str(Path(folder) / "store")
    for _, name in socket.if_nameindex():
        if name in _LOOPBACKS:
            found["GLOO_SOCKET_IFNAME"] = name
    return found


def _end(line: Connection, error: BaseException, code: int) -> NoReturn:
    ignore()
    try:
        line.send(Report(time.time(), code, sentence_of(error)))
    except OSError:  # the launcher is gone, which would have removed its folder
        shutil.rmtree(Path(os.environ[STORE_FILE]).parent, ignore_errors=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # not exit(): it would wait for messages that never come


def _watch_launcher(line: Connection, rank: int) -> None:
    with contextlib.suppress(EOFError, OSError):
        line.recv_bytes()
    _stop_unattended(rank, "the launcher")


def watch_agent() -> None:
    """Stop this rank of torchrun when its agent is gone; for a process that the agent started."""
    agent, rank = os.getppid(), int(os.environ["RANK"])

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(_LOOK_S)
        _stop_unattended(rank, "torchrun")

    threading.Thread(target=watch, daemon=True).start()


def _stop_unattended(rank: int, who: str) -> NoReturn:
    """Stop this rank as Ctrl-C does; end it if that takes too long."""
    if rank == 0:
        with contextlib.suppress(OSError):
            os.write(2, f"rowmesh: {who} is gone, so the ranks that it started stop\n".encode())
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)  # of all threads, the one that may be asleep
    time.sleep(_UNATTENDED_S)
    os._exit(INTERRUPTED)
