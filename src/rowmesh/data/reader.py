"""One rank's way through its streams: what to decode next, and the batch of each step."""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from rowmesh.data.rows import Layout, Piece, Rows
from rowmesh.data.streams import Deal, Part
from rowmesh.errors import InputError
from rowmesh.features import Batch

__all__ = ["Reader"]


class Reader:
    """Batches of some streams of a deal; used by one thread.

    Args:
        deal: The rows of all ranks.
        streams: This rank's.
        load: The rows of a row group, in the order of the file.
        layout: Of those rows.
        start: The first global step.
        end: The step to end before; None for endless.
    """

    def __init__(
        self,
        deal: Deal,
        streams: range,
        *,
        load: Callable[[int], Rows],
        layout: Layout,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        self._deal, self._streams, self._load, self._layout = deal, streams, load, layout
        self._steps = count(start) if end is None else iter(range(start, end))
        self._schedule = deal.schedule(streams, start=start, end=end)
        self._next = next(self._schedule, None)
        self._waiting: dict[int, deque[Piece]] = {stream: deque() for stream in streams}
        self._needed: deque[int] = deque()  # steps of the parts that no batch has reached
        self._group: tuple[int, Rows] | None = None  # the row group decoded last
        self._row_order = functools.lru_cache(maxsize=1)(deal.row_order)
        self._may_look_ahead = True

    def batches(self) -> Iterator[Batch]:
        """The batch of each step; decodes what it needs and is not there yet."""
        for step in self._steps:
            while self._next is not None and self._next.needed <= step:
                self._decode(self._next)
            while self._needed and self._needed[0] <= step:
                self._needed.popleft()
            pieces = [piece for stream in self._streams for piece in self._take(stream, step)]
            yield Rows.to_batch(pieces, self._layout)

    def look_ahead(self) -> bool:
        """Decode a part before its step, unless there is one for each stream; whether it did.

        What fails here is tried again at its step, so that errors come where they belong.
        """
        if self._next is None or len(self._needed) >= len(self._streams):
            return False
        try:
            if self._may_look_ahead:
                self._decode(self._next)
        except InputError:
            self._may_look_ahead = False
        return self._may_look_ahead

    def _decode(self, part: Part) -> None:
        if self._group is None or self._group[0] != part.group:
            self._group = None  # its memory goes before the next one's comes
            self._group = part.group, self._load(part.group)
        order = self._row_order(part.epoch, part.group)
        rows = self._group[1].take(order[part.first : part.last])
        self._waiting[part.stream].append(Piece(rows, 0, len(rows)))
        self._needed.append(part.needed)
        self._next = next(self._schedule, None)

    def _take(self, stream: int, step: int) -> Iterator[Piece]:
        """This step's rows of a stream, off the front of what is decoded."""
        waiting, left = self._waiting[stream], self._deal.rows_at(stream, step)
        while left:
            rows, first, end = waiting[0]
            last = min(first + left, end)
            yield Piece(rows, first, last)
            left -= last - first
            if last == end:
                waiting.popleft()
            else:
                waiting[0] = Piece(rows, last, end)
