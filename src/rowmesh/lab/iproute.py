"""The programs `ip` and `tc`: where they are, and what they say when they fail."""

import os
import shutil
import subprocess
from collections.abc import Iterable

from rowmesh.errors import LabError

__all__ = ["batch", "call", "find_program"]

_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_TIMEOUT_S = 30.0


def find_program(name: str) -> str | None:
    """Path of ``ip`` or ``tc``, also where only root's PATH has it."""
    return shutil.which(name, path=_PATH)


def call(program: str, *arguments: str) -> str:
    """What ``program`` prints.

    Raises:
        LabError: If it is not there or fails; names the command and what it said on stderr.
    """
    return _run([program, *arguments], "", said=" ".join([program, *arguments]))


def batch(program: str, lines: Iterable[str], *, namespace: str | None = None) -> None:
    """Run ``program`` once with many commands, inside ``namespace`` if given.

    Raises:
        LabError: At the first command that fails, which is named.
    """
    inside = [] if namespace is None else ["-n", namespace]
    commands = list(lines)
    if commands:
        words = [program, *inside]
        _run([*words, "-batch", "-"], "\n".join(commands), said=" ".join(words), lines=commands)


def _run(words: list[str], text: str, *, said: str, lines: Iterable[str] = ()) -> str:
    path = find_program(words[0])
    if path is None:
        raise LabError(f"{words[0]} is not found: install iproute2")
    try:
        done = subprocess.run(
            [path, *words[1:]], input=text, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{said}` did not end within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise LabError(f"`{_failed(said, done.stderr, list(lines))}` failed: {_brief(done.stderr)}")
    return done.stdout


def _failed(said: str, stderr: str, lines: list[str]) -> str:
    """The command that failed: of a batch, the line that its last word, ``-:N``, counts to."""
    number = stderr.strip().rpartition("Command failed -:")[2]
    if lines and number.isdigit() and 0 < int(number) <= len(lines):
        return f"{said} {lines[int(number) - 1]}"
    return said


def _brief(stderr: str) -> str:
    words = [w for w in stderr.splitlines() if w and not w.startswith("Command failed")]
    return "; ".join(words) or "no message"
