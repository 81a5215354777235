"""Routes: for one batch, what this rank asks of every owner and where the answers go.

One stable sort of a batch's keys does everything: equal rows come together (dedup), rows of one
owner come together (bucketing), and its permutation adds the gradients on the way back.

Keys of a stack, ascending::

    owner 0: rows | bags pooled by owner 0    owner 1: rows | bags    ...    copied rows

Each run of equal keys is one *vector*: a row, a bag's partial sum, or a local copy's row. A
vector buffer in key order has one contiguous slice per owner, which is sent or received as is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowmesh.nn.bags import Bags
from rowmesh.nn.kernels import pool, run_starts
from rowmesh.runtime.requests import Request
from rowmesh.runtime.stacks import StackLayout

__all__ = ["Route", "Sum", "route_bags"]

_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Sum:
    """The arguments of `pool` but for its source: which rows of it make up each result."""

    positions: Tensor
    starts: Tensor
    weights: Tensor | None

    @property
    def is_selection(self) -> bool:
        """Each result is one row of the source as it is."""
        return self.weights is None and len(self.positions) == len(self.starts)

    def of(self, source: Tensor) -> Tensor:
        """The sums."""
        return pool(source, self.positions, self.starts, self.weights)

    def kept(self, keep: Tensor) -> "Sum":
        """Only the terms marked in ``keep``."""
        before = torch.zeros(len(keep) + 1, dtype=torch.int32, device=keep.device)
        torch.cumsum(keep, 0, dtype=torch.int32, out=before[1:])
        weights = None if self.weights is None else self.weights[keep]
        return Sum(self.positions[keep], before.index_select(0, self.starts), weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way of one batch through one stack, forth and back.

    Args:
        requests: One per rank.
        vector_bounds: ``[W + 1]`` slices of the vector buffer by owner; copies follow the last.
        copy_bounds: ``[W + 1]`` slices of the copied vectors by sum owner.
        copied_slots: Rows of the copies stack to read.
        forward: Every bag from the vectors.
        backward: Every vector's gradient from the bags'.
    """

    requests: Sequence[Request]
    vector_bounds: Sequence[int]
    copy_bounds: Sequence[int]
    copied_slots: Tensor
    forward: Sum
    backward: Sum

    @property
    def num_vectors(self) -> int:
        """Rows of the vector buffer."""
        return self.copy_bounds[-1]


def route_bags(layout: StackLayout, bags: Bags, *, training: bool) -> Route:
    """The route of ``bags`` (ids checked) through the stack.

    Sum owners are told which copied rows a batch touches only if gradients will follow.
    """
    world, num_bags = len(layout.asked_slots), len(bags.lengths)
    entry, slot = _slots(layout, bags)
    bases = _bases(layout, num_bags)  # of rows and bags by owner, then of copies, then the end
    pooled = layout.is_pooled.index_select(0, bags.reader) if layout.has_pooled else None
    keys = _keys(layout, bags, entry, slot, pooled, bases)
    sorted_keys, order = torch.sort(keys, stable=True)
    starts = _vector_starts(layout, bags, sorted_keys, order)
    vector_keys = sorted_keys.index_select(0, starts)
    edges = torch.tensor(
        [*bases[:-1], *(bases[-2] + b for b in layout.copy_bounds)], device=keys.device
    ).to(keys.dtype)
    cuts = torch.searchsorted(vector_keys, edges).tolist()
    by_region, copy_cuts = cuts[: 2 * world + 1], cuts[2 * world + 1 :]

    first = torch.zeros(len(keys), dtype=torch.int32, device=keys.device)
    first[starts.long()] = 1
    vector_of = torch.cumsum(first, 0, dtype=torch.int32).sub_(1)
    inverse = torch.empty_like(vector_of).scatter_(0, order, vector_of)
    weights = bags.weights
    if weights is not None and pooled is not None:
        weights = torch.where(pooled, 1.0, weights)  # owners apply those of bags they pool
    bag_starts = (torch.cumsum(bags.lengths, 0) - bags.lengths).to(torch.int32)
    forward = Sum(inverse, bag_starts, weights)
    backward = Sum(bags.bag.index_select(0, order), starts, _select(weights, order))
    pooled_ids = None
    if pooled is not None:
        pooled_ids = slot.index_select(0, order)
        if len(starts) < len(keys):  # else every bag has one id, and nothing is left out
            is_first = first.bool()
            pooled_ids = torch.where(is_first, pooled_ids, ~pooled_ids)
            keep = is_first | ~pooled.index_select(0, order)
            backward = backward.kept(keep)
            forward = forward.kept(torch.empty_like(keep).scatter_(0, order, keep))
    requests = _requests(
        layout,
        bases,
        vector_keys,
        by_region,
        copy_cuts,
        sorted_keys,
        pooled_ids,
        _select(bags.weights, order),
    )
    if not (training and layout.trainable):
        requests = [replace(r, copied=r.copied[:0]) for r in requests]
    return Route(
        requests=requests,
        vector_bounds=[by_region[2 * owner] for owner in range(world + 1)],
        copy_bounds=copy_cuts,
        copied_slots=vector_keys[by_region[2 * world] :] - bases[-2],
        forward=forward,
        backward=backward,
    )


def _slots(layout: StackLayout, bags: Bags) -> tuple[Tensor, Tensor]:
    """For every id its (table, virtual shard) entry of the layout, and its slot."""
    first = layout.first_entry.index_select(0, bags.reader)
    if layout.shard_bits is not None:
        shard, row = bags.ids & ((1 << layout.shard_bits) - 1), bags.ids >> layout.shard_bits
    else:
        shards = layout.num_shards.index_select(0, bags.reader)
        shard, row = bags.ids % shards, bags.ids // shards
    entry = first.add_(shard)
    row.mul_(layout.stride.index_select(0, entry))
    return entry, row.add_(layout.slot0.index_select(0, entry))


def _bases(layout: StackLayout, num_bags: int) -> list[int]:
    """First key of each owner's rows and bags, of the copies, and one past the last key."""
    bases, at = [], 0
    for slots in layout.asked_slots:
        bases += [at, at + slots]
        at += slots + (num_bags if layout.has_pooled else 0)
    return [*bases, at, at + layout.copy_bounds[-1]]


def _keys(
    layout: StackLayout,
    bags: Bags,
    entry: Tensor,
    slot: Tensor,
    pooled: Tensor | None,
    bases: Sequence[int],
) -> Tensor:
    base = torch.tensor(bases, device=slot.device)
    owner = layout.owner.index_select(0, entry)
    region, within = 2 * owner, slot
    if pooled is not None:
        region = region + pooled
        within = torch.where(pooled, bags.bag, slot)
    if layout.copied:
        copied = layout.is_copied.index_select(0, bags.reader)
        region = torch.where(copied, len(bases) - 2, region)
    keys = base.index_select(0, region) + within
    return keys.to(torch.int32) if bases[-1] <= _INT32 else keys


def _vector_starts(layout: StackLayout, bags: Bags, keys: Tensor, order: Tensor) -> Tensor:
    """Where vectors begin among the sorted keys; without dedup every id is its own vector."""
    if layout.all_deduped:
        return run_starts(keys)
    once = layout.is_deduped.index_select(0, bags.reader).index_select(0, order)
    number = torch.arange(len(keys), device=keys.device)
    return run_starts(keys, torch.where(once, -1, number))


def _select(values: Tensor | None, order: Tensor) -> Tensor | None:
    return None if values is None else values.index_select(0, order)


def _requests(
    layout: StackLayout,
    bases: Sequence[int],
    vector_keys: Tensor,
    by_region: Sequence[int],
    copy_cuts: Sequence[int],
    sorted_keys: Tensor,
    pooled_ids: Tensor | None,
    weights: Tensor | None,
) -> list[Request]:
    id_cuts = [0] * len(by_region)
    if pooled_ids is not None:
        edges = torch.tensor(bases[:-1], device=sorted_keys.device).to(sorted_keys.dtype)
        id_cuts = torch.searchsorted(sorted_keys, edges).tolist()
        if max(layout.asked_slots) <= _INT32:
            pooled_ids = pooled_ids.to(torch.int32)
    nothing = vector_keys[:0]
    requests = []
    for owner in range(len(layout.asked_slots)):
        rows, bags, end = by_region[2 * owner : 2 * owner + 3]
        ids = slice(*id_cuts[2 * owner + 1 : 2 * owner + 3])
        first_copy = bases[-2] + layout.copy_bounds[owner]
        requests.append(
            Request(
                rows=vector_keys[rows:bags] - bases[2 * owner],
                pooled=nothing if pooled_ids is None else pooled_ids[ids],
                copied=vector_keys[copy_cuts[owner] : copy_cuts[owner + 1]] - first_copy,
                weights=None if weights is None or pooled_ids is None else weights[ids],
                num_pooled=end - bags,
            )
        )
    return requests
