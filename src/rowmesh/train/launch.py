"""Local ranks by torch's own launcher, and what to say when one of them fails."""

import contextlib
import logging
import os
import re
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rowmesh.comm.mesh import Mesh, init_mesh
from rowmesh.comm.status import sentence_of
from rowmesh.errors import InputError, PeerError

__all__ = ["exit_code", "launch"]

T = TypeVar("T")

_BAD_INPUT, _OTHER, _INTERRUPTED = 2, 1, 130
_SHUTDOWN_S = 8  # ranks that ignore the signal so long are killed
_LAUNCHER_LOGS = ("distributed.elastic", "multiprocessing.spawn")
_OURS = re.compile(r"(?:InputError|PlanError|NotExecutable|StepError|PeerError): ")
_INPUT = re.compile(r"(?:rank \d+ failed: )?(?:InputError|PlanError|NotExecutable): ")


def exit_code(error: BaseException) -> int:
    """2 for bad input (`InputError`, `PlanError`), be it this rank's or a peer's; else 1."""
    is_input = _INPUT.match(sentence_of(error).removeprefix("PeerError: "))
    return _BAD_INPUT if is_input else _OTHER


def launch(work: Callable[[Mesh], T], *, ranks: int | None = None) -> T:
    """``work(mesh)`` on ``ranks`` processes of this machine, or on the ranks of ``torchrun``.

    Under ``torchrun`` (WORLD_SIZE is set) this process joins its ranks; one rank needs no other
    process. Otherwise torch's launcher starts the ranks, each with one torch thread, and ends
    all of them when one fails or this process is interrupted.

    Args:
        work: A function or `functools.partial` that pickles; it runs on every rank.
        ranks: How many; default the ranks of ``torchrun``, or one.

    Returns:
        What ``work`` gave on rank 0 (under ``torchrun``: on this rank).

    Raises:
        InputError: If ``ranks`` is below 1, or not what ``torchrun`` started; or what a started
            rank said of its input.
        PeerError: If a started rank failed for another reason; the message is its sentence.
        KeyboardInterrupt: If the launcher got a signal, once all ranks have ended.
    """
    if ranks is not None and ranks < 1:
        raise InputError(f"ranks is {ranks}, but must be at least 1")
    joined = int(os.environ.get("WORLD_SIZE", "0"))
    if joined and ranks is not None and ranks != joined:
        raise InputError(f"torchrun started {joined} ranks, not {ranks}: leave out the ranks")
    if joined or ranks in (None, 1):
        with init_mesh() as mesh:
            return work(mesh)
    assert ranks is not None
    return _start(work, ranks)


def _start(work: Callable[[Mesh], T], ranks: int) -> T:
    with tempfile.TemporaryDirectory(prefix="rowmesh-") as logs, _quiet_launcher():
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
        )
        try:
            result: T = elastic_launch(config, _run_rank)(work)[0]
            return result
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise _explain(rank, failure) from None
        except SignalException as error:
            raise KeyboardInterrupt(error.sigval.name) from None


def _run_rank(work: Callable[[Mesh], T]) -> T:
    """A started rank: leave the reason of a failure for the launcher, and end at once."""
    torch.set_num_threads(1)
    try:
        with init_mesh() as mesh:
            return work(mesh)
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)
    except Exception as error:
        get_error_handler().record_exception(error)
        if os.environ.get("ROWMESH_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code(error))  # not exit(): it would wait for messages that never come


def _explain(rank: int, failure: ProcessFailure) -> InputError | PeerError:
    message = failure.message  # of an error file: a dict, whatever its annotation says
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = ", as when memory runs out" if name == "SIGKILL" else ""
        return PeerError(f"rank {rank} was ended by {name}{hint}")
    if not isinstance(message, dict):
        return PeerError(f"rank {rank} ended with code {failure.exitcode} and left no message")
    sentence = " ".join(str(message["message"]).split())
    if _OURS.match(sentence):
        sentence = _OURS.sub("", sentence, count=1)
    else:
        sentence = f"rank {rank} failed: {sentence} (ROWMESH_DEBUG=1 shows where)"
    return InputError(sentence) if failure.exitcode == _BAD_INPUT else PeerError(sentence)


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
