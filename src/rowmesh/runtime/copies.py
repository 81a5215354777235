"""Copies of rows: their dense sums, and how homes and copies are kept the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rowmesh.runtime.places import DENSE_SUMS, Region
from rowmesh.runtime.tickets import Stack, Ticket
from rowmesh.topology import Topology

if TYPE_CHECKING:
    from rowmesh.runtime.embeddings import ShardedEngine

__all__ = ["CopyRider", "make_riders", "refresh_copies", "refresh_homes"]


class CopyRider:
    """The gradients of all copies of a stack whose sums are ``dense`` or ``bucket``.

    Of each row its gradient, and how many ranks have one; a row that none has is not updated.

    Args:
        engine: Of the collection; its tickets hold the gradients.
        number: Of the stack.
        first, last: The rows, as slots of the copies stack.
    """

    def __init__(self, engine: "ShardedEngine", number: int, first: int, last: int) -> None:
        self._engine, self.number, self._first, self._last = engine, number, first, last
        self._dim = engine.stacks[number].layout.dim
        self.on_ready: Callable[[], None] | None = None
        self._sums: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Numbers of all gradients."""
        return self.num_flags * self._dim

    @property
    def num_flags(self) -> int:
        """A flag a row."""
        return self._last - self._first

    def pack(self, out: Tensor, flags: Tensor) -> None:
        """This rank's gradients, added over its backwards in their order."""
        lines = out.zero_().view(-1, self._dim)
        flags.zero_()
        for ticket in self._engine.tickets:
            if ticket.is_sent:
                slots, grads = self._part(ticket)
                lines.index_add_(0, slots, grads)
                flags.index_fill_(0, slots, 1.0)

    def _part(self, ticket: Ticket) -> tuple[Tensor, Tensor]:
        """Rows, from the first of ours, and their gradients."""
        slots, grads = ticket.routes[self.number].dense_slots, ticket.dense[self.number]
        edges = slots.new_tensor([self._first, self._last])
        begin, end = torch.searchsorted(slots, edges).tolist()
        return slots[begin:end].long() - self._first, grads[begin:end]

    def take(self, sums: Tensor, flags: Tensor) -> None:
        """Keep the touched rows and their sums."""
        rows = (flags > 0).nonzero().squeeze(1)
        self._sums = rows + self._first, sums.view(-1, self._dim).index_select(0, rows)

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

    Shard groups that are apart are brought together first.

    Collective:
        All ranks. Copies on every rank need no message; a copy per host comes from the rank that
        has it on the home's host.
    """
    mesh = engine.mesh
    engine.bring_together()
    for copied in _copied(engine, table):
        home, source = copied.region.rank, copied.holder_beside_home(mesh.topology)
        for here, there in copied.tensors(mesh.rank):
            part = there if mesh.rank == source else copied.new_part(here)
            if source != home:
                _send(engine, part, source, [home])
            if mesh.rank == home:
                slots = torch.from_numpy(copied.region.home_slots()).to(here.device)
                here.index_copy_(0, slots, part)


def refresh_copies(engine: "ShardedEngine", *, table: int | None = None) -> None:
    """Make hot rows, of all tables or of one, and their state what they are at home.

    Rows have been written that no step changed: batches begun ahead are forgotten.

    Collective:
        All ranks.
    """
    mesh = engine.mesh
    engine.drop_ahead()
    for copied in _copied(engine, table):
        home = copied.region.rank
        for here, there in copied.tensors(mesh.rank):
            part = there if mesh.rank in copied.holders else copied.new_part(here)
            if mesh.rank == home:
                slots = torch.from_numpy(copied.region.home_slots()).to(here.device)
                part.copy_(here.index_select(0, slots))
            _send(engine, part, home, copied.holders)


def _send(engine: "ShardedEngine", part: Tensor, source: int, targets: list[int]) -> None:
    from rowmesh.runtime.regions import send_bytes

    send_bytes(engine, part, source=source, targets=targets, edge="tier move")


@dataclass(frozen=True, slots=True)
class _Copied:
    """Hot rows with one home rank in this rank's group, and its ranks that have a copy of them."""

    stack: Stack
    region: Region
    holders: list[int]

    def holder_beside_home(self, topology: Topology) -> int:
        """The home itself, or the rank of its host that has the host's copy."""
        home, holder = self.region.rank, self.region.holder
        return home if holder is None else topology.host(home) * topology.local + holder

    def tensors(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A home stack, and these rows' copies if ``rank`` has them: weights, then every state."""
        stack, region = self.stack, self.region
        rows = slice(region.start, region.start + region.num_rows)
        names = [None, *stack.home_state]
        for name in names:
            home = stack.home if name is None else stack.home_state[name]
            copies = stack.copies if name is None else stack.copies_state[name]
            there = copies if region.holder is None else stack.host_copies(rank, home)
            yield home[: stack.layout.home_slots[rank]], there[rows]

    def new_part(self, like: Tensor) -> Tensor:
        return like.new_empty((self.region.num_rows, *like.shape[1:]))


def _copied(engine: "ShardedEngine", table: int | None) -> Iterator[_Copied]:
    mesh = engine.mesh
    for stack in engine.stacks:
        groups = stack.layout.groups
        members = list(groups.members(groups.group(mesh.rank)))
        for region in (*stack.layout.hot, *stack.layout.host_copies):
            if table is None or region.table == table:
                holders = members
                if region.holder is not None:
                    local = mesh.topology.local
                    holders = [rank for rank in members if rank % local == region.holder]
                yield _Copied(stack, region, holders)
