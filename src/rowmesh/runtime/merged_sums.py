"""The way back of merged requests: gradients are added up in a host, then over hosts at the owner.

A rank's gradients went to the owner's peer on its own host. That adds them up, over the backwards
of each rank, then over the ranks, and sends the owner one sum for every row it asked for; the owner
adds up the hosts'. This is the plan's host-first order. Gradients of rows that the next batch does
not ask for may be left for later (`rowmesh.runtime.following`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from rowmesh.comm.codecs import coded, wire_bytes
from rowmesh.comm.exchange import Channel, Lane
from rowmesh.nn.kernels import coalesce
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.fetch import Fetch
from rowmesh.runtime.merges import Peers
from rowmesh.runtime.sums import sum_labels, ticket_starts
from rowmesh.runtime.tickets import Ticket

__all__ = ["HostParts", "MergedSums"]

Parts = dict[int, tuple[Tensor, Tensor]]  # by stack, home rows and their sums of each host


@dataclass(kw_only=True, slots=True)
class HostParts:
    """What is exchanged between peers, by stack and host.

    Args:
        sums: Of the rows that this host asked the peer on each host for.
        wanted: This rank's home rows that each host asked for.
    """

    sums: dict[int, list[Tensor]] = field(default_factory=dict)
    wanted: dict[int, list[Tensor]] = field(default_factory=dict)

    def chosen(self, number: int, told: Sequence[Tensor], own: Sequence[Tensor]) -> "HostParts":
        """Of one stack, the marked rows of each host."""
        picked = HostParts()
        for found, parts, masks in (
            (picked.sums, self.sums, told),
            (picked.wanted, self.wanted, own),
        ):
            found[number] = [p[mask] for p, mask in zip(parts[number], masks, strict=True)]
        return picked


class MergedSums:
    """Adds up the gradients of one engine's merged stacks.

    Args:
        engine: Of the collection.
    """

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        layouts = {i: stack.layout for i, stack in enumerate(engine.stacks)}
        self.numbers = [i for i, x in layouts.items() if x.is_merged and x.trainable]
        self._peers = {i: Peers(layouts[i], engine.mesh) for i in self.numbers}
        channel, path = engine.pool.channel, engine.path
        self._grads, self._followers = (
            {i: channel(f"{what} gradients of {path}", Lane.GRADS) for i in self.numbers}
            for what in ("merged", "following")
        )

    def exchange(
        self, tickets: Sequence[Ticket], sequence: int, ahead: Fetch | None
    ) -> tuple[Parts, HostParts]:
        """This rank's home rows that hosts asked for, host after host, and their gradients.

        Args:
            tickets: Of the step.
            sequence: Of the step.
            ahead: The batch that tells which of them may follow; None for none.

        Returns:
            Also what has been left for `follow`.

        Collective:
            All ranks; messages go between ranks of a host before, between peers here.
        """
        with self._engine.mesh.trace.phase("merge"), torch.no_grad():
            for ticket in tickets:
                for handle in ticket.beside:
                    handle.wait()
            now, later = HostParts(), HostParts()
            if ahead is not None:
                ahead.wait()
                self._engine.fetches.count_bits(ahead)
            for number in self.numbers:
                parts = self._add_up(number, tickets)
                if ahead is not None and number in ahead.told:
                    masks = ahead.told[number], ahead.follows[number]
                    left = parts.chosen(number, *masks)
                    later.sums |= left.sums
                    later.wanted |= left.wanted
                    parts = parts.chosen(number, *([~m for m in part] for part in masks))
                now.sums |= parts.sums
                now.wanted |= parts.wanted
            self._count(later)
            return self._exchange(now, self._grads, sequence, edge="backward"), later

    def follow(self, later: HostParts, sequence: int) -> Parts:
        """As `exchange`, of what that left.

        Collective:
            All ranks.
        """
        with self._engine.mesh.trace.phase("follow"), torch.no_grad():
            return self._exchange(later, self._followers, sequence, edge=None)

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait for messages of tickets that will not be added up."""
        for ticket in tickets:
            for handle in ticket.beside:
                handle.wait()

    def _add_up(self, number: int, tickets: Sequence[Ticket]) -> HostParts:
        """The sums of ranks of this host, and what hosts asked of this rank."""
        peers = self._peers[number]
        slots, sums = self._add_beside(number, tickets)
        edges = torch.tensor(peers.bounds, dtype=slots.dtype, device=slots.device)
        cuts = torch.searchsorted(slots, edges).tolist()
        return HostParts(
            sums={number: [sums[first:last] for first, last in pairwise(cuts)]},
            wanted={number: [_wanted(number, tickets, host) for host in range(len(peers.ranks))]},
        )

    def _exchange(
        self, parts: HostParts, channels: dict[int, Channel], sequence: int, *, edge: str | None
    ) -> Parts:
        codec, found = self._engine.codecs["backward"], {}
        handles = []
        for number, ours in parts.sums.items():
            peers, wanted = self._peers[number], parts.wanted[number]
            buffer = ours[0].new_empty((sum(map(len, wanted)), ours[0].shape[1]))
            theirs = buffer.split([len(rows) for rows in wanted])
            theirs[peers.host].copy_(ours[peers.host])
            handle = channels[number].post(
                sequence,
                sends=[(rank, coded(ours[host], codec)) for host, rank in peers.others],
                receives=[(rank, coded(theirs[host], codec)) for host, rank in peers.others],
                edge=edge,
            )
            handles.append(handle)
            found[number] = torch.cat(wanted), buffer
        for handle in handles:
            handle.wait()
        return found

    def _count(self, later: HostParts) -> None:
        """In the step they belong to."""
        codec, record = self._engine.codecs["backward"], self._engine.mesh.ledger.record
        for number, ours in later.sums.items():
            for host, rank in self._peers[number].others:
                record("backward", rank, wire_bytes(ours[host], codec))

    def _add_beside(self, number: int, tickets: Sequence[Ticket]) -> tuple[Tensor, Tensor]:
        """Slots of home rows that ranks of this host asked this one for, and their sums."""
        num_homes = self._peers[number].bounds[-1]
        slots, index = [], []
        sizes: list[list[int]] = []
        for source in self._peers[number].beside:
            sizes.append([])
            for first, ticket in zip(ticket_starts(tickets, number), tickets, strict=True):
                request = ticket.asked[number][source]
                mine = request.rows[: request.num_home(num_homes)]
                start = first + ticket.home.firsts[number][source]
                slots.append(mine)
                index.append(torch.arange(start, start + len(mine), device=mine.device))
                sizes[-1].append(len(mine))
        grads = [t.home.grads[number] for t in tickets]
        return coalesce(
            torch.cat(slots),
            torch.cat(grads) if len(grads) > 1 else grads[0],
            index=torch.cat(index),
            labels=sum_labels(sizes, False, len(sizes), slots[0].device),
        )


def _wanted(number: int, tickets: Sequence[Ticket], host: int) -> Tensor:
    """Home rows that a host asked for in any of the forwards, ascending."""
    rows = [ticket.merged[number].wanted[host] for ticket in tickets]
    return rows[0] if len(rows) == 1 else torch.cat(rows).unique()
