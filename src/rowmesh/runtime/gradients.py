"""From tickets to one gradient per row: added over samples, then ranks, in the plan's order."""

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rowmesh.comm.exchange import Lane
from rowmesh.nn.kernels import coalesce
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.sets import decode_set, encode_set, set_words
from rowmesh.runtime.tickets import Stack, Ticket

__all__ = ["RowGradient", "SparseGradients"]


@dataclass(kw_only=True, slots=True)
class RowGradient:
    """The summed gradient of distinct rows of this rank's home or copies of a stack.

    ``own`` are the entries this rank counts in a norm over ranks: all of a home's, and its share
    of the copies'. ``stack`` is the number of the stack.
    """

    stack: int
    is_copied: bool
    weight: Tensor
    state: dict[str, Tensor]
    rows: Tensor
    grad: Tensor
    own: slice


class SparseGradients:
    """Collects the gradients of one engine's tickets."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        layouts = [stack.layout for stack in engine.stacks]
        self._copied = [i for i, x in enumerate(layouts) if x.copy_bounds[-1] and x.trainable]
        self._sums: Future[list[RowGradient]] | None = None
        self._sequence = 0
        wire = engine.mesh.wire
        self._counts = wire.channel(f"hot counts of {engine.path}", Lane.CONTROL)
        self._ids = [wire.channel(f"hot rows of {engine.path}", Lane.GRADS) for _ in self._copied]
        self._values = [
            wire.channel(f"hot sums of {engine.path}", Lane.GRADS) for _ in self._copied
        ]
        engine.on_all_sent = self._all_sent

    def reduce(self) -> list[RowGradient]:
        """The gradients of all rows this rank updates; tickets without backward are dropped.

        Collective:
            All ranks.
        """
        tickets = self._sent()
        if not tickets:
            self._engine.tickets.clear()
            return []
        if self._sums is None:
            self._launch()
        phase = self._engine.mesh.trace.phase
        for ticket in tickets:
            with phase("wait gradients"):
                ticket.home.wait()
            for i, relay in self._engine.relays.items():
                if relay.is_used and self._engine.stacks[i].layout.trainable:
                    relay.send_back(ticket, i)
        with phase("coalesce"):
            found = [
                self._home(i, stack, tickets)
                for i, stack in enumerate(self._engine.stacks)
                if stack.layout.trainable
            ]
        if self._sums is not None:
            with phase("hot sums"):
                found += self._await(self._sums)
        self._engine.tickets.clear()
        self._sums = None
        return found

    def discard(self) -> None:
        """Drop the tickets whose backward has run, after the messages under way for them."""
        for ticket in self._sent():
            ticket.home.wait()
            if self._sums is None:  # else the communication thread waits for them
                ticket.copied.wait()
        if self._sums is not None:
            self._await(self._sums)
        self._engine.tickets = [t for t in self._engine.tickets if not t.is_sent]
        self._sums = None

    def _await(self, sums: Future[list[RowGradient]]) -> list[RowGradient]:
        with self._engine.mesh.trace.wait("hot sums"):
            return sums.result()

    def _sent(self) -> list[Ticket]:
        return [t for t in self._engine.tickets if t.is_sent]

    def _all_sent(self) -> None:
        for rider in self._engine.riders:
            assert rider.on_ready is not None
            rider.on_ready()
        self._launch()

    def _launch(self) -> None:
        if self._copied:
            self._sequence += 1
            tickets, sequence = self._sent(), self._sequence
            owner = f"sums of {self._engine.path}"
            work = functools.partial(self._sum_copies, tickets, sequence)
            self._sums = self._engine.mesh.later(owner, work)

    def _labels(self, sizes: Sequence[Sequence[int]], repeats: bool, device: Any) -> list[Tensor]:
        """What tells apart the parts of a sum; ``sizes[source][ticket]`` entries of each."""
        flat = torch.tensor([n for row in sizes for n in row], device=device)
        part = torch.arange(len(flat), dtype=torch.int32, device=device)
        part = torch.repeat_interleave(part, flat)
        num_tickets, span = len(sizes[0]), self._engine.span
        labels = [part] if repeats or num_tickets > 1 else []
        if num_tickets > 1:
            labels.append(part // num_tickets)
        if span < len(sizes):
            labels.append(part // (num_tickets * span))
        return labels

    def _home(self, number: int, stack: Stack, tickets: Sequence[Ticket]) -> RowGradient:
        """Add the gradients of this rank's home rows."""
        slots, index, weights = [], [], []
        sizes: list[list[int]] = []
        for source in range(self._engine.mesh.world):
            sizes.append([])
            for first, ticket in zip(_firsts(tickets, number), tickets, strict=True):
                request = ticket.asked[number][source]
                slots.append(request.rows)
                if len(request.pooled):
                    slots.append(request.pooled_slots())
                index.append(request.vector_of_id() + (first + ticket.home.firsts[number][source]))
                sizes[-1].append(len(index[-1]))
                if request.weights is not None:
                    weights += [torch.ones_like(request.rows, dtype=torch.float32), request.weights]
        parts = [t.home.grads[number] for t in tickets]
        rows, grad = coalesce(
            torch.cat(slots),
            torch.cat(parts) if len(parts) > 1 else parts[0],
            index=torch.cat(index),
            weights=torch.cat(weights) if weights and stack.layout.has_pooled else None,
            labels=self._labels(sizes, stack.layout.has_repeats, slots[0].device),
        )
        return RowGradient(
            stack=number,
            is_copied=False,
            weight=stack.home,
            state=stack.home_state,
            rows=rows,
            grad=grad,
            own=slice(None),
        )

    def _sum_copies(self, tickets: Sequence[Ticket], sequence: int) -> list[RowGradient]:
        """Add the gradients of copied rows at their sum owners; every rank gets all sums."""
        with self._engine.mesh.trace.phase("hot sums"):
            return self._exchange_sums(tickets, sequence)

    def _exchange_sums(self, tickets: Sequence[Ticket], sequence: int) -> list[RowGradient]:
        mesh = self._engine.mesh
        for ticket in tickets:
            ticket.copied.wait()
        mine = [self._sum_mine(i, tickets) for i in self._copied]
        counts = torch.empty((mesh.world, len(mine)), dtype=torch.int64, device=mesh.device)
        counts[mesh.rank] = torch.tensor([len(rows) for rows, _ in mine], device=mesh.device)
        self._counts.post(
            sequence,
            sends=[(p, counts[mesh.rank]) for p in mesh.peers()],
            receives=[(p, counts[p]) for p in mesh.peers()],
            edge="counts",
        ).wait()
        table = counts.tolist()
        return [
            self._spread(k, i, *mine[k], [row[k] for row in table], sequence)
            for k, i in enumerate(self._copied)
        ]

    def _sum_mine(self, number: int, tickets: Sequence[Ticket]) -> tuple[Tensor, Tensor]:
        """Add the gradients of the copied rows whose sums this rank makes."""
        rows, index = [], []
        sizes: list[list[int]] = []
        for source in range(self._engine.mesh.world):
            sizes.append([])
            for first, ticket in zip(_firsts(tickets, number), tickets, strict=True):
                copied = ticket.asked[number][source].copied
                start = first + ticket.copied.firsts[number][source]
                rows.append(copied)
                index.append(torch.arange(start, start + len(copied), device=copied.device))
                sizes[-1].append(len(copied))
        parts = [t.copied.grads[number] for t in tickets]
        return coalesce(
            torch.cat(rows),
            torch.cat(parts) if len(parts) > 1 else parts[0],
            index=torch.cat(index),
            labels=self._labels(sizes, False, rows[0].device),
        )

    def _spread(
        self, k: int, number: int, rows: Tensor, sums: Tensor, counts: list[int], sequence: int
    ) -> RowGradient:
        """Send this rank's sums to all and put theirs in order."""
        engine, mesh = self._engine, self._engine.mesh
        stack = engine.stacks[number]
        bounds, dtype = stack.layout.copy_bounds, engine.id_dtype
        sizes = [bounds[r + 1] - bounds[r] for r in range(mesh.world)]
        words = [
            torch.empty(set_words(c, s), dtype=dtype, device=mesh.device)
            for c, s in zip(counts, sizes, strict=True)
        ]
        words[mesh.rank] = encode_set(rows, sizes[mesh.rank], dtype=dtype)
        total = sums.new_empty((sum(counts), stack.layout.dim))
        parts = total.split(counts)
        parts[mesh.rank].copy_(sums)
        handles = [
            channel.post(
                sequence,
                sends=[(p, mine) for p in mesh.peers()],
                receives=[(p, theirs[p]) for p in mesh.peers()],
                edge="hot gradients",
            )
            for channel, mine, theirs in (
                (self._ids[k], words[mesh.rank], words),
                (self._values[k], sums, parts),
            )
        ]
        for handle in handles:
            handle.wait()
        found = [decode_set(words[r], counts[r], sizes[r]) + bounds[r] for r in range(mesh.world)]
        first = sum(counts[: mesh.rank])
        return self._of_copies(number, torch.cat(found), total, slice(first, first + len(rows)))

    def _of_copies(self, number: int, rows: Tensor, grad: Tensor, own: slice) -> RowGradient:
        stack = self._engine.stacks[number]
        return RowGradient(
            stack=number,
            is_copied=True,
            weight=stack.copies,
            state=stack.copies_state,
            rows=rows,
            grad=grad,
            own=own,
        )

    def dense_sums(self) -> list[RowGradient]:
        """The gradients of copies that the dense buckets have added up."""
        mesh, found = self._engine.mesh, []
        for rider in self._engine.riders:
            rows, grad = rider.sums()
            share = -(-len(rows) // mesh.world)
            own = slice(share * mesh.rank, share * (mesh.rank + 1))
            found.append(self._of_copies(rider.number, rows, grad, own))
        return found


def _firsts(tickets: Sequence[Ticket], number: int) -> list[int]:
    """Where each ticket's gradients of a stack begin once they are put one after the other.

    Home and copied gradients of a ticket lie in one buffer (`send_back`), so one list does.
    """
    lengths = [len(t.home.grads[number]) for t in tickets]
    return [sum(lengths[:k]) for k in range(len(tickets))]
