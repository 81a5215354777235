"""From tickets to one gradient per row: added over samples, then ranks, in the plan's order."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rowmesh.comm.exchange import Lane
from rowmesh.comm.tasks import Task
from rowmesh.nn.kernels import coalesce
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.fetch import Fetch
from rowmesh.runtime.following import Following
from rowmesh.runtime.merged_sums import HostParts, MergedSums, Parts
from rowmesh.runtime.sums import HostSums, spread, sum_labels, ticket_starts
from rowmesh.runtime.tickets import Stack, Ticket

__all__ = ["RowGradient", "SparseGradients"]


@dataclass(kw_only=True, slots=True)
class RowGradient:
    """The summed gradient of distinct rows of this rank's home or copies of a stack.

    ``own`` are the entries this rank counts in a norm over ranks: all of a home's, and its share
    of the copies'; ``share`` is what they count for, as replicas count them too. ``stack`` is the
    number of the stack. Copies for the ``host`` are rows of the home stack behind the home rows.
    """

    stack: int
    kind: Literal["home", "copies", "host"]
    weight: Tensor
    state: dict[str, Tensor]
    rows: Tensor
    grad: Tensor
    own: slice
    share: float = 1.0


class SparseGradients:
    """Collects the gradients of one engine's tickets."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        layouts = [stack.layout for stack in engine.stacks]
        self._copied = [i for i, x in enumerate(layouts) if x.copy_bounds[-1] and x.trainable]
        self._shared = [i for i, x in enumerate(layouts) if x.host_copies and x.trainable]
        self._sums: Task[list[RowGradient]] | None = None
        self.is_launched = False  # what is left to send of the tickets is on its way
        self._sequence = 0
        channel = engine.pool.channel
        self._counts = channel(f"hot counts of {engine.path}", Lane.CONTROL)
        self._ids = [channel(f"hot rows of {engine.path}", Lane.GRADS) for _ in self._copied]
        self._values = [channel(f"hot sums of {engine.path}", Lane.GRADS) for _ in self._copied]
        sizes = {layouts[i].groups.size: None for i in self._shared}
        self._host_sums = [
            HostSums(engine, [i for i in self._shared if layouts[i].groups.size == size])
            for size in sizes
        ]
        self._merges = MergedSums(engine)
        self._merged: Task[tuple[Parts, HostParts]] | None = None
        self._left: tuple[int, HostParts] | None = None  # for `follow`, and before which forward
        self._ahead: Fetch | None = None
        engine.on_all_sent = self._all_sent

    def reduce(self, *, at_once: bool) -> list[RowGradient]:
        """The gradients of all rows this rank updates; tickets without backward are dropped.

        Args:
            at_once: Also of rows whose gradients may follow; otherwise `follow` must be called.

        Collective:
            All ranks.
        """
        tickets = self._sent()
        if not tickets:
            self._engine.tickets.clear()
            return []
        if not self.is_launched:
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
                if stack.layout.trainable and not stack.layout.is_merged
            ]
        if self._merged is not None:
            with phase("wait gradients"):
                merged, left = self._merged.result()
                if at_once:
                    for i, part in self._merges.follow(left, self._sequence).items():
                        rows, grads = map(torch.cat, zip(merged[i], part, strict=True))
                        merged[i] = rows, grads
                elif self._ahead is not None and left.sums:
                    self._left = self._ahead.number, left
            with phase("coalesce"):
                found += self._of_merged(merged)
                found.sort(key=lambda part: part.stack)
        if self._sums is not None:
            with phase("hot sums"):
                found += self._sums.result()
        self._engine.tickets.clear()
        self._forget()
        return found

    def follow(self, update: Callable[[list[RowGradient]], None]) -> None:
        """Leave the gradients that `reduce` left out, if any, to the engine's rest of the step."""
        if self._left is None:
            return
        (reader, left), self._left = self._left, None
        sequence, engine = self._sequence, self._engine

        def work() -> None:
            with torch.no_grad():
                update(self._of_merged(self._merges.follow(left, sequence)))
            engine.look_ahead.finish(reader - 1)

        submit = functools.partial(
            engine.mesh.later, f"following gradients of {engine.path}", of=engine.pool
        )
        engine.rest.following = Following(reader, submit, work)

    def _of_merged(self, parts: Parts) -> list[RowGradient]:
        return [self._of_home(i, *coalesce(*part)) for i, part in parts.items()]

    def discard(self) -> None:
        """Drop the tickets whose backward has run, after the messages under way for them."""
        for ticket in self._sent():
            ticket.home.wait()
            if self._sums is None:  # else the communication thread waits for them
                ticket.copied.wait()
                ticket.shared.wait()
        if self._sums is not None:
            self._sums.result()
        if self._merged is None:
            self._merges.wait(self._sent())
        else:
            self._merged.result()
        self._engine.tickets = [t for t in self._engine.tickets if not t.is_sent]
        self._forget()

    @property
    def has_tickets(self) -> bool:
        """Whether a backward has run since the last step."""
        return bool(self._sent())

    def _forget(self) -> None:
        self._sums = self._merged = self._ahead = None
        self.is_launched = False

    def _sent(self) -> list[Ticket]:
        return [t for t in self._engine.tickets if t.is_sent]

    def _all_sent(self) -> None:
        for rider in self._engine.riders:
            assert rider.on_ready is not None
            rider.on_ready()
        self._launch()

    def _launch(self) -> None:
        self._sequence += 1
        self.is_launched = True
        tickets, path = self._sent(), self._engine.path
        later = functools.partial(self._engine.mesh.later, of=self._engine.pool)
        if self._copied or self._shared:
            work = functools.partial(self._sum_copies, tickets, self._sequence)
            self._sums = later(f"sums of {path}", work)
        if self._merges.numbers:
            begun = self._engine.look_ahead.begun
            if begun and [t.number for t in tickets] == [begun[0].about]:
                self._ahead = begun[0]
            merge = functools.partial(self._merges.exchange, tickets, self._sequence, self._ahead)
            self._merged = later(f"merged gradients of {path}", merge)

    def _home(self, number: int, stack: Stack, tickets: Sequence[Ticket]) -> RowGradient:
        """Add the gradients of this rank's home rows."""
        slots, index, weights = [], [], []
        sizes: list[list[int]] = []
        for source in range(self._engine.mesh.world):
            sizes.append([])
            for first, ticket in zip(ticket_starts(tickets, number), tickets, strict=True):
                request = ticket.asked[number][source]
                if stack.layout.host_copies:
                    num_home = request.num_home(stack.layout.asked_homes[self._engine.mesh.rank])
                    request = replace(request, rows=request.rows[:num_home])
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
            labels=sum_labels(sizes, stack.layout.has_repeats, self._engine.span, slots[0].device),
        )
        return self._of_home(number, rows, grad)

    def _of_home(self, number: int, rows: Tensor, grad: Tensor) -> RowGradient:
        stack = self._engine.stacks[number]
        return RowGradient(
            stack=number,
            kind="home",
            weight=stack.home,
            state=stack.home_state,
            rows=rows,
            grad=grad,
            own=slice(None),
        )

    def _sum_copies(self, tickets: Sequence[Ticket], sequence: int) -> list[RowGradient]:
        """Add the gradients of copied rows at their sum owners; every rank gets all sums."""
        with self._engine.mesh.trace.phase("hot sums"):
            found = self._exchange_sums(tickets, sequence) if self._copied else []
            exchanged = (sums.exchange(tickets, sequence) for sums in self._host_sums)
            for number, rows, grad, own in itertools.chain.from_iterable(exchanged):
                stack = self._engine.stacks[number]
                found.append(
                    RowGradient(
                        stack=number,
                        kind="host",
                        weight=stack.home,
                        state=stack.home_state,
                        rows=rows,
                        grad=grad,
                        own=own,
                    )
                )
            return found

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
            for first, ticket in zip(ticket_starts(tickets, number), tickets, strict=True):
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
            labels=sum_labels(sizes, False, self._engine.span, rows[0].device),
        )

    def _spread(
        self, k: int, number: int, rows: Tensor, sums: Tensor, counts: list[int], sequence: int
    ) -> RowGradient:
        """Send this rank's sums to all and put theirs in order."""
        engine, mesh = self._engine, self._engine.mesh
        stack = engine.stacks[number]
        bounds, dtype = stack.layout.copy_bounds, engine.id_dtype
        found, total = spread(
            (self._ids[k], self._values[k]),
            sequence,
            ranks=range(mesh.world),
            bounds=bounds,
            counts=counts,
            rows=rows,
            sums=sums,
            dtype=dtype,
            codec=engine.codecs["hot gradients"],
        )
        first = sum(counts[: mesh.rank])
        return self._of_copies(number, found, total, slice(first, first + len(rows)))

    def _of_copies(self, number: int, rows: Tensor, grad: Tensor, own: slice) -> RowGradient:
        stack = self._engine.stacks[number]
        return RowGradient(
            stack=number,
            kind="copies",
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
