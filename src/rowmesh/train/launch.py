"""Local ranks by torch's own launcher, and what to say when one of them fails."""

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import NoReturn, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rowmesh.comm.mesh import Mesh, init_mesh
from rowmesh.comm.status import sentence_of
from rowmesh.errors import InputError, PeerError
from rowmesh.storage import keep_freed_memory
from rowmesh.train.stop import INTERRUPTED, SIGNALS

__all__ = ["exit_code", "launch", "settle_rank"]

T = TypeVar("T")

_BAD_INPUT, _OTHER = 2, 1
_SHUTDOWN_S = 8  # ranks that outlive a failed one so long are killed
# One process imports these, and ranks are its forks. torch._dynamo is what the first optimizer of a
# process imports, and takes as long as torch itself.
_PRELOADED = ["rowmesh", "torch._dynamo"]
_LAUNCHER_LOGS = ("distributed.elastic", "multiprocessing.spawn")
_STOPPED = re.compile(r"KeyboardInterrupt: (.*)")
_OURS = re.compile(r"(?:InputError|PlanError|NotExecutable|StepError|DivergedError|PeerError): ")
_INPUT = re.compile(r"(?:rank \d+ failed: )?(?:InputError|PlanError|NotExecutable): ")


def exit_code(error: BaseException) -> int:
    """2 for bad input (`InputError`, `PlanError`), be it this rank's or a peer's; else 1."""
    is_input = _INPUT.match(sentence_of(error).removeprefix("PeerError: "))
    return _BAD_INPUT if is_input else _OTHER


def launch(work: Callable[[Mesh], T], *, ranks: int | None = None) -> T:
    """``work(mesh)`` on ``ranks`` processes of this machine, or on the ranks of ``torchrun``.

    Under ``torchrun`` (WORLD_SIZE is set) this process joins its ranks; one rank needs no other
    process. Otherwise torch's launcher starts the ranks, each with one torch thread, and ends
    all of them when one fails. SIGINT and SIGTERM go on to the ranks, which stop when they like
    (`rowmesh.train.stop.Stop`); the next one kills them. Every rank keeps freed memory.

    Args:
        work: A function or `functools.partial` that pickles; it runs on every rank.
        ranks: How many; default the ranks of ``torchrun``, or one.

    Returns:
        What ``work`` gave on rank 0 (under ``torchrun``: on this rank).

    Raises:
        InputError: If ``ranks`` is below 1, or not what ``torchrun`` started; or what a started
            rank said of its input.
        PeerError: If a started rank failed for another reason; the message is its sentence.
        KeyboardInterrupt: If a signal stopped the ranks, once all have ended.
    """
    if ranks is not None and ranks < 1:
        raise InputError(f"ranks is {ranks}, but must be at least 1")
    joined = int(os.environ.get("WORLD_SIZE", "0"))
    if joined and ranks is not None and ranks != joined:
        raise InputError(f"torchrun started {joined} ranks, not {ranks}: leave out the ranks")
    if joined or ranks in (None, 1):
        keep_freed_memory()
        with init_mesh() as mesh:
            return work(mesh)
    assert ranks is not None
    return _start(work, ranks)


def settle_rank() -> None:
    """One torch thread, and freed memory is kept: for processes that are nothing but a rank."""
    torch.set_num_threads(1)
    keep_freed_memory()


def _start(work: Callable[[Mesh], T], ranks: int) -> T:
    with (
        tempfile.TemporaryDirectory(prefix="rowmesh-") as logs,
        _quiet_launcher(),
        _one_thread(),
        _forwarded_signals() as forwarded,
    ):
        multiprocessing.set_forkserver_preload(_PRELOADED)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=_SHUTDOWN_S,
            start_method="forkserver",
        )
        try:
            result: T = elastic_launch(config, _run_rank)(work)[0]
            return result
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if forwarded:
                raise KeyboardInterrupt(forwarded[0]) from None
            raise _explain(rank, failure) from None


def _run_rank(work: Callable[[Mesh], T]) -> T:
    """A started rank: leave the reason of a failure for the launcher, and end at once."""
    settle_rank()
    try:
        signal.signal(signal.SIGINT, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked since this process began
        with init_mesh() as mesh:
            return work(mesh)
    except KeyboardInterrupt as error:
        _end(error, INTERRUPTED)
    except Exception as error:
        if os.environ.get("ROWMESH_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        _end(error, exit_code(error))


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _end(error: BaseException, code: int) -> NoReturn:
    get_error_handler().record_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # not exit(): it would wait for messages that never come


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[str]]:
    """Hand the first signal of SIGNALS on to the ranks, and kill them at the second.

    This thread and the ranks that it starts have the signals blocked: torch's launcher, which
    would end the ranks, does not see them, and a rank sees one only once it can deal with it.

    Yields:
        Names of the signals so far.
    """
    resource_tracker.ensure_running()  # it unblocks the signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forwarded: list[str] = []
    done = threading.Event()
    watcher = threading.Thread(target=_forward, args=(forwarded, done), daemon=True)
    watcher.start()
    try:
        yield forwarded
    finally:
        done.set()
        watcher.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forward(forwarded: list[str], done: threading.Event) -> None:
    told: set[int] = set()
    while not done.is_set():
        found = signal.sigtimedwait(SIGNALS, 0.1)
        if found is not None:
            forwarded.append(signal.Signals(found.si_signo).name)
        for child in multiprocessing.active_children() if forwarded else ():
            assert child.pid is not None
            if len(forwarded) > 1:
                child.kill()
            elif child.pid not in told:
                told.add(child.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGINT)


def _explain(rank: int, failure: ProcessFailure) -> BaseException:
    message = failure.message  # of an error file: a dict, whatever its annotation says
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = ", as when memory runs out" if name == "SIGKILL" else ""
        return PeerError(f"rank {rank} was ended by {name}{hint}")
    if not isinstance(message, dict):
        return PeerError(f"rank {rank} ended with code {failure.exitcode} and left no message")
    sentence = " ".join(str(message["message"]).split())
    if stopped := _STOPPED.match(sentence):
        return KeyboardInterrupt(stopped[1])
    if _OURS.match(sentence):
        sentence = _OURS.sub("", sentence, count=1)
    else:
        sentence = f"rank {rank} failed: {sentence} (ROWMESH_DEBUG=1 shows where)"
    return InputError(sentence) if failure.exitcode == _BAD_INPUT else PeerError(sentence)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries that ranks load inside use one thread, unless the environment says how many."""
    if os.environ.get("OMP_NUM_THREADS"):
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the launcher's own log off stderr: it repeats failures at length."""
    silent = logging.NullHandler()
    loggers = [logging.getLogger(f"torch.{name}") for name in _LAUNCHER_LOGS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(silent)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(silent)
            logger.propagate = propagate
