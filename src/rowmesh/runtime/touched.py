"""Rows that a group has touched since the last sync, and what they were before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.optim.groups import mean_of_groups
from rowmesh.runtime.meeting import Rows

__all__ = ["Touched"]


class Touched:
    """Of one stack. Memory follows the touched rows, and a byte for every other.

    A replica that did not touch a row counts with its old value in the mean, so those that did
    must know what it was.

    Args:
        tensors: Of the stack: its rows, and their state if that is averaged too.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._is_touched = torch.zeros(len(tensors[0]), dtype=torch.bool, device=tensors[0].device)
        self._parts: list[Rows] = []

    def add(self, slots: Tensor) -> None:
        """Keep what ``slots``, distinct, are now, if they are touched for the first time."""
        slots = slots.long()
        new = slots[~self._is_touched.index_select(0, slots)]
        if len(new):
            self._is_touched[new] = True
            self._parts.append(Rows(new, [t.index_select(0, new) for t in self._tensors]))

    def now(self) -> Rows:
        """All touched rows as they are now."""
        if len(self._parts) != 1:
            nothing = torch.zeros(0, dtype=torch.int64, device=self._is_touched.device)
            slots = torch.cat([nothing, *(p.slots for p in self._parts)])
            slots, order = torch.sort(slots)
            old = [
                torch.cat([t[:0], *(p.values[i] for p in self._parts)]).index_select(0, order)
                for i, t in enumerate(self._tensors)
            ]
            self._parts = [Rows(slots, old)]
        slots = self._parts[0].slots
        return Rows(slots, [t.index_select(0, slots) for t in self._tensors])

    def mean(self, brought: Sequence[Rows]) -> Rows:
        """The mean over replicas of the rows that any of them brings, after `now`."""
        union = torch.cat([rows.slots for rows in brought]).unique()
        places = [torch.searchsorted(union, rows.slots) for rows in brought]
        found = []
        for i, old in enumerate(self._before(union)):
            values = []
            for place, rows in zip(places, brought, strict=True):
                values.append(old.clone())
                values[-1].index_copy_(0, place, rows.values[i])
            found.append(mean_of_groups(values))
        return Rows(union, found)

    def _before(self, slots: Tensor) -> list[Tensor]:
        """What ``slots`` were at the last sync: as they are, if this rank did not touch them."""
        (mine,) = self._parts
        found = [t.index_select(0, slots) for t in self._tensors]
        if len(mine.slots):
            place = torch.searchsorted(mine.slots, slots).clamp_(max=len(mine.slots) - 1)
            here = (mine.slots.index_select(0, place) == slots).nonzero().squeeze(1)
            place = place.index_select(0, here)
            for tensor, old in zip(found, mine.values, strict=True):
                tensor.index_copy_(0, here, old.index_select(0, place))
        return found

    def end(self, rows: Rows) -> None:
        """Set rows to their means; none is touched any more."""
        for tensor, values in zip(self._tensors, rows.values, strict=True):
            tensor.index_copy_(0, rows.slots, values)
        for part in self._parts:
            self._is_touched[part.slots] = False
        self._parts = []
