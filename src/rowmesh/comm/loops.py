"""Where a rank is in its loops over batches: at its last, or past the end of its loader.

Note: A loop that is left
-------------------------
A generator is not told what ends the loop over it: it is closed, by an error as by a ``break``, and
by an error before anybody can say why the rank ends. So the place of a loop that was closed is kept
until the next forward or loop, for what is said of an error that comes before either.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Loops"]

_AT_STAND_IN = (
    "(this rank's loader had ended before others', and it was at the batch that stands in for "
    "more, of 0 samples unless empty= gave another: if the model cannot run that, say "
    "batches(loader, empty=...) with one that it can, or give every rank as many batches)"
)


@dataclass(eq=False, slots=True)
class Loop:
    """One pass through a loader, at one batch."""

    is_last: bool
    is_stand_in: bool = False
    all_last: bool | None = None


class Loops:
    """The loops of one rank that are under way, the innermost last."""

    def __init__(self) -> None:
        self._open: list[Loop] = []
        self._left: Loop | None = None

    @property
    def innermost(self) -> Loop | None:
        """The loop whose batch a forward is of, if there is one."""
        return self._open[-1] if self._open else None

    @contextlib.contextmanager
    def at(self, *, is_last: bool, is_stand_in: bool = False) -> Iterator[Loop]:
        """A batch of a loop, this rank's last or not; loops may be nested, as for an evaluation."""
        loop = Loop(is_last=is_last, is_stand_in=is_stand_in)
        self._open.append(loop)
        self._left = None
        try:
            yield loop
        except GeneratorExit:  # see the note
            self._left = loop
            raise
        finally:
            self._open.remove(loop)

    def saw_forward(self, *, all_last: bool) -> None:
        """A forward has run, and told whether all ranks are at their last batch."""
        self._left = None
        if self._open:
            self._open[-1].all_last = all_last

    def explain(self, error: BaseException) -> None:
        """Note on ``error`` that it came at a batch that stands in for others, if it did."""
        loop = self.innermost or self._left
        told = getattr(error, "__notes__", ())
        if loop is not None and loop.is_stand_in and _AT_STAND_IN not in told:
            error.add_note(_AT_STAND_IN)
