"""Local ranks: starts them, hands signals on, and says why one of them failed."""

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Any, TypeVar

from rowmesh.comm.mesh import Mesh, init_mesh
from rowmesh.errors import InputError, PeerError
from rowmesh.signals import SIGNALS, handled
from rowmesh.storage import keep_freed_memory
from rowmesh.train.started import Report, exit_code, run_rank, settle_rank, watch_agent
from rowmesh.train.stop import ONE_EVENT_S

__all__ = ["exit_code", "launch", "settle_rank"]

T = TypeVar("T")

_BAD_INPUT = 2
_SHUTDOWN_S = 5.0  # ranks that outlive a failed one so long are killed
# One process imports these, and ranks are its forks. torch._dynamo is what the first optimizer of a
# process imports, and takes as long as torch itself.
_PRELOADED = ["rowmesh", "torch._dynamo"]
_STOPPED = re.compile(r"KeyboardInterrupt: (.*)")
_OURS = re.compile(r"(?:InputError|PlanError|NotExecutable|StepError|DivergedError|PeerError): ")


def launch(work: Callable[[Mesh], T], *, ranks: int | None = None) -> T:
    """``work(mesh)`` on ``ranks`` processes of this machine, or on the ranks of ``torchrun``.

    Under ``torchrun`` (WORLD_SIZE is set) this process joins its ranks; one rank needs no other
    process. Otherwise ranks are started here, each with one torch thread, and all of them end when
    one fails, or this process does. SIGINT, SIGTERM and SIGHUP go on to the ranks, which stop when
    they like (`rowmesh.train.stop.Stop`); the next one kills them. Every rank keeps freed memory.
    No port is open to other machines (docs/security.md).

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
        if "TORCHELASTIC_RUN_ID" in os.environ:
            watch_agent()
        with init_mesh() as mesh:
            return work(mesh)
    assert ranks is not None
    result: T = _start(work, ranks)
    return result


@dataclass(eq=False, slots=True)
class _Started:
    """A rank: its process, the line it reports on, and what came."""

    rank: int
    process: ForkServerProcess
    line: Connection
    report: Report | None = None
    was_killed: bool = False

    def read(self) -> bool:
        """Take what it says; false when it says no more."""
        try:
            self.report = self.line.recv()
        except (EOFError, OSError):
            return False
        return True

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.process.exitcode is None:
            self.was_killed = True
            self.process.kill()


def _start(work: Callable[[Mesh], Any], ranks: int) -> Any:
    started: list[_Started] = []
    with tempfile.TemporaryDirectory(prefix="rowmesh-") as folder, _one_thread():
        try:
            with _server():
                for rank in range(ranks):
                    started.append(_start_rank(work, rank, ranks, folder))
            forwarding = _Forwarding(started)
            with handled(forwarding.handle):
                is_well = _attend(started)
            if forwarding.names:
                raise KeyboardInterrupt(forwarding.names[0] + _trouble(started))
            if not is_well:
                raise _explain(started)
            report = started[0].report
            assert report is not None
            return report.value
        finally:
            _end_all(started, after_s=0.0)


@contextlib.contextmanager
def _server() -> Iterator[None]:
    """With the process whose forks ranks are, which has signals blocked: they begin like that.

    A rank then sees a signal only once it can deal with it. If the ranks are not all started, for
    Ctrl-C, the process ends at once, though it may have seconds of imports before it.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    resource_tracker.ensure_running()  # it unblocks the signals when it starts
    earlier = _server_pid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    except BaseException:
        mine = _server_pid()
        if mine is not None and mine != earlier:
            os.kill(mine, signal.SIGKILL)
        raise


def _server_pid() -> int | None:
    found: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return found


def _start_rank(work: Callable[[Mesh], Any], rank: int, ranks: int, folder: str) -> _Started:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    with theirs:
        process = context.Process(
            target=run_rank, args=(work, rank, ranks, folder, theirs), name=f"rank {rank}"
        )
        process.start()
    return _Started(rank, process, ours)


class _Forwarding:
    """A signal handler: the first signal goes on to the ranks, a later one kills them."""

    def __init__(self, started: Sequence[_Started]) -> None:
        self.names: list[str] = []
        self._started, self._first_at = started, 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Deal with one."""
        now, is_first = time.monotonic(), not self.names
        self.names.append(signal.Signals(number).name)
        if is_first:
            self._first_at = now
            for one in self._started:
                if one.process.exitcode is None and one.process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one.process.pid, signal.SIGINT)
        elif now - self._first_at > ONE_EVENT_S:
            for one in self._started:
                one.kill()


def _attend(started: Sequence[_Started]) -> bool:
    """Wait until all ranks have ended: whether all ended well. One that fails ends all."""
    lines = {one.line: one for one in started}
    running = {one.process.sentinel: one for one in started}
    while running:
        for ready in connection.wait([*lines, *running]):
            if isinstance(ready, Connection):
                if not lines[ready].read():
                    del lines[ready]
            elif isinstance(ready, int):
                one = running.pop(ready)
                one.process.join()
                if one.process.exitcode:
                    _end_all(started, after_s=_SHUTDOWN_S)
                    return False
    return True


def _end_all(started: Sequence[_Started], *, after_s: float) -> None:
    """Give all that time to end, then kill; and take their last words."""
    deadline = time.monotonic() + after_s
    for one in started:
        one.process.join(max(0.0, deadline - time.monotonic()))
    for one in started:
        one.kill()
    for one in started:
        one.process.join()
        while not one.line.closed and one.line.poll() and one.read():
            pass
        if after_s == 0.0:
            one.line.close()


def _trouble(started: Sequence[_Started]) -> str:
    """What a rank says went wrong in a stop, if anything; not what its end did to others."""
    reports = [one.report for one in started if one.report is not None and one.report.code]
    own = [r for r in reports if not r.sentence.startswith(("KeyboardInterrupt", "PeerError"))]
    return f"; {_OURS.sub('', own[0].sentence, count=1)}" if own else ""


def _explain(started: Sequence[_Started]) -> BaseException:
    """The error of the rank that failed first."""
    for one in started:
        code = one.process.exitcode
        if code is not None and code < 0 and not one.was_killed:
            name = signal.Signals(-code).name
            hint = ", as when memory runs out" if name == "SIGKILL" else ""
            return PeerError(f"rank {one.rank} was ended by {name}{hint}")
    failed = [one for one in started if one.report is not None and one.report.code]
    if not failed:
        one = next(one for one in started if one.process.exitcode)
        code = one.process.exitcode
        return PeerError(f"rank {one.rank} ended with code {code} and left no message")
    first = min(failed, key=_time_of)
    assert first.report is not None
    sentence = " ".join(first.report.sentence.split())
    if stopped := _STOPPED.match(sentence):
        return KeyboardInterrupt(stopped[1])
    if _OURS.match(sentence):
        sentence = _OURS.sub("", sentence, count=1)
    else:
        sentence = f"rank {first.rank} failed: {sentence} (ROWMESH_DEBUG=1 shows where)"
    return InputError(sentence) if first.report.code == _BAD_INPUT else PeerError(sentence)


def _time_of(one: _Started) -> float:
    assert one.report is not None
    return one.report.at


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
