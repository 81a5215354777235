"""One rank's way through its streams: what to decode next, and the batch of each step."""

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from rowmesh.data.rows import Layout, Piece, Rows
from rowmesh.data.streams import Deal, Part
from rowmesh.errors import InputError
from rowmesh.features import Batch

__all__ = ["Reader"]

# Batches are made together up to so many rows: a slice of a stream costs as much as 50 rows.
_BLOCK_ROWS = 1 << 13


class Reader:
    """Batches of some streams of a deal; used by one thread.

    Args:
        deal: The rows of all ranks.
        streams: This rank's.
        load: The given rows of a row group, in the order given.
        layout: Of those rows.
        start: The first global step.
        end: The step to end before; None for endless.
    """

    def __init__(
        self,
        deal: Deal,
        streams: range,
        *,
        load: Callable[[int, npt.NDArray[np.int64]], Rows],
        layout: Layout,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        self._deal, self._streams, self._load, self._layout = deal, streams, load, layout
        self._step, self._end = start, end
        self._schedule = deal.schedule(streams, start=start, end=end)
        self._after = next(self._schedule, None)  # the part behind those that are next
        self._next = self._parts()
        self._waiting: dict[int, deque[Piece]] = {stream: deque() for stream in streams}
        self._needed: deque[int] = deque()  # steps of the parts that no batch has reached
        self._may_look_ahead = True

    def batches(self) -> Iterator[Batch]:
        """The batch of each step; decodes what it needs and is not there yet."""
        while self._end is None or self._step < self._end:
            first = self._step
            while self._next and self._next[0].needed <= first:
                self._decode()
            self._step = last = self._last_of_block(first)
            while self._needed and self._needed[0] < last:
                self._needed.popleft()
            pieces = [p for stream in self._streams for p in self._take(stream, first, last)]
            yield from Rows.to_batches(
                pieces, self._layout, steps=last - first, run=self._deal.rows_per_step
            )

    def look_ahead(self) -> bool:
        """Decode a row group before its step, unless there is one for each stream; whether it did.

        What fails here is tried again at its step, so that errors come where they belong.
        """
        if not self._next or len(self._needed) + len(self._next) > len(self._streams):
            return False
        try:
            if self._may_look_ahead:
                self._decode()
        except InputError:
            self._may_look_ahead = False
        return self._may_look_ahead

    def _last_of_block(self, first: int) -> int:
        """The step to end before, when batches from ``first`` on are made together.

        All have the same number of rows of each stream, and none needs what is not decoded.
        """
        deal = self._deal
        epoch = first - first % deal.num_steps
        last = first + _BLOCK_ROWS // (deal.rows_per_step * len(self._streams))
        last = min(last, epoch + deal.num_full_steps)
        if self._next:
            last = min(last, self._next[0].needed)
        return max(first + 1, last)

    def _parts(self) -> list[Part]:
        """The next parts of one row group in one order, to be decoded together."""
        parts: list[Part] = []
        while self._after is not None and (not parts or _same_order(parts[0], self._after)):
            parts.append(self._after)
            self._after = next(self._schedule, None)
        return parts

    def _decode(self) -> None:
        parts = self._next
        order = self._deal.row_order(parts[0].epoch, parts[0].group)
        rows = self._load(
            parts[0].group, np.concatenate([order[part.first : part.last] for part in parts])
        )
        first = 0
        for part in parts:
            last = first + part.last - part.first
            self._waiting[part.stream].append(Piece(rows, first, last))
            self._needed.append(part.needed)
            first = last
        self._next = self._parts()

    def _take(self, stream: int, first: int, last: int) -> Iterator[Piece]:
        """The rows of a stream at steps ``[first, last)``, off the front of what is decoded."""
        waiting = self._waiting[stream]
        left = self._deal.rows_at(stream, first) * (last - first)
        while left:
            rows, begin, end = waiting[0]
            stop = min(begin + left, end)
            yield Piece(rows, begin, stop)
            left -= stop - begin
            if stop == end:
                waiting.popleft()
            else:
                waiting[0] = Piece(rows, stop, end)


def _same_order(part: Part, other: Part) -> bool:
    return (part.epoch, part.group) == (other.epoch, other.group)
