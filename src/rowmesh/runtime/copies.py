"""Rows that every rank holds: their dense sums, and how homes and copies are kept the same."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rowmesh.runtime.places import DENSE_SUMS, Region
from rowmesh.runtime.tickets import Stack, Ticket

if TYPE_CHECKING:
    from rowmesh.runtime.embeddings import ShardedEngine

__all__ = ["CopyRider", "make_riders", "refresh_copies", "refresh_homes"]


class CopyRider:
    """The gradients of all copies of a stack whose sums are ``dense`` or ``bucket``.

    One line a row: its gradient, and how many ranks have one; a row that none has is not updated.

    Args:
        engine: Of the collection; its tickets hold the gradients.
        number: Of the stack.
        first, last: The rows, as slots of the copies stack.
    """

    def __init__(self, engine: "ShardedEngine", number: int, first: int, last: int) -> None:
        self._engine, self.number, self._first, self._last = engine, number, first, last
        self._columns = engine.stacks[number].layout.dim + 1
        self.on_ready: Callable[[], None] | None = None
        self._sums: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Numbers that travel."""
        return (self._last - self._first) * self._columns

    def pack(self, out: Tensor) -> None:
        """This rank's gradients, added over its backwards in their order."""
        lines = out.view(-1, self._columns).zero_()
        for ticket in self._engine.tickets:
            if ticket.is_sent:
                slots, grads = self._part(ticket)
                lines[:, :-1].index_add_(0, slots, grads)
                lines[:, -1].index_fill_(0, slots, 1.0)

    def _part(self, ticket: Ticket) -> tuple[Tensor, Tensor]:
        """Rows, from the first of ours, and their gradients."""
        slots, grads = ticket.routes[self.number].dense_slots, ticket.dense[self.number]
        edges = slots.new_tensor([self._first, self._last])
        begin, end = torch.searchsorted(slots, edges).tolist()
        return slots[begin:end].long() - self._first, grads[begin:end]

    def take(self, sums: Tensor) -> None:
        """Keep the touched rows and their sums."""
        lines = sums.view(-1, self._columns)
        rows = (lines[:, -1] > 0).nonzero().squeeze(1)
        self._sums = rows + self._first, lines.index_select(0, rows)[:, :-1].contiguous()

    def sums(self) -> tuple[Tensor, Tensor]:
        """Touched rows, as slots of the copies stack, and their summed gradients; once."""
        assert self._sums is not None
        found, self._sums = self._sums, None
        return found


def make_riders(engine: "ShardedEngine", sums: str) -> list[CopyRider]:
    """Of an engine's stacks, those whose copies' sums are ``dense``, or ``bucket``."""
    at, made = DENSE_SUMS.index(sums), []
    for number, stack in enumerate(engine.stacks):
        first, last = stack.layout.dense_bounds[at : at + 2]
        if first < last and stack.layout.trainable:
            made.append(CopyRider(engine, number, first, last))
    engine.riders += made
    return made


def refresh_homes(engine: "ShardedEngine", *, table: int | None = None) -> None:
    """Copy hot rows, of all tables or of one, and their optimiser state back to their homes.

    Each rank does so with its own homes.
    """
    for stack, region, rows in _hot_regions(engine, table):
        if region.rank == engine.mesh.rank:
            slots = torch.from_numpy(region.home_slots()).to(stack.home.device)
            for home, copies in _tensors(stack):
                home.index_copy_(0, slots, copies[rows])


def refresh_copies(engine: "ShardedEngine", *, table: int | None = None) -> None:
    """Make hot rows, of all tables or of one, and their state what they are at home.

    Collective:
        All ranks.
    """
    from rowmesh.runtime.regions import send_bytes

    everyone = list(range(engine.mesh.world))
    for stack, region, rows in _hot_regions(engine, table):
        slots = torch.from_numpy(region.home_slots()).to(stack.home.device)
        for home, copies in _tensors(stack):
            if region.rank == engine.mesh.rank:
                copies[rows] = home.index_select(0, slots)
            part = copies[rows]
            send_bytes(engine, part, source=region.rank, targets=everyone, edge="tier move")


def _hot_regions(
    engine: "ShardedEngine", table: int | None
) -> Iterator[tuple[Stack, Region, slice]]:
    """With the stack and the rows of its copies."""
    for stack in engine.stacks:
        for region in stack.layout.hot:
            if table is None or region.table == table:
                yield stack, region, slice(region.start, region.start + region.num_rows)


def _tensors(stack: Stack) -> list[tuple[Tensor, Tensor]]:
    """Home and copies: of the weights, and of every state."""
    states = [(stack.home_state[name], stack.copies_state[name]) for name in stack.home_state]
    return [(stack.home, stack.copies), *states]
