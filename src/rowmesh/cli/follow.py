"""Stays with a run of the lab: shows rank 0's output, hands signals on, explains a failure."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

import typer

from rowmesh.errors import printable
from rowmesh.lab import Run
from rowmesh.signals import INTERRUPTED, handled

__all__ = ["follow", "forwarded_signals", "say", "say_failure"]

_POLL_S = 0.05


def say(sentence: str) -> None:
    """A sentence of ours, on stderr."""
    typer.echo(f"rowmesh: {printable(sentence)}", err=True)


@contextlib.contextmanager
def forwarded_signals() -> Iterator[list[signal.Signals]]:
    """Inside, SIGINT, SIGTERM and SIGHUP do nothing but join the list that is given."""
    found: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        found.append(signal.Signals(number))

    with handled(note):
        yield found


def follow(run: Run, signals: list[signal.Signals]) -> int:
    """Show what rank 0 writes until the run ends, and give its exit code.

    The first of ``signals`` goes on to the ranks, the second kills them; the code is then 130.
    """
    told = False
    while True:
        code = run.poll()
        for stream, text in zip((sys.stdout, sys.stderr), run.read_new(), strict=True):
            stream.write(text)
            stream.flush()
        if code is not None:
            return INTERRUPTED if signals else code
        if len(signals) > 1:
            say("stopped at once")
            run.stop(grace_s=0.0, code=INTERRUPTED)
        elif signals and not told:
            told = True
            say(f"{signals[0].name} goes on to the ranks; a second one kills them")
            run.interrupt(signals[0])
        else:
            time.sleep(_POLL_S)


def say_failure(run: Run) -> None:
    """Who failed first, with its last lines unless rank 0 has said the same."""
    text = run.failure()
    if not text:
        return
    head, *lines = text.splitlines()
    log = run.folder / "rank0.err"
    said = log.read_text(errors="replace") if log.exists() else ""
    is_new = bool(lines) and lines[-1].strip() not in said
    say(os.linesep.join([head, *lines]) if is_new else head.rstrip(":"))
