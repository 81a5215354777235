"""Sums of gradients over ranks: their order, sums told to all, and copies per host.

A row with one copy per host is added up in the host by the rank that has its copy, then over hosts
by one of these holders, which are peers, and the sum is told to the others. Rows travel as sets
(`rowmesh.runtime.sets`): at most a bit a row, however many are touched.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rowmesh.comm.codecs import Codec, Message, coded, settle
from rowmesh.comm.exchange import Channel, Lane
from rowmesh.nn.kernels import coalesce
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.sets import decode_set, encode_set, set_words
from rowmesh.runtime.stacks import StackLayout
from rowmesh.runtime.tickets import Ticket

__all__ = ["HostSums", "spread", "sum_labels", "ticket_starts"]

_Found = tuple[int, Tensor, Tensor, slice]  # stack, rows, sums, those that this rank added up


def ticket_starts(tickets: Sequence[Ticket], number: int) -> list[int]:
    """Where each ticket's gradients of a stack begin once they are put one after the other.

    All gradients of a ticket lie in one buffer (`send_back`), so one list does.
    """
    lengths = [len(t.home.grads[number]) for t in tickets]
    return [sum(lengths[:k]) for k in range(len(tickets))]


def sum_labels(
    sizes: Sequence[Sequence[int]], repeats: bool, span: int, device: Any
) -> list[Tensor]:
    """What tells apart the parts of a sum; ``sizes[source][ticket]`` entries of each.

    Args:
        sizes: Of each source and ticket.
        repeats: Whether one of them may bring a row several gradients.
        span: Sources that are added up before others.
        device: Of the labels.
    """
    flat = torch.tensor([n for row in sizes for n in row], device=device)
    part = torch.arange(len(flat), dtype=torch.int32, device=device)
    part = torch.repeat_interleave(part, flat)
    num_tickets = len(sizes[0])
    labels = [part] if repeats or num_tickets > 1 else []
    if num_tickets > 1:
        labels.append(part // num_tickets)
    if span < len(sizes):
        labels.append(part // (num_tickets * span))
    return labels


def spread(
    channels: tuple[Channel, Channel],
    sequence: int,
    *,
    ranks: Sequence[int],
    bounds: Sequence[int],
    counts: Sequence[int],
    rows: Tensor,
    sums: Tensor,
    dtype: torch.dtype,
    codec: Codec,
) -> tuple[Tensor, Tensor]:
    """Send this rank's sums to ``ranks``, and put theirs in order; all have the same bits of all.

    Args:
        channels: For rows and for sums.
        sequence: Number of this use.
        ranks: This one among them.
        bounds: Where the rows that each of ``ranks`` adds up begin, and the end.
        counts: Rows that each of them has added up.
        rows: Those of this rank, from the first of its own.
        sums: Of ``rows``.
        dtype: Of ids on the wire.
        codec: Of sums.

    Returns:
        All rows, ascending, and their sums.

    Collective:
        ``ranks``.
    """
    me = ranks.index(channels[0].wire.rank)
    sizes = [last - first for first, last in pairwise(bounds)]
    words = [
        torch.empty(set_words(count, size), dtype=dtype, device=rows.device)
        for count, size in zip(counts, sizes, strict=True)
    ]
    words[me] = encode_set(rows, sizes[me], dtype=dtype)
    total = sums.new_empty((sum(counts), sums.shape[1]))
    parts = total.split(list(counts))
    parts[me].copy_(sums)
    others = [(i, r) for i, r in enumerate(ranks) if i != me]
    parcels = [coded(part, codec) for part in parts]
    if others:
        settle(parcels[me])
    kinds: list[Sequence[Tensor | Message]] = [words, parcels]
    handles = [
        channel.post(
            sequence,
            sends=[(r, theirs[me]) for _, r in others],
            receives=[(r, theirs[i]) for i, r in others],
            edge="hot gradients",
        )
        for channel, theirs in zip(channels, kinds, strict=True)
    ]
    for handle in handles:
        handle.wait()
    found = [decode_set(words[i], counts[i], sizes[i]) + bounds[i] for i in range(len(ranks))]
    return torch.cat(found), total


class HostSums:
    """Adds up the gradients of copies per host of one engine's stacks.

    Args:
        engine: Of the collection.
        stacks: Numbers of those that have such copies and are trained, of one size of groups.
    """

    def __init__(self, engine: ShardedEngine, stacks: Sequence[int]) -> None:
        self._engine, self._stacks = engine, stacks
        local, rank = engine.mesh.topology.local, engine.mesh.rank
        first = rank - rank % local
        self._beside = range(first, first + local)
        groups = engine.stacks[stacks[0]].layout.groups
        members = groups.members(groups.group(rank))
        self._peers = [r for r in members if r % local == rank % local]
        self._host = self._peers.index(rank)  # among those of the group
        channel, path = engine.pool.channel, engine.path
        self._counts = [channel(f"host counts of {path}", Lane.CONTROL) for _ in range(2)]
        self._parts, self._totals = (
            [
                (channel(f"host {what} of {path}", Lane.GRADS), channel(name, Lane.GRADS))
                for _ in stacks
            ]
            for what, name in (
                ("rows", f"host parts of {path}"),
                ("summed rows", f"host sums of {path}"),
            )
        )

    def exchange(self, tickets: Sequence[Ticket], sequence: int) -> Iterator[_Found]:
        """The rows of this rank's copies that any rank touched, as slots of the home stack.

        Collective:
            All ranks; messages go between ranks of a host before, between peers here.
        """
        for ticket in tickets:
            ticket.shared.wait()
        parts = [self._add_beside(number, tickets) for number in self._stacks]
        asked = [self._cut(n, rows) for n, (rows, _) in zip(self._stacks, parts, strict=True)]
        arriving = self._tell(0, asked, sequence)
        sums = [
            self._add_peers(k, parts[k], asked[k], [row[k] for row in arriving], sequence)
            for k in range(len(self._stacks))
        ]
        mine = [[len(rows)] * len(self._peers) for rows, _ in sums]
        counts = self._tell(1, mine, sequence)
        for k, (number, (rows, total)) in enumerate(zip(self._stacks, sums, strict=True)):
            yield self._spread(k, number, rows, total, [row[k] for row in counts], sequence)

    def _add_beside(self, number: int, tickets: Sequence[Ticket]) -> tuple[Tensor, Tensor]:
        """Rows of this rank's copies that its host touched, and their sums over its ranks."""
        layout, rank = self._engine.stacks[number].layout, self._engine.mesh.rank
        first_copy = layout.asked_homes[rank]
        rows, index = [], []
        sizes: list[list[int]] = []
        for source in self._beside:
            sizes.append([])
            for first, ticket in zip(ticket_starts(tickets, number), tickets, strict=True):
                request = ticket.asked[number][source]
                mine = request.rows[request.num_home(first_copy) :]
                start = first + ticket.shared.firsts[number][source]
                rows.append(mine)
                index.append(torch.arange(start, start + len(mine), device=mine.device))
                sizes[-1].append(len(mine))
        grads = [t.shared.grads[number] for t in tickets]
        found, sums = coalesce(
            torch.cat(rows),
            torch.cat(grads) if len(grads) > 1 else grads[0],
            index=torch.cat(index),
            labels=sum_labels(sizes, False, len(sizes), rows[0].device),
        )
        return found - first_copy, sums

    def _cut(self, number: int, rows: Tensor) -> list[int]:
        """How many of ``rows`` each host's peer adds up."""
        bounds = self._engine.stacks[number].layout.host_bounds
        edges = torch.tensor(bounds, dtype=rows.dtype, device=rows.device)
        cuts = torch.searchsorted(rows, edges).tolist()
        return [last - first for first, last in pairwise(cuts)]

    def _tell(self, which: int, counts: Sequence[Sequence[int]], sequence: int) -> list[list[int]]:
        """``counts[stack][host]`` to the peers; returns ``[host][stack]`` theirs for this rank."""
        device = self._engine.mesh.device
        sent = torch.tensor(counts, dtype=torch.int64, device=device).t().contiguous()
        found = torch.empty_like(sent)
        found[self._host] = sent[self._host]
        others = self._others()
        self._counts[which].post(
            sequence,
            sends=[(r, sent[h]) for h, r in others],
            receives=[(r, found[h]) for h, r in others],
            edge="counts",
        ).wait()
        told: list[list[int]] = found.tolist()
        return told

    def _others(self) -> list[tuple[int, int]]:
        return [(h, r) for h, r in enumerate(self._peers) if h != self._host]

    def _add_peers(
        self,
        k: int,
        part: tuple[Tensor, Tensor],
        sizes: Sequence[int],
        counts: Sequence[int],
        sequence: int,
    ) -> tuple[Tensor, Tensor]:
        """The rows that this rank adds up over hosts, from the first of them, and their sums."""
        dtype, bounds = self._engine.id_dtype, self._layout(k).host_bounds
        ranges = [last - first for first, last in pairwise(bounds)]
        rows, grads = (tensor.split(list(sizes)) for tensor in part)
        sets = [
            encode_set(r - first, n, dtype=dtype)
            for r, first, n in zip(rows, bounds, ranges, strict=False)
        ]
        words = [
            torch.empty(set_words(n, ranges[self._host]), dtype=dtype, device=part[0].device)
            for n in counts
        ]
        words[self._host] = sets[self._host]
        buffer = part[1].new_empty((sum(counts), part[1].shape[1]))
        arrived = buffer.split(list(counts))
        arrived[self._host].copy_(grads[self._host])
        codec = self._engine.codecs["hot gradients"]
        sent, found = ([coded(part, codec) for part in parts] for parts in (grads, arrived))
        kinds: list[tuple[Sequence[Tensor | Message], Sequence[Tensor | Message]]]
        kinds = [(sets, words), (sent, found)]
        handles = [
            channel.post(
                sequence,
                sends=[(r, ours[h]) for h, r in self._others()],
                receives=[(r, theirs[h]) for h, r in self._others()],
                edge="hot gradients",
            )
            for channel, (ours, theirs) in zip(self._parts[k], kinds, strict=True)
        ]
        for handle in handles:
            handle.wait()
        slots = [decode_set(w, n, ranges[self._host]) for w, n in zip(words, counts, strict=True)]
        return coalesce(torch.cat(slots), buffer)

    def _layout(self, k: int) -> StackLayout:
        return self._engine.stacks[self._stacks[k]].layout

    def _spread(
        self, k: int, number: int, rows: Tensor, sums: Tensor, counts: list[int], sequence: int
    ) -> _Found:
        engine = self._engine
        layout = engine.stacks[number].layout
        found, total = spread(
            self._totals[k],
            sequence,
            ranks=self._peers,
            bounds=layout.host_bounds,
            counts=counts,
            rows=rows,
            sums=sums,
            dtype=engine.id_dtype,
            codec=engine.codecs["hot gradients"],
        )
        first = sum(counts[: self._host])
        slots = found + layout.home_slots[engine.mesh.rank]
        return number, slots, total, slice(first, first + len(rows))
