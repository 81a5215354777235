"""Relays: sums of rows spread over one host are made on that host, then sent to a peer.

A table split over the ranks of a host (table-row-wise, grid) with the `pooled` exchange. Rank
(h', l) asks the rank (h, l) of the owners' host, its peer, for sums of bags. The peer fetches the
distinct rows of each asker from the owners beside it, adds them in the order of the ids, and
sends one vector a bag across: bytes between hosts follow bags, bytes inside follow distinct rows,
and the sums have the bits of a table that lies on one rank. Backward mirrors it: the relay adds
each asker's gradients of a row in sample order, and the owner adds the askers', as if it had been
asked directly.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rowmesh.comm.codecs import Codecs, coded
from rowmesh.comm.exchange import ChannelPool, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.nn.kernels import coalesce, run_starts
from rowmesh.runtime.requests import Request
from rowmesh.runtime.stacks import StackLayout
from rowmesh.runtime.tickets import Relayed, Ticket

__all__ = ["Relay"]


class Relay:
    """This rank as a relay, and as an owner that relays ask, for one stack.

    Args:
        name: Of the collection, in errors.
        layout: With ``is_relayed``.
        mesh: All ranks make the same relays in one order.
        dtype: Of ids on the wire.
        pool: Of the collection.
        codecs: Of the plan.
    """

    def __init__(
        self,
        name: str,
        layout: StackLayout,
        mesh: Mesh,
        dtype: torch.dtype,
        pool: ChannelPool,
        codecs: Codecs,
    ) -> None:
        self._layout, self._mesh, self._dtype, self._codecs = layout, mesh, dtype, codecs
        groups, shape = layout.groups, layout.groups.shape(mesh.topology)
        self._members = groups.members(groups.group(mesh.rank))  # host after host
        place = groups.place(mesh.rank)
        self._local = place % shape.local
        first = place - self._local
        self._beside = self._members[first : first + shape.local]
        self._others = [(o, r) for o, r in enumerate(self._beside) if r != mesh.rank]
        slots = [layout.home_slots[rank] for rank in self._beside]
        self._slots = list(accumulate(slots, initial=0))
        self.askers = self._members[self._local :: shape.local]
        self._counts = pool.channel(f"relayed counts of {name}", Lane.CONTROL)
        self._ids = pool.channel(f"relayed ids of {name}", Lane.CONTROL)
        self._rows = pool.channel(f"relayed rows of {name}", Lane.ROWS)
        self._grads = pool.channel(f"relayed gradients of {name}", Lane.GRADS)

    @property
    def is_used(self) -> bool:
        """Whether this host holds rows of the stack."""
        return self._slots[-1] > 0

    def fetch(self, number: int, asked: Sequence[Request], home: Tensor) -> Relayed:
        """The rows that this rank's askers need, from the owners beside it.

        Collective:
            All ranks of a host that holds rows of the stack.
        """
        with self._mesh.trace.phase("relay"):
            return self._fetch(number, asked, home)

    def _fetch(self, number: int, asked: Sequence[Request], home: Tensor) -> Relayed:
        keys, order, starts = self._distinct([asked[rank] for rank in self.askers])
        slots = self._slots[-1]
        vectors = keys.index_select(0, starts)
        hosts = len(self.askers)
        edges = torch.tensor(
            [hosts * b + h * (e - b) for b, e in pairwise(self._slots) for h in range(hosts)]
            + [hosts * slots],
            device=keys.device,
        )
        cuts = torch.searchsorted(vectors, edges).tolist()
        sizes = [
            [cuts[o * hosts + h + 1] - cuts[o * hosts + h] for h in range(hosts)]
            for o in range(len(self._beside))
        ]
        bounds = cuts[::hosts]
        ids = []
        for o, (begin, end) in enumerate(pairwise(self._slots)):
            part = vectors[bounds[o] : bounds[o + 1]]
            base = hosts * begin
            ids.append(((part - base) % max(end - begin, 1)).to(self._dtype))
        received, owned_ids = self._exchange_ids(number, sizes, ids)
        rows = self._exchange_rows(number, home, bounds, owned_ids)
        vector_of = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
        vector_of[starts.long()] = 1
        vector_of = torch.cumsum(vector_of, 0) - 1
        positions = torch.empty_like(vector_of).scatter_(0, order, vector_of)
        return Relayed(
            rows=rows,
            requests=self._translate(asked, positions),
            bounds=bounds,
            owned=self._owned(received, owned_ids),
            received=received,
        )

    def _distinct(self, asked: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor]:
        """Sorted keys (owner, asker, slot), their order, and where runs of equal ones start."""
        hosts, bounds = len(asked), torch.tensor(self._slots, device=self._mesh.device)
        parts = []
        for h, request in enumerate(asked):
            slot = request.pooled_slots().long()
            owner = torch.searchsorted(bounds, slot, right=True) - 1
            begin = bounds.index_select(0, owner)
            size = bounds.index_select(0, owner + 1) - begin
            parts.append(hosts * begin + h * size + (slot - begin))
        keys, order = torch.sort(torch.cat(parts), stable=True)
        return keys, order, run_starts(keys)

    def _exchange_ids(
        self, number: int, sizes: Sequence[Sequence[int]], ids: Sequence[Tensor]
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Tell the owners beside what is wanted; returns what every relay wants of this rank."""
        mesh = self._mesh
        sent = torch.tensor(sizes, device=mesh.device)
        found = sent.clone()
        self._counts.post(
            number,
            sends=[(r, sent[o]) for o, r in self._others],
            receives=[(r, found[o]) for o, r in self._others],
            edge="counts",
        ).wait()
        received: list[list[int]] = found.tolist()
        wanted = [
            ids[o] if o == self._local else ids[o].new_empty(sum(received[o]))
            for o in range(len(self._beside))
        ]
        self._ids.post(
            number,
            sends=[(r, ids[o]) for o, r in self._others],
            receives=[(r, wanted[o]) for o, r in self._others],
            edge="ids",
        ).wait()
        return received, wanted

    def _exchange_rows(
        self, number: int, home: Tensor, bounds: Sequence[int], wanted: Sequence[Tensor]
    ) -> Tensor:
        """Send the rows that relays want, receive those this rank wants."""
        rows = home.new_empty((bounds[-1], home.shape[1]))
        parts = [rows[begin:end] for begin, end in pairwise(bounds)]
        codec = self._codecs["rows"]
        handle = self._rows.post(
            number,
            sends=[(r, coded(home.index_select(0, wanted[o]), codec)) for o, r in self._others],
            receives=[(r, coded(parts[o], codec)) for o, r in self._others],
            edge="rows",
        )
        torch.index_select(home, 0, wanted[self._local], out=parts[self._local])
        handle.wait()
        return rows

    def _translate(self, asked: Sequence[Request], positions: Tensor) -> list[Request]:
        """The requests with positions of fetched rows for slots, bags marked as before."""
        pieces = iter(positions.split([len(asked[rank].pooled) for rank in self.askers]))
        found = list(asked)
        for rank in self.askers:
            place = next(pieces)
            marked = torch.where(asked[rank].pooled < 0, ~place, place)
            found[rank] = replace(asked[rank], pooled=marked)
        return found

    def _owned(self, received: Sequence[Sequence[int]], wanted: Sequence[Tensor]) -> list[Request]:
        """What relays want of this rank, as if each asker had asked for rows itself."""
        nothing = Request(
            rows=wanted[0][:0],
            pooled=wanted[0][:0],
            copied=wanted[0][:0],
            weights=None,
            num_pooled=0,
        )
        found = [nothing] * self._mesh.world
        for relay, (sizes, ids) in enumerate(zip(received, wanted, strict=True)):
            for host, part in enumerate(ids.split(list(sizes))):
                asker = self._members[host * len(self._beside) + relay]
                found[asker] = replace(nothing, rows=part)
        return found

    def send_back(self, ticket: Ticket, stack: int) -> None:
        """Pass the askers' gradients on to the owners; then the ticket is as if asked directly.

        Collective:
            As `fetch`.
        """
        with self._mesh.trace.phase("relay"):
            self._send_back(ticket, stack)

    def _send_back(self, ticket: Ticket, stack: int) -> None:
        relayed = ticket.relayed[stack]
        firsts, grads = ticket.home.firsts[stack], ticket.home.grads[stack]
        requests = [relayed.requests[rank] for rank in self.askers]
        weights = [r.weights for r in requests if r.weights is not None]
        _, sums = coalesce(
            torch.cat([r.pooled_slots() for r in requests]),
            grads,
            index=torch.cat(
                [r.vector_of_id() + firsts[a] for r, a in zip(requests, self.askers, strict=True)]
            ),
            weights=torch.cat(weights) if weights else None,
        )
        totals = [sum(sizes) for sizes in relayed.received]
        begins = list(accumulate(totals, initial=0))
        buffer = grads.new_empty((begins[-1], grads.shape[1]))
        own = slice(begins[self._local], begins[self._local + 1])
        buffer[own] = sums[relayed.bounds[self._local] : relayed.bounds[self._local + 1]]
        codec = self._codecs["backward"]
        ours = [sums[first:last] for first, last in pairwise(relayed.bounds)]
        theirs = [buffer[first:last] for first, last in pairwise(begins)]
        self._grads.post(
            ticket.number,
            sends=[(r, coded(ours[o], codec)) for o, r in self._others],
            receives=[(r, coded(theirs[o], codec)) for o, r in self._others],
            edge="backward",
        ).wait()
        at = [0] * self._mesh.world
        for relay, sizes in enumerate(relayed.received):
            starts = accumulate(sizes, initial=begins[relay])
            for host, start in zip(range(len(sizes)), starts, strict=False):
                at[self._members[host * len(self._beside) + relay]] = start
        ticket.asked[stack] = list(relayed.owned)
        ticket.home.grads[stack], ticket.home.firsts[stack] = buffer, at
