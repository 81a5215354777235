"""Numbers of channels: taken in one order on all ranks, and given back where all ranks meet.

A model that was dropped is gone when a rank's garbage collector says so, on every rank at another
time. So its channels are free only when all ranks have told each other that it is gone. And what a
dropped model sent may never have been received: whoever is given a number next goes on with
sequences where it stopped, on the rank where it went furthest, so that no tag comes twice.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rowmesh.errors import RowmeshError

__all__ = ["MOST_CHANNELS", "Loan", "Numbers"]

MOST_CHANNELS = 1 << 14


class Numbered(Protocol):
    """What has a number: a channel."""

    @property
    def number(self) -> int:
        """Its own."""

    @property
    def last(self) -> int:
        """The greatest sequence that it has used, from the first use of its number on."""


@dataclass(slots=True, eq=False)
class Loan:
    """Channels of one holder."""

    holder: weakref.ref[Any]
    channels: list[Numbered] = field(default_factory=list)


class Numbers:
    """Of one mesh.

    Attributes:
        first: The sequence that uses of a new number are not below.
    """

    def __init__(self) -> None:
        self.first = 0
        self._num_made = self._num_loans = 0
        self._free: deque[tuple[int, int]] = deque()
        self._loans: dict[int, Loan] = {}

    @property
    def num_made(self) -> int:
        """How many numbers are in use, or have been."""
        return self._num_made

    def take(self) -> tuple[int, int]:
        """A number, and the sequence that all uses of it have been below.

        Collective:
            All ranks, in one order; nothing is sent.
        """
        if self._free:
            return self._free.popleft()
        if self._num_made == MOST_CHANNELS:
            raise RowmeshError(
                f"this mesh has made {MOST_CHANNELS} channels, all it can: keep fewer sharded "
                f"models at a time; those of dropped ones come back with the next rm.shard"
            )
        self._num_made += 1
        return self._num_made - 1, self.first

    def lend(self, holder: object) -> Loan:
        """What a holder takes until it is gone.

        Collective:
            As `take`.
        """
        self._num_loans += 1
        loan = Loan(weakref.ref(holder))
        self._loans[self._num_loans] = loan
        return loan

    def take_back(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """Free the numbers of holders that are gone on all ranks.

        Args:
            gather: Every rank's value, in rank order.

        Collective:
            All ranks.
        """
        if any(loan.holder() is not None for loan in self._loans.values()):
            gc.collect()  # models are cycles: one that was dropped may not be gone yet
        gone = {
            number: max((channel.last for channel in loan.channels), default=0)
            for number, loan in self._loans.items()
            if loan.holder() is None
        }
        everyone = gather(gone)
        for number in sorted(set(gone).intersection(*everyone)):
            first = 1 + max(found[number] for found in everyone)
            self._free += ((c.number, first) for c in self._loans.pop(number).channels)
