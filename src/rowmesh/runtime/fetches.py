"""Fetches: one batch's way from its ids to vectors, in stages.

counts + status -> ids -> [rows that no unfinished step changes] -> all other rows and sums

A forward runs all stages, or takes a fetch that was begun ahead of it: then another thread has run
the stages in front, and only the last is left (docs/notes/look_ahead.md).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rowmesh.comm.codecs import PLAIN, Codec, Codecs, Message, coded, wire_bytes
from rowmesh.comm.exchange import ChannelPool, Handle, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime.fetch import Fetch
from rowmesh.runtime.merges import Merges
from rowmesh.runtime.relay import Relay
from rowmesh.runtime.requests import NUM_COUNTS, Request, look_up, num_words, pack, unpack
from rowmesh.runtime.scratch import Scratch
from rowmesh.runtime.tickets import Stack

__all__ = ["Fetches"]

_HEAD = 2  # of a counts message: status word, samples; then four counts a stack


class Fetches:
    """The exchanges of one engine's forwards.

    Args:
        path: Of the collection, in errors.
        mesh: Of the engine.
        stacks: Of the engine.
        weighted: Whether ids have weights.
        id_dtype: Of ids on the wire.
        pool: Of the engine.
        scratch: Of the engine.
        codecs: Of the plan.
    """

    def __init__(
        self,
        path: str,
        mesh: Mesh,
        stacks: Sequence[Stack],
        *,
        weighted: bool,
        id_dtype: torch.dtype,
        pool: ChannelPool,
        scratch: Scratch,
        codecs: Codecs,
    ) -> None:
        self._mesh, self._stacks, self._weighted = mesh, stacks, weighted
        self._id_dtype, self.scratch, self.codecs = id_dtype, scratch, codecs
        self._pool = pool
        self._counts = pool.channel(f"counts of {path}", Lane.CONTROL)
        self._ids = pool.channel(f"ids of {path}", Lane.CONTROL)
        self._weights = pool.channel(f"sample weights of {path}", Lane.CONTROL)
        self._vectors = [pool.channel(f"vectors of {path}", Lane.ROWS) for _ in stacks]
        self.relays = {
            i: Relay(path, stack.layout, mesh, id_dtype, pool, codecs)
            for i, stack in enumerate(stacks)
            if stack.layout.is_relayed
        }
        merged = [i for i, stack in enumerate(stacks) if stack.layout.is_merged]
        sizes = dict.fromkeys(stacks[i].layout.groups.size for i in merged)
        self.merges = [
            Merges(
                path,
                mesh,
                stacks,
                [i for i in merged if stacks[i].layout.groups.size == size],
                id_dtype=id_dtype,
                pool=pool,
                scratch=scratch,
                codec=codecs["rows"],
                record=self.record,
                keep=self.keep,
            )
            for size in sizes
        ]
        self._path = path
        self._leaving: dict[int, list[Handle]] = {}

    def end_sends(self, place: int | None = None) -> None:
        """Wait until what was sent has left: of one place's buffers, or of all."""
        for number in list(self._leaving) if place is None else [place]:
            for handle in self._leaving.pop(number, ()):
                handle.wait()

    def keep(self, fetch: Fetch, handle: Handle) -> None:
        """Wait for ``handle`` before the buffers of the fetch's place are used again."""
        self._leaving.setdefault(fetch.place, []).append(handle)

    def record(self, fetch: Fetch, edge: str, peer: int, num_bytes: int) -> None:
        """Count bytes: now, or when the forward comes that takes the fetch."""
        if fetch.is_ahead:
            fetch.sent.append((edge, peer, num_bytes))
        else:
            self._mesh.ledger.record(edge, peer, num_bytes)

    def land(self, fetch: Fetch) -> None:
        """The forward is here, or will never come: count what was sent for it."""
        fetch.is_ahead = False
        for edge, peer, num_bytes in fetch.sent:
            self._mesh.ledger.record(edge, peer, num_bytes)
        fetch.sent.clear()
        self.count_bits(fetch)

    def count_bits(self, fetch: Fetch) -> None:
        """Count the bits about the batch in front: in its step, if that made use of them."""
        for peer, num_bytes in fetch.sent_bits:
            self._mesh.ledger.record("look-ahead bits", peer, num_bytes)
        fetch.sent_bits.clear()

    def tell(self, fetch: Fetch) -> None:
        """Begin the exchange of counts: tell every rank what it will be asked."""
        mesh = self._mesh
        table = [[fetch.status, fetch.features.stride()] for _ in range(mesh.world)]
        for peer, row in enumerate(table):
            row += [n for route in fetch.routes for n in route.requests[peer].counts()]
            row += [0] * (_HEAD + NUM_COUNTS * len(self._stacks) - len(row))
        sent = torch.tensor(table, device=mesh.device)
        found = torch.empty_like(sent)
        found[mesh.rank] = sent[mesh.rank]
        for peer in mesh.peers():
            self.record(fetch, "status", peer, 8)
            self.record(fetch, "counts", peer, 8 * (sent.shape[1] - 1))
        handle = self._counts.post(
            fetch.number,
            sends=[(p, sent[p]) for p in mesh.peers()],
            receives=[(p, found[p]) for p in mesh.peers()],
            edge=None,
        )
        fetch.hearing = found, handle

    def hear(self, fetch: Fetch) -> None:
        """Wait for the counts of all ranks."""
        assert fetch.hearing is not None
        found, handle = fetch.hearing
        handle.wait()
        fetch.counts = found.tolist()

    def make_buffers(self, fetch: Fetch) -> None:
        """Memory for every stack's vectors."""
        for i, (stack, route) in enumerate(zip(self._stacks, fetch.routes, strict=True)):
            layout = stack.layout
            dtype = torch.float32 if layout.has_pooled else layout.dtype
            name = ("vectors", i, fetch.place)
            fetch.buffers.append(self.scratch.take(name, route.num_vectors, layout.dim, dtype))

    def ask(self, fetch: Fetch) -> list[tuple[Handle, Mapping[int, Tensor]]]:
        """Send every owner its requests; `hear_asked` takes what this returns."""
        mesh, layouts = self._mesh, [s.layout for s in self._stacks]
        sends, weight_sends = [], []
        for peer in mesh.peers():
            summed = [layout.num_summed(peer) for layout in layouts]
            requests = [route.requests[peer] for route in fetch.routes]
            words, weights = pack(requests, summed, dtype=self._id_dtype)
            sends.append((peer, words))
            self.record(fetch, "ids", peer, words.numel() * words.element_size())
            if weights is not None:
                weight_sends.append((peer, weights))
                size = weights.numel() * weights.element_size()
                self.record(fetch, "sample weights", peer, size)
        sizes = {p: self._sizes(fetch, p) for p in mesh.peers()}
        received = {
            p: torch.empty(sum(map(sum, size)), dtype=self._id_dtype, device=mesh.device)
            for p, size in sizes.items()
        }
        received_weights = {
            p: torch.empty(sum(n[1] for n in size), device=mesh.device)
            for p, size in (sizes.items() if self._weighted else ())
        }
        return [
            (channel.post(fetch.number, sends=out, receives=found.items(), edge=None), found)
            for channel, out, found in (
                (self._ids, sends, received),
                (self._weights, weight_sends, received_weights),
            )
        ]

    def hear_asked(
        self, fetch: Fetch, messages: Sequence[tuple[Handle, Mapping[int, Tensor]]]
    ) -> None:
        """Wait for what every rank asks of this one."""
        for handle, _ in messages:
            handle.wait()
        received, received_weights = (found for _, found in messages)
        mesh = self._mesh
        summed = [s.layout.num_summed(mesh.rank) for s in self._stacks]
        by_source = [
            [route.requests[mesh.rank] for route in fetch.routes]
            if source == mesh.rank
            else unpack(
                received[source], received_weights.get(source), self._asked(fetch, source), summed
            )
            for source in range(mesh.world)
        ]
        fetch.asked = [list(asked) for asked in zip(*by_source, strict=True)]
        for merges in self.merges:
            merges.ask(fetch)

    def _asked(self, fetch: Fetch, source: int) -> list[list[int]]:
        """``[stack]`` the counts of what ``source`` asks of this rank."""
        counts = fetch.counts[source][_HEAD:]
        return [counts[NUM_COUNTS * i :][:NUM_COUNTS] for i in range(len(self._stacks))]

    def _sizes(self, fetch: Fetch, source: int) -> list[list[int]]:
        summed = [s.layout.num_summed(self._mesh.rank) for s in self._stacks]
        asked = self._asked(fetch, source)
        return [num_words(c, n) for c, n in zip(asked, summed, strict=True)]

    def read_here(self, fetch: Fetch) -> None:
        """Copies, and this rank's own rows where no relay or peer fetches them."""
        rank = self._mesh.rank
        for i, (stack, route) in enumerate(zip(self._stacks, fetch.routes, strict=True)):
            bounds, buffer = route.vector_bounds, fetch.buffers[i]
            if len(route.copied_slots):
                out = buffer[bounds[-1] :]
                torch.index_select(stack.copies, 0, route.copied_slots, out=out)
            if i not in self.relays and not stack.layout.is_merged:
                out = buffer[bounds[rank] : bounds[rank + 1]]
                look_up(stack.home, route.requests[rank], out)

    def fetch_relayed(self, fetch: Fetch) -> None:
        """Fetch what relayed stacks need from the ranks beside this one."""
        for i, relay in self.relays.items():
            if relay.is_used:
                home = self._stacks[i].home
                fetch.relayed[i] = relay.fetch(fetch.number, fetch.asked[i], home)

    def await_vectors(self, fetch: Fetch) -> None:
        """Post the receives of all vectors that were not sent ahead."""
        for i, (route, channel) in enumerate(zip(fetch.routes, self._vectors, strict=True)):
            bounds, early = route.vector_bounds, fetch.early.get(i)
            receives = []
            for p in self._mesh.peers():
                first = bounds[p] + (0 if early is None else early.num_clean[p])
                num_sums = route.requests[p].num_pooled
                part = fetch.buffers[i][first : bounds[p + 1]]
                receives.append((p, self._coded(part, i, num_sums)))
            handle = channel.post(fetch.number, sends=(), receives=receives, edge=None)
            fetch.arriving.append(handle)

    def answer(self, fetch: Fetch) -> None:
        """Look up what peers asked and has not been sent, and send it; a relay also its own.

        Rows that peers of other hosts ask for come last, and on another thread if the batch was
        begun ahead: they are waited for before they can be handed on.
        """
        fetch.is_answered = True
        for i, stack in enumerate(self._stacks):
            if not stack.layout.is_merged:
                self._answer_one(fetch, i)
        if not self.merges:
            return
        if fetch.is_ahead:
            work = functools.partial(self._answer_merged, fetch)
            fetch.answering = self._mesh.later(f"merged rows of {self._path}", work, of=self._pool)
        else:
            self._answer_merged(fetch)

    def _answer_merged(self, fetch: Fetch) -> None:
        with self._mesh.trace.phase("merge"), torch.no_grad():
            for merges in self.merges:
                merges.fetch_late(fetch)
                for i in merges.numbers:
                    self._answer_one(fetch, i)

    def source(self, fetch: Fetch, number: int) -> tuple[Tensor, Sequence[Request]]:
        """What vectors of a stack are made of here, and what every rank asks of that."""
        if number in fetch.relayed:
            return fetch.relayed[number].rows, fetch.relayed[number].requests
        for merges in self.merges:
            if number in merges.numbers:
                return fetch.merged[number].rows, merges.requests(fetch, number)
        return self._stacks[number].home, fetch.asked[number]

    def _answer_one(self, fetch: Fetch, number: int) -> None:
        rank, route, buffer = self._mesh.rank, fetch.routes[number], fetch.buffers[number]
        source, requests = self.source(fetch, number)
        early, sends = fetch.early.get(number), []
        for peer in self._mesh.peers():
            request = requests[peer]
            if early is not None and (late := early.late[peer]) is not None:
                request = replace(request, rows=request.rows[late])
            size = (request.num_vectors, buffer.shape[1])
            out = self.scratch.take(("answer", number, peer, fetch.place), *size, buffer.dtype)
            look_up(source, request, out)
            sends.append((peer, self._coded(out, number, request.num_pooled)))
            for edge, part in (
                ("rows", out[: len(request.rows)]),
                ("pooled", out[len(request.rows) :]),
            ):
                self.record(fetch, edge, peer, wire_bytes(part, self.codec(number, edge)))
        handle = self._vectors[number].post(fetch.number, sends=sends, receives=(), edge=None)
        self.keep(fetch, handle)
        if number in fetch.relayed or number in fetch.merged:
            bounds = route.vector_bounds
            look_up(source, requests[rank], buffer[bounds[rank] : bounds[rank + 1]])

    def codec(self, number: int, edge: str) -> Codec:
        """Of a stack's vectors between a rank and whom it asks, which if merged is beside it."""
        return (PLAIN if self._stacks[number].layout.is_merged else self.codecs)[edge]

    def _coded(self, vectors: Tensor, number: int, num_sums: int) -> Tensor | Message:
        """A message of rows and then sums of bags."""
        others = len(vectors) - num_sums, self.codec(number, "pooled")
        return coded(vectors, self.codec(number, "rows"), others=others)

    def arrive(self, fetch: Fetch) -> None:
        """Wait for all vectors."""
        for handle in fetch.arriving:
            handle.wait()
        fetch.arriving.clear()
