"""Who reads which rows at which step: arithmetic on row counts, without a file or a thread."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rowmesh.errors import InputError

__all__ = ["Deal", "Part", "num_streams", "streams_of"]

_Ids = npt.NDArray[np.int64]
# The first word of a generator's entropy: orders of row groups and of the rows in one are apart.
_GROUPS, _ROWS = 11, 12


def num_streams(batch_size: int, most: int) -> int:
    """V: the largest divisor of ``batch_size`` that is not above ``most``."""
    return max(v for v in range(1, min(most, batch_size) + 1) if batch_size % v == 0)


def streams_of(streams: int, *, rank: int, world: int) -> range:
    """The streams of a rank: ``[rank * V // world, (rank + 1) * V // world)``.

    Neighbours, since they may share a row group; and so the ranks' batches of a step, in rank
    order, are the same sequence of samples for every world.

    Raises:
        InputError: If there are more ranks than streams, or no such rank.
    """
    if not 0 <= rank < world:
        raise InputError(f"rank {rank} is not one of a world of {world}: ranks go from 0")
    if world > streams:
        raise InputError(
            f"{world} ranks cannot share the {streams} streams that the batch is cut into: use at "
            f"most {streams} ranks, or raise streams or choose a batch_size with a divisor from "
            f"{world} to streams"
        )
    return range(rank * streams // world, (rank + 1) * streams // world)


class Part(NamedTuple):
    """Rows ``[first, last)``, in the epoch's order, of one row group: a stretch of a stream."""

    epoch: int
    stream: int
    group: int
    first: int
    last: int
    needed: int  # the global step that reads its first row


@dataclass(frozen=True, eq=False)
class Deal:
    """The rows of an epoch, dealt to V streams of equal length.

    The row groups are put end to end in the order of (seed, epoch), the rows of each in the order
    of (seed, epoch, group). Stream v has positions ``[v N // V, (v + 1) N // V)`` of this line of
    N rows, and step g of the epoch takes positions ``[g m, (g + 1) m)`` of every stream, with
    m = batch_size / V. So an epoch has ``ceil(N / batch_size)`` steps and every row comes once.

    Args:
        sizes: Rows of each row group.
        streams: V.
        rows_per_step: m.
        seed: None leaves everything in the order of the files.
    """

    sizes: Sequence[int]
    streams: int
    rows_per_step: int
    seed: int | None

    @functools.cached_property
    def num_rows(self) -> int:
        """N."""
        return sum(self.sizes)

    @functools.cached_property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_rows // (self.streams * self.rows_per_step))

    @functools.cached_property
    def num_full_steps(self) -> int:
        """Steps of an epoch that have ``rows_per_step`` rows of every stream: the first ones."""
        return self.num_rows // self.streams // self.rows_per_step

    def bounds(self, stream: int) -> tuple[int, int]:
        """First and last position of a stream on the line."""
        return (
            stream * self.num_rows // self.streams,
            (stream + 1) * self.num_rows // self.streams,
        )

    def rows_at(self, stream: int, step: int) -> int:
        """How many rows a stream gives at a global step."""
        first, last = self.bounds(stream)
        left = last - first - step % self.num_steps * self.rows_per_step
        return max(0, min(self.rows_per_step, left))

    def row_order(self, epoch: int, group: int) -> _Ids:
        """The rows of a group in the order of an epoch."""
        if self.seed is None:
            return np.arange(self.sizes[group])
        rng = np.random.default_rng([_ROWS, self.seed, epoch, group])
        return rng.permutation(self.sizes[group])

    def schedule(self, streams: range, *, start: int, end: int | None = None) -> Iterator[Part]:
        """Every part that ``streams`` read from global step ``start`` on, in the order of need.

        Parts of one row group that are needed at the same step are neighbours.
        """
        if all(first == last for first, last in map(self.bounds, streams)):
            return  # fewer rows than streams: these never have one
        for epoch in count(start // self.num_steps):
            begin = epoch * self.num_steps
            if end is not None and begin >= end:
                return
            yield from self._epoch(epoch, streams, skip=max(0, start - begin))

    def _epoch(self, epoch: int, streams: range, *, skip: int) -> list[Part]:
        order = self._group_order(epoch)
        ends = np.cumsum(np.asarray(self.sizes, dtype=np.int64)[order])
        parts: list[tuple[int, int, Part]] = []
        for stream in streams:
            first, last = self.bounds(stream)
            at = first + skip * self.rows_per_step
            place = int(np.searchsorted(ends, at, side="right"))
            while at < last:
                end, group = int(ends[place]), int(order[place])
                begin = end - self.sizes[group]
                step = epoch * self.num_steps + (at - first) // self.rows_per_step
                part = Part(epoch, stream, group, at - begin, min(end, last) - begin, step)
                parts.append((step, place, part))
                at, place = end, place + 1
        # By place: a stream's parts stay in its order, and those of one group meet.
        return [part for _, _, part in sorted(parts)]

    def _group_order(self, epoch: int) -> _Ids:
        if self.seed is None:
            return np.arange(len(self.sizes))
        return np.random.default_rng([_GROUPS, self.seed, epoch]).permutation(len(self.sizes))
