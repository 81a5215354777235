"""The way back of merged requests: gradients are added up in a host, then over hosts at the owner.

A rank's gradients went to the owner's peer on its own host. That adds them up, over the backwards
of each rank, then over the ranks, and sends the owner one sum for every row it asked for; the owner
adds up the hosts'. This is the plan's host-first order.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rowmesh.comm.codecs import coded
from rowmesh.comm.exchange import Handle, Lane
from rowmesh.nn.kernels import coalesce
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.merges import Peers
from rowmesh.runtime.sums import sum_labels, ticket_starts
from rowmesh.runtime.tickets import Ticket

__all__ = ["MergedSums"]

_Parts = dict[int, tuple[Tensor, Tensor]]  # by stack, home rows and their sums of each host


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
        self._grads = {i: channel(f"merged gradients of {path}", Lane.GRADS) for i in self.numbers}

    def exchange(self, tickets: Sequence[Ticket], sequence: int) -> _Parts:
        """This rank's home rows that hosts asked for, host after host, and their gradients.

        Collective:
            All ranks; messages go between ranks of a host before, between peers here.
        """
        with self._engine.mesh.trace.phase("merge"), torch.no_grad():
            for ticket in tickets:
                for handle in ticket.beside:
                    handle.wait()
            posted = [self._post(number, tickets, sequence) for number in self.numbers]
            for _, _, handle in posted:
                handle.wait()
            return {
                i: (rows, grads) for i, (rows, grads, _) in zip(self.numbers, posted, strict=True)
            }

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait for messages of tickets that will not be added up."""
        for ticket in tickets:
            for handle in ticket.beside:
                handle.wait()

    def _post(
        self, number: int, tickets: Sequence[Ticket], sequence: int
    ) -> tuple[Tensor, Tensor, Handle]:
        peers, codec = self._peers[number], self._engine.codecs["backward"]
        slots, sums = self._add_beside(number, tickets)
        edges = torch.tensor(peers.bounds, dtype=slots.dtype, device=slots.device)
        cuts = torch.searchsorted(slots, edges).tolist()
        ours = [sums[first:last] for first, last in pairwise(cuts)]
        wanted = [_wanted(number, tickets, host) for host in range(len(peers.ranks))]
        buffer = sums.new_empty((sum(map(len, wanted)), sums.shape[1]))
        theirs = buffer.split([len(rows) for rows in wanted])
        theirs[peers.host].copy_(ours[peers.host])
        handle = self._grads[number].post(
            sequence,
            sends=[(rank, coded(ours[host], codec)) for host, rank in peers.others],
            receives=[(rank, coded(theirs[host], codec)) for host, rank in peers.others],
            edge="backward",
        )
        return torch.cat(wanted), buffer, handle

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
