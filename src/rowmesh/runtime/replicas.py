"""Replicas: ranks of different shard groups that hold the same rows, kept together.

How is the plan's `Sync`: gradients are summed over groups before one step; or groups step apart,
and their rows are averaged now and then.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rowmesh.comm.tasks import Task
from rowmesh.nn.kernels import coalesce
from rowmesh.optim.squares import mean_squares
from rowmesh.placement import Sync
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.gradients import RowGradient
from rowmesh.runtime.meeting import Meeting, Rows
from rowmesh.runtime.stacks import StackLayout
from rowmesh.runtime.touched import Touched

__all__ = ["Replicas"]

_DENSE_BYTES = 16 << 20  # of a chunk that is averaged at a time


class Replicas:
    """Keeps the replicas of one engine's rows together.

    Args:
        engine: Of the collection, its optimiser state in place.
        sync: Of the plan.
        adds_squares: Whether the update rule does.
    """

    def __init__(self, engine: ShardedEngine, sync: Sync, *, adds_squares: bool) -> None:
        self._engine, self._sync, self._adds_squares = engine, sync, adds_squares
        apart = [
            i
            for i, s in enumerate(engine.stacks)
            if s.layout.trainable and s.layout.groups.count > 1
        ]
        sizes = dict.fromkeys(engine.stacks[i].layout.groups.size for i in apart)
        self._meetings = [
            Meeting(engine, [i for i in apart if engine.stacks[i].layout.groups.size == size])
            for size in sizes
        ]
        self._touched = {i: Touched(self._tensors(i)) for i in apart} if self._averages else {}
        self._num_steps = 0  # since the last sync
        self.num_syncs = 0
        self._under_way: Task[None] | None = None

    @property
    def _averages(self) -> bool:
        return self._sync.mode != "gradients"

    def _tensors(self, number: int) -> list[Tensor]:
        """What is averaged of a stack; squares summed before every step keep moments alike."""
        stack = self._engine.stacks[number]
        states = stack.home_state.values() if self._sync.mode == "weights" else ()
        return [stack.home, *states]

    def add_gradients(self, parts: Sequence[RowGradient]) -> None:
        """Make the gradients of every group's rows those to step with.

        ``gradients``: their sum over groups, on the rows that any group touched. Otherwise M
        times the group's own: the mean over groups of w - lr M g is w - lr sum g.

        Collective:
            All ranks, after the same backwards.
        """
        for meeting in self._meetings:
            mine = [_Mine(parts, number) for number in meeting.stacks]
            if not any(m.parts for m in mine):
                continue
            count = len(meeting.ranks)
            if self._averages:
                for part in (p for m in mine for p in m.parts):
                    part.grad.mul_(count)
            else:
                found = meeting.exchange([Rows(m.rows, [m.grad]) for m in mine], [_add] * len(mine))
                for m, rows in zip(mine, found, strict=True):
                    m.put(rows.slots, rows.values[0], self._first_copy(m.number))
            for m in mine:
                for part in m.parts:
                    holders = meeting.num_hosts if part.kind == "host" else 1
                    part.own, part.share = slice(None), 1.0 / (count * holders)

    def num_apart(self, part: RowGradient) -> int:
        """How many groups step apart on a gradient's rows, each with a moment of its own."""
        if self._sync.mode != "weights" or part.kind == "copies":
            return 1
        return self._engine.stacks[part.stack].layout.groups.count

    def _first_copy(self, number: int) -> int:
        return self._engine.stacks[number].layout.home_slots[self._engine.mesh.rank]

    def add_squares(
        self, parts: Sequence[RowGradient], squares: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Sum squares over groups before a step, where the plan says so.

        ``moments-first``: v += sum over groups of mean_d(g_m^2) / M^2 with g_m the gradients that
        `add_gradients` scaled, on the rows that any group touched; g_m is 0 where a group did not.

        Returns:
            The squares of each of ``parts``, as they were for rows that are not of groups.

        Collective:
            As `add_gradients`.
        """
        found = list(squares)
        if self._sync.mode != "moments-first" or not self._adds_squares:
            return found
        numbers = {id(part): i for i, part in enumerate(parts)}
        for meeting in self._meetings:
            mine = [_Mine(parts, number) for number in meeting.stacks]
            if not any(m.parts for m in mine):
                continue
            sent = []
            for m in mine:
                given = [(p, squares[numbers[id(p)]]) for p in m.parts]
                own = [mean_squares(p.grad) if s is None else s for p, s in given]
                sent.append(Rows(m.rows, [torch.cat(own).unsqueeze(1)]))
            for m, rows in zip(mine, meeting.exchange(sent, [_add] * len(mine)), strict=True):
                total = rows.values[0].squeeze(1) / len(meeting.ranks) ** 2
                grad = m.grad.new_zeros((len(rows.slots), m.grad.shape[1]))
                grad.index_copy_(0, torch.searchsorted(rows.slots, m.rows), m.grad)
                cuts = m.put(rows.slots, grad, self._first_copy(m.number))
                for part, first, last in cuts:
                    found[numbers[id(part)]] = total[first:last]
        return found

    def remember(self, parts: Sequence[RowGradient]) -> None:
        """Keep what rows are before a step touches them for the first time since a sync."""
        if self._sync.form == "sparse":
            for part in parts:
                if part.stack in self._touched and part.kind != "copies":
                    self._touched[part.stack].add(part.rows)

    def end_step(self) -> None:
        """Count a step; every ``period``-th one begins a sync, which `finish` waits for.

        Collective:
            All ranks.
        """
        if not (self._averages and self._meetings):
            return
        self._num_steps += 1
        if self._num_steps >= self._sync.period:
            self._num_steps = 0
            self.num_syncs += 1
            owner = f"replicas of {self._engine.path}"
            self._under_way = self._engine.mesh.later(
                owner, torch.no_grad()(self._average), of=self._engine.pool
            )

    def finish(self) -> None:
        """Wait for a sync that is under way: before rows are read or written."""
        if self._under_way is not None:
            with self._engine.mesh.trace.phase("replica sync"):
                self._under_way.result()
            self._under_way = None

    def wait(self) -> None:
        """As `finish`, for another thread that is about to read rows."""
        under_way = self._under_way
        if under_way is not None:
            under_way.result()

    @property
    def is_under_way(self) -> bool:
        """Whether a sync is."""
        return self._under_way is not None

    def late_stacks(self, num_steps: int) -> frozenset[int]:
        """Stacks whose rows other groups change before ``num_steps`` more steps are done."""
        if self._averages and self._num_steps + num_steps < self._sync.period:
            return frozenset()
        return frozenset(number for meeting in self._meetings for number in meeting.stacks)

    @torch.no_grad()
    def bring_together(self) -> bool:
        """Sync now, if any step has been made since the last sync; whether it was needed.

        Collective:
            All ranks, between steps.
        """
        self.finish()
        is_needed = self._num_steps > 0
        if is_needed:
            self._num_steps = 0
            self._average()
        return is_needed

    def _average(self) -> None:
        """Weights and optimiser state become the mean over groups."""
        with self._engine.mesh.trace.phase("replica sync"):
            for meeting in self._meetings:
                if self._sync.form == "dense":
                    for number in meeting.stacks:
                        self._average_all(meeting, number)
                else:
                    self._average_touched(meeting)

    def _average_touched(self, meeting: Meeting) -> None:
        touched = [self._touched[number] for number in meeting.stacks]
        found = meeting.exchange([t.now() for t in touched], [t.mean for t in touched])
        for t, rows in zip(touched, found, strict=True):
            t.end(rows)

    def _average_all(self, meeting: Meeting, number: int) -> None:
        """In slices, so that little memory is needed; homes of hot rows are stale and left out."""
        stack = self._engine.stacks[number]
        kept = _without_hot(stack.layout, self._engine.mesh.rank, stack.home)
        for tensor in self._tensors(number):
            meeting.average(tensor, kept, slice_bytes=_DENSE_BYTES)


class _Mine:
    """The gradients of one stack's rows at home, and of its copies for the host behind them."""

    def __init__(self, parts: Sequence[RowGradient], number: int) -> None:
        self.number = number
        mine = {p.kind: p for p in parts if p.stack == number}
        self.parts = [mine[kind] for kind in ("home", "host") if kind in mine]
        if self.parts:
            rows, grads = [p.rows.long() for p in self.parts], [p.grad for p in self.parts]
            self.rows, self.grad = (torch.cat(t) if len(t) > 1 else t[0] for t in (rows, grads))

    def put(
        self, slots: Tensor, grad: Tensor, first_copy: int
    ) -> list[tuple[RowGradient, int, int]]:
        """Give each gradient its rows of these; returns which they are."""
        edge = torch.tensor(first_copy, device=slots.device)
        cut = int(torch.searchsorted(slots, edge))
        bounds = [(0, cut), (cut, len(slots))]
        for part, (first, last) in zip(self.parts, bounds, strict=False):
            part.rows, part.grad = slots[first:last], grad[first:last]
        return [(p, *b) for p, b in zip(self.parts, bounds, strict=False)]


def _add(brought: Sequence[Rows]) -> Rows:
    """Sums over groups, in their order."""
    slots = torch.cat([rows.slots for rows in brought])
    found, sums = coalesce(slots, torch.cat([rows.values[0] for rows in brought]))
    return Rows(found, [sums])


def _without_hot(layout: StackLayout, rank: int, home: Tensor) -> Tensor | None:
    """The slots of a home stack that are not homes of hot rows; None for all."""
    stale = [r.home_slots() for r in (*layout.hot, *layout.host_copies) if r.rank == rank]
    if not stale:
        return None
    keep = torch.ones(len(home), dtype=torch.bool, device=home.device)
    keep[torch.from_numpy(np.concatenate(stale)).to(home.device)] = False
    return keep.nonzero().squeeze(1)
