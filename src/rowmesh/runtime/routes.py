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
from rowmesh.nn.kernels import run_starts
from rowmesh.runtime.requests import Request
from rowmesh.runtime.stacks import StackLayout

__all__ = ["Route", "route_bags"]

_INT32 = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way of one batch through one stack, forth and back.

    Args:
        requests: One per rank.
        vector_bounds: ``[W + 1]`` slices of the vector buffer by owner; copies follow the last.
        copy_bounds: ``[W + 1]`` slices of the copied vectors by sum owner.
        copied_slots: Rows of the copies stack to read.
        positions: Vectors of every bag, bag after bag; ``starts`` where each bag begins.
        weights: Of ``positions``, or None.
        grad_bags: Bags whose gradients make up each vector's, vector after vector;
            ``grad_starts`` where each vector begins, ``grad_weights`` their weights or None.
    """

    requests: Sequence[Request]
    vector_bounds: Sequence[int]
    copy_bounds: Sequence[int]
    copied_slots: Tensor
    positions: Tensor
    starts: Tensor
    weights: Tensor | None
    grad_bags: Tensor
    grad_starts: Tensor
    grad_weights: Tensor | None

    @property
    def num_vectors(self) -> int:
        """Rows of the vector buffer."""
        return self.copy_bounds[-1]


def route_bags(layout: StackLayout, bags: Bags, *, training: bool) -> Route:
    """The route of ``bags`` (ids checked) through the stack.

    Sum owners are told which copied rows a batch touches only if gradients will follow.
    """
    world, num_bags = len(layout.home_slots), len(bags.lengths)
    shards = layout.num_shards.index_select(0, bags.reader)
    entry = layout.first_entry.index_select(0, bags.reader) + bags.ids % shards
    slot = layout.slot0.index_select(0, entry)
    slot += (bags.ids // shards) * layout.stride.index_select(0, entry)
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

    inverse = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    lengths = torch.diff(starts, append=starts.new_tensor([len(keys)]))
    vector_of = torch.repeat_interleave(
        torch.arange(len(starts), dtype=torch.int32, device=keys.device),
        lengths,
        output_size=len(keys),
    )
    inverse[order] = vector_of
    bag_of = bags.bag.index_select(0, order)
    weights = bags.weights
    sorted_weights = None if weights is None else weights.index_select(0, order)
    bag_starts = (torch.cumsum(bags.lengths, 0) - bags.lengths).to(torch.int32)
    route_starts, grad_starts = bag_starts, starts
    if pooled is None:
        positions, grad_bags = inverse, bag_of
        grad_weights = sorted_weights
        pooled_ids = None
    else:
        first = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
        first[starts.long()] = True
        pooled_ids = slot.index_select(0, order)
        pooled_ids = torch.where(first, pooled_ids, ~pooled_ids)
        by_owner = pooled.index_select(0, order)
        keep_sorted = first | ~by_owner
        keep = torch.empty_like(keep_sorted)
        keep[order] = keep_sorted
        positions, grad_bags = inverse[keep], bag_of[keep_sorted]
        route_starts = _kept_before(keep, bag_starts)
        grad_starts = _kept_before(keep_sorted, starts)
        grad_weights = None
        if weights is not None and sorted_weights is not None:
            grad_weights = torch.where(by_owner, 1.0, sorted_weights)[keep_sorted]
            weights = torch.where(pooled, 1.0, weights)[keep]
    requests = _requests(
        layout, bases, vector_keys, by_region, copy_cuts, sorted_keys, pooled_ids, sorted_weights
    )
    if not (training and layout.trainable):
        requests = [replace(r, copied=r.copied[:0]) for r in requests]
    return Route(
        requests=requests,
        vector_bounds=[by_region[2 * owner] for owner in range(world + 1)],
        copy_bounds=copy_cuts,
        copied_slots=vector_keys[by_region[2 * world] :] - bases[-2],
        positions=positions,
        starts=route_starts,
        weights=weights,
        grad_bags=grad_bags,
        grad_starts=grad_starts,
        grad_weights=grad_weights,
    )


def _bases(layout: StackLayout, num_bags: int) -> list[int]:
    """First key of each owner's rows and bags, of the copies, and one past the last key."""
    bases, at = [], 0
    for slots in layout.home_slots:
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
    if bool(layout.is_deduped.all()):
        return run_starts(keys)
    once = layout.is_deduped.index_select(0, bags.reader).index_select(0, order)
    number = torch.arange(len(keys), device=keys.device)
    return run_starts(keys, torch.where(once, -1, number))


def _kept_before(keep: Tensor, at: Tensor) -> Tensor:
    """How many entries are kept before each position of ``at``."""
    before = torch.zeros(len(keep) + 1, dtype=torch.int32, device=keep.device)
    torch.cumsum(keep, 0, dtype=torch.int32, out=before[1:])
    return before.index_select(0, at)


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
        if max(layout.home_slots) <= _INT32:
            pooled_ids = pooled_ids.to(torch.int32)
    nothing = vector_keys[:0]
    requests = []
    for owner in range(len(layout.home_slots)):
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
