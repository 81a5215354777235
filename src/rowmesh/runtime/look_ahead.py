"""Exact look-ahead: rows of a batch to come that no unfinished step will change are sent early.

The owner decides, for only it knows who changes what: of the rows that a batch asks for it marks
those that a batch before it asked for too and whose step is not done; it sends a bit for every
row, then the unmarked rows. The others follow after the step (docs/notes/look_ahead.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rowmesh.comm.codecs import coded, wire_bytes
from rowmesh.comm.exchange import ChannelPool, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import StepError
from rowmesh.runtime.fetch import Early, Fetch
from rowmesh.runtime.fetches import Fetches
from rowmesh.runtime.requests import Request
from rowmesh.runtime.sets import clean_first, pack_bits, unpack_bits
from rowmesh.runtime.tickets import Merged, Stack, Ticket, Together

__all__ = ["LookAhead", "version_of"]

_ALWAYS = torch.iinfo(torch.int32).max
_MOST_PASSED = 16  # batches that a loop may take before it runs their forwards


class LookAhead:
    """Sends the rows of batches to come, for one engine.

    Args:
        path: Of the collection, in errors.
        mesh: Of the engine.
        stacks: Of the engine.
        fetches: Of the engine.
        pool: Of the engine.
    """

    def __init__(
        self, path: str, mesh: Mesh, stacks: Sequence[Stack], fetches: Fetches, pool: ChannelPool
    ) -> None:
        self._path, self._mesh, self._stacks, self._fetches = path, mesh, stacks, fetches
        self._pool = pool
        self._bits = pool.channel(f"look-ahead bits of {path}", Lane.CONTROL)
        self._rows = [pool.channel(f"early rows of {path}", Lane.ROWS) for _ in stacks]
        # Relays fetch rows for sums, and sums do not go ahead.
        self._early = [
            number
            for number, stack in enumerate(stacks)
            if number not in fetches.relays and not bool(stack.layout.is_pooled.all())
        ]
        self._marks: dict[int, Tensor] = {}
        self._finished = 0
        self.begun: list[Fetch] = []  # in the order of their forwards
        self.dropped: list[Fetch] = []  # begun, but their forwards will not take them
        self.current: Fetch | None = None  # of the batch that the loop is at
        self.again: list[Fetch] = []  # of these, the ones whose forwards are still to come
        self.num_early = self.num_late = 0  # rows sent to others, since the engine was made

    def take(self, features: Any, *, training: bool) -> Fetch | None:
        """The fetch that was begun for a forward with ``features``, if any was.

        The batch that its loop is at comes first. Those before it in the same loop are forgotten;
        what other loops began before it must be begun again, since its step may change their rows.

        Raises:
            StepError: If other training forwards were begun, and this one was not; or its ids have
                been changed since.
        """
        fetch = self._find(self.begun, features, training)
        known = fetch or self._find(self.again, features, training)
        if known is None:
            if training and any(f.is_training for f in (*self.begun, *self.again)):
                raise StepError(
                    f"a training forward of {self._path!r} with other features than those that "
                    f"were begun ahead: give rm.Pipeline features=, which names them in a batch"
                )
            return None
        earlier = [f for f in (*self.begun, *self.again) if f.number < known.number]
        self.drop([f for f in earlier if f.owner is known.owner], for_good=True)
        self.again = [f for f in self.again if f is not known]
        if fetch is None:
            return None
        if training:
            self.drop([f for f in earlier if f.owner is not known.owner], for_good=False)
        self.begun.remove(fetch)
        with self._mesh.trace.phase("await ahead"):
            fetch.wait()
        self._fetches.land(fetch)
        if fetch.error is None and version_of(features) != fetch.version:
            self.dropped.append(fetch)
            raise StepError(
                f"ids of {self._path!r} were changed after their batch was begun ahead: change "
                f"them before the loop gives them, or set the depth to 1"
            )
        return fetch

    def _find(self, fetches: Sequence[Fetch], features: Any, training: bool) -> Fetch | None:
        fits = [f for f in fetches if f.source is features and f.is_training == training]
        return self.current if self.current in fits else next(iter(fits), None)

    def give(self, fetch: Fetch) -> None:
        """The loop is at the batch of ``fetch``; of those it has passed a few may still be used."""
        self.current = fetch
        passed = [f for f in (*self.begun, *self.again) if f.owner is fetch.owner]
        passed = sorted((f for f in passed if f.number < fetch.number), key=lambda f: f.number)
        self.drop(passed[: max(0, len(passed) - _MOST_PASSED)], for_good=True)

    def drop(self, fetches: Sequence[Fetch], *, for_good: bool) -> None:
        """Forget what was begun; its messages are waited for by `settle`.

        Args:
            fetches: Which; others than those begun are left alone.
            for_good: Forwards with these features will not come. Otherwise they must be begun
                ``again`` before any that come after them.
        """
        chosen = [f for f in self.begun if f in fetches]
        self.dropped += chosen
        self.begun = [f for f in self.begun if f not in chosen]
        if for_good:
            self.again = [f for f in self.again if f not in fetches]
        else:
            self.again = sorted([*self.again, *chosen], key=lambda f: f.number)

    def begin(self, fetch: Fetch, unmarked: Sequence[Ticket], replicas: Together | None) -> None:
        """Have a thread do what a fetch needs before its forward.

        Args:
            fetch: Whose counts have been told.
            unmarked: Forwards that were not begun ahead, and whose steps are not done.
            replicas: Of the engine.
        """
        if self.begun and self.begun[-1].owner is fetch.owner:
            fetch.before, fetch.about = self.begun[-1], self.begun[-1].number
        self.begun.append(fetch)

        def work() -> None:
            with self._mesh.trace.phase("ahead"), torch.no_grad():
                self._fetches.hear(fetch)
                if fetch.bad_ranks:
                    return  # which its forward will say
                self._fetches.make_buffers(fetch)
                self._fetches.hear_asked(fetch, self._fetches.ask(fetch))
                if replicas is not None:
                    replicas.wait()
                if fetch.needs is not None:
                    fetch.needs.wait()
                for ticket in unmarked:
                    if not ticket.is_marked:  # by the batch in front, begun at the same time
                        self.mark(ticket.number, ticket.asked, ticket.merged)
                        ticket.is_marked = True
                self.send_early(fetch)
                fetch.before = None

        fetch.under_way = self._mesh.later(f"batches ahead of {self._path}", work, of=self._pool)

    def settle(self) -> None:
        """Wait for messages of dropped fetches."""
        for fetch in self.dropped:
            fetch.wait()
            self._fetches.arrive(fetch)
            self._fetches.land(fetch)
        self.dropped.clear()

    def finish(self, number: int) -> None:
        """All forwards up to ``number`` have been stepped, or dropped."""
        self._finished = number

    def mark(
        self, forward: int, asked: Sequence[Sequence[Request]], merged: Mapping[int, Merged]
    ) -> None:
        """Remember which rows the step of a forward will change; forwards come in order.

        Copies for the host are changed by steps of ranks that do not ask for them here: always
        late.

        Args:
            forward: Its number.
            asked: ``[stack][source]``, what every rank asked of this one.
            merged: By stack, what hosts asked of it.
        """
        for number in self._early:
            stack, marks = self._stacks[number], self._marks.get(number)
            if not stack.layout.trainable:
                continue
            if marks is None:
                home = stack.home
                marks = torch.zeros(len(home), dtype=torch.int32, device=home.device)
                self._marks[number] = marks
            changed = [request.rows for request in asked[number]]
            for rows in merged[number].wanted if number in merged else changed:
                marks.index_fill_(0, rows.long(), forward)
            stack.host_copies(self._mesh.rank, marks).fill_(_ALWAYS)

    def send_early(self, fetch: Fetch) -> None:
        """Send what can be sent now, take what others send; changes the routes to where it lies.

        Collective:
            All ranks, for the same forwards in one order, one thread each.
        """
        fetches, merged = self._fetches, fetch.merged
        late = {i: self._late(fetch, i) for i in self._early if i not in merged}
        by_host = {i: [self._is_late(fetch, i, r) for r in merged[i].wanted] for i in merged}
        if fetch.trains_everywhere:
            self.mark(fetch.number, fetch.asked, merged)
            self._tell_followers(fetch)
        for merges in fetches.merges:
            merges.send_early(fetch, by_host)
            late |= {i: merges.late(fetch, i) for i in merges.numbers}
        late = {i: late[i] for i in self._early}
        peers = self._mesh.peers()
        bits = {p: pack_bits([late[i][p] for i in late]) for p in peers}
        sizes = {p: [len(fetch.routes[i].requests[p].rows) for i in late] for p in peers}
        found = {p: bits[p].new_empty(sum(-(-n // 8) for n in sizes[p])) for p in peers}
        handle = self._bits.post(
            fetch.number, sends=bits.items(), receives=found.items(), edge=None
        )
        for p in peers:
            fetches.record(fetch, "look-ahead bits", p, len(bits[p]))
        for i, theirs in late.items():
            self._send_clean(fetch, i, theirs)
        handle.wait()
        told = {p: unpack_bits(found[p], sizes[p]) for p in peers}
        for k, i in enumerate(late):
            self._await_clean(fetch, i, late[i], {p: told[p][k] for p in peers})

    def _tell_followers(self, fetch: Fetch) -> None:
        """Of the rows that hosts asked for the batch in front: those that ``fetch`` does not ask
        for, whose gradients may therefore follow that batch's step."""
        before = fetch.before
        if before is None or before.bad_ranks or not before.trains_everywhere:
            return  # no step of it will come
        for i in self._early:
            if self._stacks[i].layout.may_follow:
                wanted = before.merged[i].wanted
                marks = [self._marks[i].index_select(0, rows) for rows in wanted]
                fetch.follows[i] = [part <= before.number for part in marks]

    def _late(self, fetch: Fetch, number: int) -> dict[int, Tensor]:
        """Of the rows that each peer asks for, which may change before its forward."""
        requests = {p: fetch.asked[number][p].rows for p in self._mesh.peers()}
        late = self._is_late(fetch, number, torch.cat([*requests.values()]))
        parts = late.split([len(r) for r in requests.values()])
        return dict(zip(requests, parts, strict=True))

    def _is_late(self, fetch: Fetch, number: int, rows: Tensor) -> Tensor:
        """Of this rank's rows, which may change before the forward."""
        if number in fetch.late_stacks or number not in self._marks:
            fill = number in fetch.late_stacks
            return torch.full((len(rows),), fill, dtype=torch.bool, device=rows.device)
        return self._marks[number].index_select(0, rows) > self._finished

    def _send_clean(self, fetch: Fetch, number: int, late: dict[int, Tensor]) -> None:
        source, requests = self._fetches.source(fetch, number)
        codec, dtype, sends = self._fetches.codec(number, "rows"), fetch.buffers[number].dtype, []
        for peer, mask in late.items():
            rows = requests[peer].rows[~mask]
            name = ("early", number, peer, fetch.place)
            out = self._fetches.scratch.take(name, len(rows), source.shape[1], dtype)
            if out.dtype == source.dtype:
                torch.index_select(source, 0, rows, out=out)
            else:
                out.copy_(source.index_select(0, rows))
            sends.append((peer, coded(out, codec)))
            self._fetches.record(fetch, "rows", peer, wire_bytes(out, codec))
            self.num_early += len(rows)
            self.num_late += len(mask) - len(rows)
        handle = self._rows[number].post(fetch.number, sends=sends, receives=(), edge=None)
        self._fetches.keep(fetch, handle)

    def _await_clean(
        self, fetch: Fetch, number: int, late: dict[int, Tensor], told: dict[int, Tensor]
    ) -> None:
        """Receive the rows that peers send now; behind them in each slice comes what is late."""
        route, buffer = fetch.routes[number], fetch.buffers[number]
        bounds, world = route.vector_bounds, self._mesh.world
        place = torch.arange(route.num_vectors, dtype=torch.int32, device=buffer.device)
        num_clean, receives = [0] * world, []
        for peer, mask in told.items():
            first = bounds[peer]
            order, num_clean[peer] = clean_first(mask)
            place[first : first + len(mask)] = order + first
            part = buffer[first : first + num_clean[peer]]
            receives.append((peer, coded(part, self._fetches.codec(number, "rows"))))
        handle = self._rows[number].post(fetch.number, sends=(), receives=receives, edge=None)
        fetch.arriving.append(handle)
        moved = place.index_select(0, route.forward.positions)
        fetch.routes[number] = replace(route, forward=replace(route.forward, positions=moved))
        masks = [late.get(rank) for rank in range(world)]
        fetch.early[number] = Early(late=masks, num_clean=num_clean)


def version_of(features: Any) -> int:
    """Changes whenever ids are changed in place."""
    values = features.values()
    return 0 if values.is_inference() else int(values._version)
