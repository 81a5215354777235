"""A meeting of replicas: values of rows from each, combined, the same for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.comm.exchange import Channel, Handle, Lane
from rowmesh.optim.groups import mean_of_groups
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.sets import decode_set, encode_set, set_words

__all__ = ["Combine", "Meeting", "Rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a stack, ascending slots, and their part of some of its tensors."""

    slots: Tensor
    values: list[Tensor]

    def cut(self, count: int) -> list["Rows"]:
        """Slot s goes to part s mod count, as slot s // count of it."""
        if count == 1:
            return [self]
        found = []
        for part in range(count):
            index = (self.slots % count == part).nonzero().squeeze(1)
            slots = self.slots.index_select(0, index) // count
            found.append(Rows(slots, [v.index_select(0, index) for v in self.values]))
        return found


Combine = Callable[[Sequence[Rows]], Rows]  # what every replica brings, in the order of groups


class Meeting:
    """This rank and its replicas, for stacks of one engine with one size of shard groups.

    Two replicas send each other all they have and combine it both. More take turns: slot s is
    combined by replica s mod M, which tells the others. Either way the same operations are done in
    the order of groups, so that all have the same bits.

    Args:
        engine: Of the collection.
        stacks: Their numbers.
    """

    def __init__(self, engine: ShardedEngine, stacks: Sequence[int]) -> None:
        self._engine, self.stacks = engine, list(stacks)
        mesh, groups = engine.mesh, engine.stacks[stacks[0]].layout.groups
        self.ranks = groups.replicas(mesh.rank)
        self.num_hosts = len({mesh.topology.host(r) for r in groups.members(0)})
        self._me = self.ranks.index(mesh.rank)
        self._num_parts = 1 if len(self.ranks) == 2 else len(self.ranks)
        self._sequence = 0
        name, channel = f"replica sync of {engine.path}", engine.pool.channel
        states = [1 + len(engine.stacks[i].home_state) for i in stacks]
        self._counts = [channel(name, Lane.CONTROL) for _ in range(2)]
        self._sets = [[channel(name, Lane.GRADS) for _ in stacks] for _ in range(2)]
        self._values = [
            [[channel(name, Lane.GRADS) for _ in range(n)] for n in states] for _ in range(2)
        ]
        self._all = [channel(name, Lane.GRADS) for _ in range(2)]

    def exchange(self, mine: Sequence[Rows], combine: Sequence[Combine]) -> list[Rows]:
        """Of each stack, the rows that any replica brings, combined.

        Args:
            mine: What this rank brings, by stack.
            combine: By stack.

        Collective:
            All replicas.
        """
        self._sequence += 1
        count, parts, me = len(self.ranks), self._num_parts, self._me % self._num_parts
        cut = [rows.cut(parts) for rows in mine]
        sent = [[c[j % parts] for c in cut] for j in range(count)]
        arrived = self._swap(0, sent, [j % parts for j in range(count)], [me] * count)
        found = [
            f([Rows(r.slots * parts + me, r.values) for r in rows])
            for f, rows in zip(combine, arrived, strict=True)
        ]
        if parts == 1:
            return found
        told = [Rows(rows.slots // parts, rows.values) for rows in found]
        arrived = self._swap(1, [told] * count, [me] * count, list(range(count)))
        return [self._merge(rows) for rows in arrived]

    def _merge(self, rows: Sequence[Rows]) -> Rows:
        """The parts of all replicas as one."""
        slots = torch.cat([r.slots * len(rows) + j for j, r in enumerate(rows)])
        slots, order = torch.sort(slots)
        parts = zip(*(r.values for r in rows), strict=True)
        return Rows(slots, [torch.cat(p).index_select(0, order) for p in parts])

    def _size(self, k: int, part: int) -> int:
        """Slots of a part of the k-th stack: ceil((S - part) / number of parts)."""
        slots = len(self._engine.stacks[self.stacks[k]].home)
        return -(-(slots - part) // self._num_parts)

    def _swap(
        self, which: int, sent: Sequence[Sequence[Rows]], to: Sequence[int], of: Sequence[int]
    ) -> list[list[Rows]]:
        """``sent[j]`` to replica j, which is part ``to[j]``; theirs, parts ``of[j]``, by stack."""
        counts = self._tell(which, [[len(rows.slots) for rows in row] for row in sent])
        others = [j for j in range(len(self.ranks)) if j != self._me]
        dtype, handles, arrived = self._engine.id_dtype, [], []
        for k in range(len(self.stacks)):
            sizes = [(c[k], self._size(k, part)) for c, part in zip(counts, of, strict=True)]
            own = sent[self._me][k]
            words = [own.slots.new_empty(set_words(*size), dtype=dtype) for size in sizes]
            sets = {
                j: encode_set(sent[j][k].slots, self._size(k, to[j]), dtype=dtype) for j in others
            }
            handles.append(self._post(self._sets[which][k], sets, words))
            values: list[list[Tensor]] = []
            for channel, *mine in zip(
                self._values[which][k], *(row[k].values for row in sent), strict=False
            ):
                like = mine[self._me]
                theirs = [like.new_empty((n, *like.shape[1:])) for n, _ in sizes]
                handles.append(self._post(channel, {j: mine[j] for j in others}, theirs))
                values.append(theirs)
            arrived.append((sizes, words, values))
        for handle in handles:
            handle.wait()
        return [
            [
                sent[j][k]
                if j == self._me
                else Rows(decode_set(words[j], *sizes[j]), [v[j] for v in values])
                for j in range(len(self.ranks))
            ]
            for k, (sizes, words, values) in enumerate(arrived)
        ]

    def _tell(self, which: int, counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """``counts[j]`` to replica j; returns theirs."""
        sent = torch.tensor(counts, device=self._engine.mesh.device)
        found = sent.clone()
        sends = {j: sent[j] for j in range(len(self.ranks)) if j != self._me}
        self._post(self._counts[which], sends, list(found), edge="counts").wait()
        told: list[list[int]] = found.tolist()
        return told

    def _post(
        self,
        channel: Channel,
        sends: dict[int, Tensor],
        receives: Sequence[Tensor],
        *,
        edge: str = "replica sync",
    ) -> Handle:
        return channel.post(
            self._sequence,
            sends=[(self.ranks[j], tensor.contiguous()) for j, tensor in sends.items()],
            receives=[(self.ranks[j], receives[j]) for j in sends],
            edge=edge,
        )

    def average(self, tensor: Tensor, kept: Tensor | None, *, slice_bytes: int) -> None:
        """Make all rows of a stack's tensor, or the slots ``kept``, their mean over replicas.

        Replica a averages chunk a of M, in slices of so many bytes, and tells the others.

        Collective:
            All replicas.
        """
        count = len(tensor) if kept is None else len(kept)
        chunk = -(-count // len(self.ranks))
        row_bytes = tensor.element_size() * max(1, tensor[:1].numel())
        step = max(1, slice_bytes // row_bytes)
        for start in range(0, chunk, step):
            stop = min(chunk, start + step)
            cuts = [(a * chunk + start, a * chunk + stop) for a in range(len(self.ranks))]
            ends = [min((a + 1) * chunk, count) for a in range(len(self.ranks))]
            self._average_slices(
                tensor,
                [
                    slice(min(first, end), min(last, end))
                    for (first, last), end in zip(cuts, ends, strict=True)
                ],
                kept,
            )

    def _average_slices(self, tensor: Tensor, slices: Sequence[slice], kept: Tensor | None) -> None:
        self._sequence += 1
        others = [j for j in range(len(self.ranks)) if j != self._me]
        parts = [tensor[s] if kept is None else tensor.index_select(0, kept[s]) for s in slices]
        found = [torch.empty_like(parts[self._me]) for _ in parts]
        self._post(self._all[0], {j: parts[j] for j in others}, found).wait()
        found[self._me] = parts[self._me]
        mean = mean_of_groups(found)
        parts[self._me].copy_(mean)
        self._post(self._all[1], dict.fromkeys(others, mean), parts).wait()
        if kept is not None:
            for part, s in zip(parts, slices, strict=True):
                tensor.index_copy_(0, kept[s], part)
