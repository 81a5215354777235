"""`rowmesh` as real processes: started by itself, or as the ranks of a launcher."""

import atexit
import contextlib
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.ranks import warm_context

ROOT = Path(__file__).parent.parent
TINY = ["data.batch_size=64", "data.cap=500", "model.dim=4", "training.tensorboard=false"]


def settings(*more: str) -> list[str]:
    """``--set`` for a run of a second or so, and for ``more``."""
    return [word for item in (*TINY, *more) for word in ("--set", item)]


def environment(**more: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    return ours | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"} | more


def start(*arguments: str, module: str = "rowmesh.cli", **options: Any) -> "subprocess.Popen[str]":
    """``rowmesh``, or another module, with these arguments, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **({"env": environment()} | options),
    )


class Fork:
    """A process that has all imported when it starts, in a session of its own; used as a `Popen`.

    Args:
        words: The path of a script and its arguments, or ``rowmesh`` and its arguments.
        env: Its environment.
        cwd: Where it runs.
        preexec_fn: Called in it first.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path = ROOT,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        context = warm_context()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        theirs = [end for _, end in pipes]
        self._process = context.Process(
            target=_become, args=(list(words), dict(env), cwd, preexec_fn, theirs), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end, _ in pipes)
        for end in itertools.chain(*pipes):
            end.close()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of stdout and stderr, once the process has ended."""
        with ThreadPoolExecutor(2) as readers, self.stdout, self.stderr:
            texts = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self._process.join(timeout)
            if self.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired("a fork", timeout)
            return texts[0].result(timeout), texts[1].result(timeout)


def _become(
    words: list[str],
    env: dict[str, str],
    cwd: Path,
    preexec_fn: Callable[[], None] | None,
    streams: list[Connection],
) -> None:
    os.setsid()
    multiprocessing.current_process()._config["daemon"] = False  # it may start processes
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    if preexec_fn is not None:
        preexec_fn()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    sys.argv = words
    code = 0
    try:  # and end as an interpreter does, which a process of multiprocessing does not
        if words[0] == "rowmesh":
            runpy.run_module("rowmesh.cli", run_name="__main__")
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def start_ranks(
    words: Sequence[str],
    *,
    ranks: int,
    each: Sequence[Mapping[str, str]] = (),
    **options: Any,
) -> list[Fork]:
    """Each of the ranks that a launcher would start, without the launcher; ``words`` of `Fork`.

    ``each`` has what the environment of each rank has besides.
    """
    ours = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
    more = [mine | dict(theirs) for mine, theirs in zip(ours, each or [{}] * ranks, strict=True)]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    world |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [
        Fork(
            words,
            env=environment(**world | {"RANK": f"{r}", "LOCAL_RANK": f"{r}", **more[r]}),
            **options,
        )
        for r in range(ranks)
    ]


def finish(
    process: "subprocess.Popen[str] | Fork", *, timeout: float = 180
) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr; the process group is killed if it does not end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err
