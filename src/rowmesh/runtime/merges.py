"""Merged requests: a row crosses to a host once, however many of its ranks ask for it.

A rank asks no other host. What it wants of rank (h', l) it asks of (h, l) on its own host, the
owner's peer, which asks the owner for the distinct rows that ranks of its host want, and hands them
on. So bytes between hosts follow the distinct rows of a host, and messages go between peers alone.
Codecs are for what crosses; inside a host rows travel as they are. Gradients go back the same way,
added up in the host (`rowmesh.runtime.merged_sums`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rowmesh.comm.codecs import Codec, coded, wire_bytes
from rowmesh.comm.exchange import Channel, ChannelPool, Handle, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.nn.kernels import run_numbers, run_starts, stable_sort
from rowmesh.runtime.fetch import Fetch
from rowmesh.runtime.requests import Request
from rowmesh.runtime.scratch import Scratch
from rowmesh.runtime.sets import clean_first, pack_bits, unpack_bits
from rowmesh.runtime.stacks import StackLayout
from rowmesh.runtime.tickets import Merged, Stack

__all__ = ["Merges", "Peers"]


class Peers:
    """The ranks that a merged stack's messages go between, as one rank sees them.

    Args:
        layout: Of the stack, with ``is_merged``.
        mesh: Of the engine.

    Attributes:
        beside: Ranks of this rank's host, in order.
        ranks: Those at its place on every host of its shard group, in order.
        host: Its place among ``ranks``.
        others: Place and rank of all others of them.
        bounds: ``[H + 1]`` where the home rows of each begin among the slots it is asked for.
    """

    def __init__(self, layout: StackLayout, mesh: Mesh) -> None:
        local, rank = mesh.topology.local, mesh.rank
        first = rank - rank % local
        self.beside = range(first, first + local)
        members = layout.groups.members(layout.groups.group(rank))
        self.ranks = [r for r in members if r % local == rank % local]
        self.host = self.ranks.index(rank)
        self.others = [(h, r) for h, r in enumerate(self.ranks) if r != rank]
        self.bounds = list(accumulate((layout.home_slots[r] for r in self.ranks), initial=0))


class Merges:
    """Asks peers for what ranks of this host want of them, for one engine's stacks.

    Args:
        path: Of the collection, in errors.
        mesh: All ranks make the same merges in one order.
        stacks: Of the engine.
        numbers: Of those that are merged, of one size of shard groups.
        id_dtype: Of ids on the wire.
        pool: Of the engine.
        scratch: Of the engine.
        codec: Of rows.
        record: Counts bytes: fetch, edge, peer, bytes.
        keep: Holds a fetch's buffers until a message has left.
    """

    def __init__(
        self,
        path: str,
        mesh: Mesh,
        stacks: Sequence[Stack],
        numbers: Sequence[int],
        *,
        id_dtype: torch.dtype,
        pool: ChannelPool,
        scratch: Scratch,
        codec: Codec,
        record: Callable[[Fetch, str, int, int], None],
        keep: Callable[[Fetch, Handle], None],
    ) -> None:
        self._mesh, self._stacks, self.numbers = mesh, stacks, list(numbers)
        self._dtype, self._scratch, self._codec = id_dtype, scratch, codec
        self._record, self._keep = record, keep
        self._peers = {i: Peers(stacks[i].layout, mesh) for i in self.numbers}
        self._others = self._peers[self.numbers[0]].others
        self._counts = pool.channel(f"merged counts of {path}", Lane.CONTROL)
        self._ids = pool.channel(f"merged ids of {path}", Lane.CONTROL)
        self._bits = pool.channel(f"merged look-ahead bits of {path}", Lane.CONTROL)
        self._early, self._late = (
            {i: pool.channel(f"merged {what} of {path}", Lane.ROWS) for i in self.numbers}
            for what in ("early rows", "rows")
        )

    def ask(self, fetch: Fetch) -> None:
        """Merge what ranks beside asked, ask the peers, and hear what they ask of this one.

        Collective:
            All ranks, after the ids of ranks beside have arrived.
        """
        with self._mesh.trace.phase("merge"):
            found = {i: self._merge(fetch.asked[i], i) for i in self.numbers}
            counts = self._tell(fetch, found)
            wanted = self._exchange_ids(fetch, found, counts)
            for i, (slots, cuts, positions) in found.items():
                layout = self._stacks[i].layout
                name = ("merged", i, fetch.place)
                fetch.merged[i] = Merged(
                    slots=slots,
                    cuts=cuts,
                    positions=positions,
                    wanted=wanted[i],
                    rows=self._scratch.take(name, len(slots), layout.dim, layout.dtype),
                    place=torch.arange(len(slots), dtype=torch.int32, device=slots.device),
                )

    def _merge(
        self, asked: Sequence[Request], number: int
    ) -> tuple[Tensor, list[int], Sequence[Tensor]]:
        """The distinct slots, where each host's begin, and where each rank's are among them."""
        peers = self._peers[number]
        parts = [asked[rank].rows.to(self._dtype) for rank in peers.beside]
        keys, order = stable_sort(torch.cat(parts))
        starts = run_starts(keys)
        slots = keys.index_select(0, starts)
        edges = torch.tensor(peers.bounds, dtype=slots.dtype, device=slots.device)
        cuts: list[int] = torch.searchsorted(slots, edges).tolist()
        return slots, cuts, run_numbers(order, starts).split([len(part) for part in parts])

    def _tell(
        self, fetch: Fetch, found: Mapping[int, tuple[Tensor, list[int], Sequence[Tensor]]]
    ) -> list[list[int]]:
        """``[stack][host]`` how many rows each peer wants of this rank."""
        sizes = [[last - first for first, last in pairwise(found[i][1])] for i in self.numbers]
        sent = torch.tensor(sizes, device=self._mesh.device).t().contiguous()
        heard = sent.clone()
        for _, rank in self._others:
            self._record(fetch, "counts", rank, 8 * len(self.numbers))
        self._counts.post(
            fetch.number,
            sends=[(rank, sent[host]) for host, rank in self._others],
            receives=[(rank, heard[host]) for host, rank in self._others],
            edge=None,
        ).wait()
        told: list[list[int]] = heard.t().tolist()
        return told

    def _exchange_ids(
        self,
        fetch: Fetch,
        found: Mapping[int, tuple[Tensor, list[int], Sequence[Tensor]]],
        counts: Sequence[Sequence[int]],
    ) -> dict[int, list[Tensor]]:
        """By stack, this rank's home rows that each host wants."""

        def part(number: int, host: int) -> Tensor:
            slots, cuts, _ = found[number]
            return slots[cuts[host] : cuts[host + 1]] - self._peers[number].bounds[host]

        by_host = list(zip(*counts, strict=True))
        arriving = {
            host: torch.empty(sum(by_host[host]), dtype=self._dtype, device=self._mesh.device)
            for host, _ in self._others
        }
        sends = [(r, torch.cat([part(i, h) for i in self.numbers])) for h, r in self._others]
        for rank, ids in sends:
            self._record(fetch, "ids", rank, ids.numel() * ids.element_size())
        self._ids.post(
            fetch.number,
            sends=sends,
            receives=[(rank, arriving[host]) for host, rank in self._others],
            edge=None,
        ).wait()
        heard = {host: ids.split(by_host[host]) for host, ids in arriving.items()}
        return {
            i: [
                heard[host][k] if host in heard else part(i, host)
                for host in range(len(self._peers[i].ranks))
            ]
            for k, i in enumerate(self.numbers)
        }

    def send_early(self, fetch: Fetch, late: Mapping[int, Sequence[Tensor]]) -> None:
        """Send peers what can be sent now, and take what they send.

        With the bits of its rows go those of `Fetch.follows`.

        Args:
            fetch: Of a batch that was begun ahead.
            late: By stack and host, which of `Merged.wanted` may change before its forward.

        Collective:
            As `LookAhead.send_early`.
        """
        merged, follows = fetch.merged, fetch.follows
        of_rows = [merged[i] for i in self.numbers]
        if fetch.before is not None:
            of_rows += [fetch.before.merged[i] for i in follows if i in self.numbers]
        sizes = {h: [m.cuts[h + 1] - m.cuts[h] for m in of_rows] for h, _ in self._others}
        bits = {host: pack_bits([late[i][host] for i in self.numbers]) for host, _ in self._others}
        for host, rank in self._others:
            self._record(fetch, "look-ahead bits", rank, len(bits[host]))
            more = pack_bits([follows[i][host] for i in follows if i in self.numbers])
            fetch.sent_bits.append((rank, len(more)))
            bits[host] = torch.cat([bits[host], more.to(bits[host].device)])
        found = {h: bits[h].new_empty(sum(-(-n // 8) for n in sizes[h])) for h, _ in self._others}
        handle = self._bits.post(
            fetch.number,
            sends=[(rank, bits[host]) for host, rank in self._others],
            receives=[(rank, found[host]) for host, rank in self._others],
            edge=None,
        )
        for i in self.numbers:
            merged[i].sent = late[i]
            chosen = [rows[~mask] for rows, mask in zip(merged[i].wanted, late[i], strict=True)]
            self._send(fetch, i, self._early[i], chosen)
        handle.wait()
        told = {host: unpack_bits(found[host], sizes[host]) for host, _ in self._others}
        for k, i in enumerate((i for i in follows if i in self.numbers), start=len(self.numbers)):
            fetch.told[i] = [
                told[host][k] if host in told else mask for host, mask in enumerate(follows[i])
            ]
        handles = [
            self._await_early(fetch, i, {host: told[host][k] for host in told})
            for k, i in enumerate(self.numbers)
        ]
        for handle in handles:
            handle.wait()

    def _await_early(self, fetch: Fetch, number: int, told: Mapping[int, Tensor]) -> Handle:
        """Receive what peers send ahead, in front of what is late of each; read own rows."""
        found, receives = fetch.merged[number], []
        num_clean = [0] * len(found.wanted)
        late = torch.ones(len(found.slots), dtype=torch.bool, device=found.slots.device)
        host = self._peers[number].host
        late[found.cuts[host] : found.cuts[host + 1]] = found.sent[host]
        for host, rank in self._others:
            first, last = found.cuts[host], found.cuts[host + 1]
            place, num_clean[host] = clean_first(told[host])
            found.place[first:last] = place + first
            late[first:last] = told[host]
            part = found.rows[first : first + num_clean[host]]
            receives.append((rank, coded(part, self._codec)))
        found.late, found.num_clean = late, num_clean
        handle = self._early[number].post(fetch.number, sends=(), receives=receives, edge=None)
        self._read_here(fetch, number)
        return handle

    def fetch_late(self, fetch: Fetch) -> None:
        """Send peers the rows that they have not got, and fetch what this host has not.

        Collective:
            All ranks, when steps have changed the rows they change.
        """
        handles = []
        for i in self.numbers:
            found = fetch.merged[i]
            receives = []
            for host, rank in self._others:
                first = found.cuts[host] + (found.num_clean[host] if found.num_clean else 0)
                part = found.rows[first : found.cuts[host + 1]]
                receives.append((rank, coded(part, self._codec)))
            handles.append(self._late[i].post(fetch.number, sends=(), receives=receives, edge=None))
        for i in self.numbers:
            found = fetch.merged[i]
            chosen = [
                rows if not found.sent else rows[found.sent[host]]
                for host, rows in enumerate(found.wanted)
            ]
            self._send(fetch, i, self._late[i], chosen)
            self._read_here(fetch, i)
        for handle in handles:
            handle.wait()

    def _send(self, fetch: Fetch, number: int, channel: Channel, chosen: Sequence[Tensor]) -> None:
        """Home rows to the peer on each host."""
        home, sends = self._stacks[number].home, []
        for host, rank in self._others:
            rows = chosen[host]
            name = ("merged answer", number, host, fetch.place, channel.name)
            out = self._scratch.take(name, len(rows), home.shape[1], home.dtype)
            torch.index_select(home, 0, rows, out=out)
            sends.append((rank, coded(out, self._codec)))
            self._record(fetch, "rows", rank, wire_bytes(out, self._codec))
        self._keep(fetch, channel.post(fetch.number, sends=sends, receives=(), edge=None))

    def _read_here(self, fetch: Fetch, number: int) -> None:
        """Rows of this rank itself: its home's, and its copies for the host."""
        stack, found, peers = self._stacks[number], fetch.merged[number], self._peers[number]
        rank, host = self._mesh.rank, peers.host
        copies = slice(found.cuts[-1], len(found.slots))
        shift = stack.layout.home_slots[rank] - peers.bounds[-1]
        for rows, part in (
            (found.wanted[host], slice(found.cuts[host], found.cuts[host + 1])),
            (found.slots[copies] + shift, copies),
        ):
            torch.index_select(stack.home, 0, rows, out=found.rows[part])

    def requests(self, fetch: Fetch, number: int) -> list[Request]:
        """What this rank was asked, with positions in `Merged.rows` for slots."""
        found, asked = fetch.merged[number], list(fetch.asked[number])
        for rank, positions in zip(self._peers[number].beside, found.positions, strict=True):
            asked[rank] = replace(asked[rank], rows=found.place.index_select(0, positions))
        return asked

    def late(self, fetch: Fetch, number: int) -> dict[int, Tensor]:
        """After `send_early`: of the rows that each other rank asked for, which are late."""
        found = fetch.merged[number]
        assert found.late is not None
        masks = {rank: found.late[:0] for rank in self._mesh.peers()}
        for rank, positions in zip(self._peers[number].beside, found.positions, strict=True):
            if rank != self._mesh.rank:
                masks[rank] = found.late.index_select(0, positions)
        return masks
