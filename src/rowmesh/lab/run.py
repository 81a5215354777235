"""One program under torchrun on all hosts of a lab: its output, its end, its failure."""

import codecs
import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rowmesh.errors import InputError
from rowmesh.lab.ending import end_processes
from rowmesh.lab.failures import Failure, last_lines, read_failures
from rowmesh.lab.remains import processes_marked

__all__ = ["RUN_MARK", "TIMED_OUT", "Run", "check_timeout"]

RUN_MARK = "ROWMESH_LAB_RUN"
TIMED_OUT = 124  # as timeout(1) has it
_POLL_S = 0.05
_AFTER_FAILURE_S = 6.0  # other hosts notice within seconds and say why: let them


def check_timeout(name: str, seconds: float | None) -> None:
    """Raise `InputError` unless ``seconds`` is None, or finite and above 0."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise InputError(f"{name} is {seconds:g}, but must be a finite number of seconds above 0")


class Run:
    """A program on all hosts, made by `Lab.launch`.

    All output is in ``folder``: ``rank3.out`` and ``rank3.err`` of each rank, ``host1.log`` of
    each host's torchrun. When a host fails, the others get 6 s to end by themselves.

    Args:
        agents: The torchrun of each host, each logging to ``folder``.
        folder: Where the output is.
        mark: Value of ``ROWMESH_LAB_RUN`` in the environment of all processes of the run.
        timeout_s: The run is stopped after so long, and its exit code is 124.
    """

    def __init__(
        self,
        agents: Sequence["subprocess.Popen[bytes]"],
        *,
        folder: Path,
        mark: str,
        timeout_s: float | None = None,
    ) -> None:
        self.folder = folder
        self._agents, self._mark = list(agents), mark
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._failed_at: float | None = None
        self._code: int | None = None
        self._out, self._err = (_Tail(folder / f"rank0.{kind}") for kind in ("out", "err"))

    def poll(self) -> int | None:
        """The exit code, or None while the run goes on; never waits for ranks that are well.

        0 if all hosts ended with 0, else the code of the rank that failed first (128 + n for
        signal n), 124 after the time-out.
        """
        if self._code is not None:
            return self._code
        now, codes = time.monotonic(), [agent.poll() for agent in self._agents]
        if None not in codes:
            self._code = self._exit_code()
        elif self._deadline is not None and now > self._deadline:
            self.stop(code=TIMED_OUT)
        elif any(codes):
            self._failed_at = self._failed_at or now
            if not self._has_ranks():  # torchrun would wait minutes for the host that failed
                self.stop(grace_s=0.0)
            elif now - self._failed_at > _AFTER_FAILURE_S:
                self.stop()
        return self._code

    def wait(
        self, timeout: float | None = None, *, on_line: Callable[[str], None] | None = None
    ) -> int:
        """Wait for the end and give the exit code, see `poll`.

        Args:
            timeout: The run is stopped after so many seconds; the code is then 124.
            on_line: Called with each line that rank 0 writes to stdout.
        """
        if timeout is not None:
            mine = time.monotonic() + timeout
            self._deadline = mine if self._deadline is None else min(mine, self._deadline)
        for line in self.lines:
            if on_line is not None:
                on_line(line)
        code = self.poll()
        assert code is not None
        return code

    @property
    def lines(self) -> Iterator[str]:
        """Lines of rank 0's stdout as they come, without their ends, until the run ends."""
        rest = ""
        while True:
            has_ended = self.poll() is not None
            *whole, rest = (rest + self._out.read_new()).split("\n")
            yield from whole
            if has_ended:
                if rest:
                    yield rest
                return
            time.sleep(_POLL_S)

    def read_new(self) -> tuple[str, str]:
        """What rank 0 has written to stdout and to stderr since the last call."""
        return self._out.read_new(), self._err.read_new()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Hand a signal to every torchrun, which hands it on to its ranks and waits for them."""
        for agent in self._agents:
            with contextlib.suppress(ProcessLookupError):
                agent.send_signal(number)

    def stop(self, *, grace_s: float = 5.0, code: int | None = None) -> None:
        """End the run's processes: SIGTERM, and after ``grace_s`` SIGKILL; no other run's.

        Args:
            grace_s: May be 0.
            code: What `poll` is to give from now on; default what the processes ended with.
        """
        is_running = any(agent.poll() is None for agent in self._agents)
        end_processes(lambda: processes_marked(RUN_MARK, self._mark), grace_s=grace_s)
        for agent in self._agents:
            agent.wait()
        if self._code is None:
            self._code = code if code is not None and is_running else self._exit_code()

    def _has_ranks(self) -> bool:
        agents = {agent.pid for agent in self._agents}
        return not processes_marked(RUN_MARK, self._mark) <= agents

    @property
    def failures(self) -> list[Failure]:
        """Ranks that failed, the first to do so first; complete once the run has ended."""
        logs = [self.folder / f"host{i}.log" for i in range(len(self._agents))]
        return read_failures(logs, self.folder)

    def failure(self) -> str:
        """Who failed first and the last lines of its stderr; empty if the run ended with 0.

        After the time-out: that, and the last lines of rank 0. What torchrun says then is only
        that it was stopped.
        """
        code = self.poll()
        if code in (None, 0):
            return ""
        if code == TIMED_OUT:
            lines = last_lines(self.folder / "rank0.err")
            return "\n".join(["the run was stopped: its time was over", *lines])
        failures = self.failures
        if failures:
            return _with_lines(str(failures[0]), failures[0].lines)
        return _with_lines(f"torchrun ended with code {code}", self._last_words())

    def _last_words(self) -> list[str]:
        """Rank 0's, or torchrun's if no rank ever said anything."""
        logs = [self.folder / name for name in ("rank0.err", "host0.log")]
        return next((lines for log in logs if (lines := last_lines(log))), [])

    def _exit_code(self) -> int:
        codes = [agent.returncode for agent in self._agents]
        if not any(codes):
            return 0
        first = next(iter(self.failures), None)
        worst = next(c for c in codes if c)
        return first.exit_code if first and first.code else 128 - worst if worst < 0 else worst


def _with_lines(head: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{head}:", *lines]) if lines else head


class _Tail:
    """Reads what is added to a file that may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read_new(self) -> str:
        if not self._path.exists():
            return ""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        return self._decoder.decode(new)
