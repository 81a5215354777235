"""Which rank failed first, as torchrun reports it, and the last lines that rank wrote."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Failure", "last_lines", "read_failures"]

# torchrun's report of a failure, torch/distributed/elastic/multiprocessing/errors
_REPORT = re.compile(
    r"^ *time +: (?P<time>\S+)\n.*\n *rank +: (?P<rank>\d+) .*\n *exitcode +: (?P<code>-?\d+) ",
    re.M,
)
_NUM_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A rank that ended before its time.

    Args:
        rank: Which.
        host: The host it ran on.
        code: Its exit code, or minus the number of the signal that ended it.
        lines: The last lines it wrote to stderr.
    """

    rank: int
    host: int
    code: int
    lines: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The code a shell would give: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        how = f"ended with code {self.code}"
        if self.code < 0:
            how = f"was ended by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} (host {self.host}) {how}"


def read_failures(logs: Iterable[Path], folder: Path) -> list[Failure]:
    """Failures that the torchrun logs, one a host, report; the one that happened first is first.

    Ranks that torchrun itself ended (SIGTERM) come last. Within one second of its clock the
    order is that of their last words, then of ranks.
    """
    found = []
    for host, log in enumerate(logs):
        for match in _REPORT.finditer(log.read_text(errors="replace") if log.exists() else ""):
            rank, code = int(match["rank"]), int(match["code"])
            errors = folder / f"rank{rank}.err"
            lines = tuple(last_lines(errors))
            failure = Failure(rank=rank, host=host, code=code, lines=lines)
            spoke = errors.stat().st_mtime_ns if lines else float("inf")
            found.append((code == -signal.SIGTERM, match["time"], spoke, rank, failure))
    return [failure for *_, failure in sorted(found, key=lambda entry: entry[:4])]


def last_lines(path: Path, *, count: int = _NUM_LINES) -> list[str]:
    """The last lines of a log that say anything; none if it is not there."""
    if not path.exists():
        return []
    lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]
