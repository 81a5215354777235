"""Routes: for one batch, what this rank asks of every owner and where the answers go.

One stable sort of a batch's keys does everything: equal rows come together (dedup), rows of one
owner come together (bucketing), and its permutation adds the gradients on the way back.

Keys of a stack, ascending::

    owner 0: rows | bags pooled by owner 0    owner 1: rows | bags    ...    copied rows

Each run of equal keys is one *vector*: a row, a bag's partial sum, or a local copy's row. A
vector buffer in key order has one contiguous slice per owner, which is sent or received as is.
Hot rows are sorted by the keys of their homes, found among the distinct keys, and get the keys of
their copies: a local copy's, or one of a rank of this host, whose copies lie behind its home rows.
Their vectors move there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowmesh import native
from rowmesh.nn.bags import Bags
from rowmesh.nn.kernels import pool, run_numbers, run_starts, stable_sort
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
        found = native.keep_terms(keep, self.positions, self.starts, self.weights)
        if found is not None:
            return Sum(*found)
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
        host_starts: ``[W]`` where in these slices the rows begin that are copied per host.
        copy_bounds: ``[W + 1]`` slices of the copied vectors by sum owner; those with dense sums
            follow the last.
        copied_slots: Rows of the copies stack to read.
        forward: Every bag from the vectors.
        backward: Every vector's gradient from the bags'.
    """

    requests: Sequence[Request]
    vector_bounds: Sequence[int]
    host_starts: Sequence[int]
    copy_bounds: Sequence[int]
    copied_slots: Tensor
    forward: Sum
    backward: Sum

    @property
    def num_vectors(self) -> int:
        """Rows of the vector buffer."""
        return self.vector_bounds[-1] + len(self.copied_slots)

    @property
    def dense_slots(self) -> Tensor:
        """Rows of the copies stack whose sums are dense: of the vectors after `copy_bounds`."""
        return self.copied_slots[self.copy_bounds[-1] - self.vector_bounds[-1] :]


def route_bags(layout: StackLayout, bags: Bags, *, training: bool) -> Route:
    """The route of ``bags`` (ids checked) through the stack.

    Sum owners are told which copied rows a batch touches only if gradients will follow.
    """
    world, num_bags = len(layout.asked_slots), len(bags.lengths)
    bases = _bases(layout, num_bags)  # of rows and bags by owner, then of copies, then the end
    keys, slot = _places(layout, bags, bases)
    vector_keys, order, starts = _vectors(layout, bags, keys, first_copy=bases[-2])
    edges = [*bases[:-1], *(bases[-2] + b for b in layout.copy_bounds)]
    if layout.host_copies:
        edges += [bases[2 * p] + slots for p, slots in enumerate(layout.asked_homes)]
    edge_keys = torch.tensor(edges, device=keys.device).to(keys.dtype)
    cuts = torch.searchsorted(vector_keys, edge_keys).tolist()
    by_region, copy_cuts = cuts[: 2 * world + 1], cuts[2 * world + 1 : 3 * world + 2]
    vector_bounds = by_region[::2]

    weights = bags.weights
    if weights is not None and layout.has_pooled:  # owners apply those of bags they pool
        weights = torch.where(layout.is_pooled.index_select(0, bags.reader), 1.0, weights)
    bag_starts = (torch.cumsum(bags.lengths, 0) - bags.lengths).to(torch.int32)
    forward = Sum(run_numbers(order, starts), bag_starts, weights)
    terms = Sum(order, starts, None)  # of the gradients, as ids
    pooled_ids = None
    if slot is not None and len(starts) == len(keys):
        pooled_ids = slot.index_select(0, order)  # every bag has one id, and nothing is left out
    elif slot is not None:
        pooled_ids, keep, keep_id = _mark_pooled(layout, bags, slot, order, starts)
        terms, forward = terms.kept(keep), forward.kept(keep_id)
    ids = terms.positions
    backward = Sum(bags.bag.index_select(0, ids), terms.starts, _select(weights, ids))
    requests = _requests(
        layout,
        bases,
        vector_keys,
        by_region,
        copy_cuts,
        starts,
        pooled_ids,
        _select(bags.weights, order),
    )
    if not (training and layout.trainable):
        requests = [replace(r, copied=r.copied[:0]) for r in requests]
    return Route(
        requests=requests,
        vector_bounds=vector_bounds,
        host_starts=cuts[3 * world + 2 :] or vector_bounds[1:],
        copy_bounds=copy_cuts,
        copied_slots=vector_keys[by_region[2 * world] :] - bases[-2],
        forward=forward,
        backward=backward,
    )


def _places(layout: StackLayout, bags: Bags, bases: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """For every id its key and, where owners pool, its slot."""
    wide = [n > _INT32 for n in (bases[-1], max(layout.asked_slots))]
    dtype, slot_dtype = (torch.int64 if w else torch.int32 for w in wide)
    found = native.make_keys(
        bags.ids,
        bags.reader,
        bags.bag,
        entries=(
            *(layout.first_entry, layout.num_shards),
            *(layout.owner, layout.slot0, layout.stride),
        ),
        flags=(
            layout.is_copied if layout.copied else None,
            layout.is_pooled if layout.has_pooled else None,
        ),
        shard_bits=layout.shard_bits,
        bases=bases,
        dtype=dtype,
        slot_dtype=slot_dtype if layout.has_pooled else None,
    )
    if found is not None:
        return found
    entry, slot = _slots(layout, bags)
    pooled = layout.is_pooled.index_select(0, bags.reader) if layout.has_pooled else None
    keys = _keys(layout, bags, entry, slot, pooled, bases)
    return keys, slot if layout.has_pooled else None


def _mark_pooled(
    layout: StackLayout, bags: Bags, slot: Tensor, order: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For bags that owners pool: slots in sorted order, complemented unless first of a vector.

    Then which ids the sums keep as terms, of such a bag only the first: in sorted order, and in
    that of ids.
    """
    found = native.mark_pooled(order, starts, slot, bags.reader, layout.is_pooled)
    if found is not None:
        return found
    is_first = torch.zeros(len(order), dtype=torch.bool, device=order.device)
    is_first[starts.long()] = True
    marked = slot.index_select(0, order)
    marked = torch.where(is_first, marked, ~marked)
    keep = is_first | ~layout.is_pooled.index_select(0, bags.reader).index_select(0, order)
    return marked, keep, torch.empty_like(keep).scatter_(0, order.long(), keep)


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
    return [*bases, at, at + layout.num_copies]


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


def _vectors(
    layout: StackLayout, bags: Bags, keys: Tensor, *, first_copy: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The key of every vector, ascending; the ids in their order; where each vector's begin."""
    keys, order = stable_sort(keys)
    if not len(layout.hot_keys):
        starts = _starts(layout, bags, keys, order, None)
        return keys.index_select(0, starts), order, starts
    runs = run_starts(keys)
    distinct = keys.index_select(0, runs)
    run, copy_keys = _find_hot(layout, distinct, len(bags.lengths))
    hot = torch.zeros(len(distinct), dtype=torch.bool, device=keys.device)
    hot[run] = True
    distinct[run] = copy_keys.to(keys.dtype)
    if layout.all_deduped:
        starts, vector_keys = runs, distinct
    else:
        ends = torch.cat([runs[1:], runs.new_tensor([len(keys)])])
        of_run = torch.repeat_interleave(ends - runs, output_size=len(keys))
        starts = _starts(layout, bags, keys, order, hot.index_select(0, of_run))
        vector_keys = distinct.index_select(0, of_run.index_select(0, starts))
    if not len(run):
        return vector_keys, order, starts
    if layout.host_copies:
        place = torch.argsort(vector_keys, stable=True)
    else:
        place = _copies_last(vector_keys, first_copy, in_order=layout.hot_in_order)
    return _move(vector_keys, order, starts, place)


def _starts(
    layout: StackLayout, bags: Bags, keys: Tensor, order: Tensor, hot: Tensor | None
) -> Tensor:
    """Where vectors begin among the sorted keys; without dedup every cold id is its own vector."""
    if layout.all_deduped:
        return run_starts(keys)
    once = layout.is_deduped.index_select(0, bags.reader).index_select(0, order)
    if hot is not None:
        once = once | hot
    number = torch.arange(len(keys), device=keys.device)
    return run_starts(keys, torch.where(once, -1, number))


def _find_hot(layout: StackLayout, distinct: Tensor, num_bags: int) -> tuple[Tensor, Tensor]:
    """Which of the distinct keys, ascending, are of hot rows, and the keys of their copies."""
    keys, copy_keys = layout.hot_keys, layout.copy_keys
    if layout.has_pooled:
        keys = keys + num_bags * layout.hot_ranks
        copy_keys = copy_keys + num_bags * layout.copy_ranks
    keys = keys.to(distinct.dtype)
    few, many = (keys, distinct) if len(keys) < len(distinct) else (distinct, keys)
    if not len(few):
        none = torch.empty(0, dtype=torch.int64, device=few.device)
        return none, none
    place = torch.searchsorted(many, few).clamp_(max=len(many) - 1)
    mine = (many.index_select(0, place) == few).nonzero().squeeze(1)
    place = place.index_select(0, mine)
    run, number = (place, mine) if few is keys else (mine, place)
    return run, copy_keys.index_select(0, number)


def _copies_last(vector_keys: Tensor, first_copy: int, *, in_order: bool) -> Tensor:
    """The order of vector keys that ascend but for those of copies."""
    is_copy = vector_keys >= first_copy
    cold, copies = ((~is_copy).nonzero().squeeze(1), is_copy.nonzero().squeeze(1))
    if not in_order:
        copies = copies.index_select(0, torch.argsort(vector_keys.index_select(0, copies)))
    return torch.cat([cold, copies])


def _move(
    vector_keys: Tensor, order: Tensor, starts: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, and the ids of each, vector ``place[i]`` as the i-th."""
    moved = native.move_runs(order, starts, place)
    if moved is not None:
        return vector_keys.index_select(0, place), *moved
    old = starts.index_select(0, place)
    lengths = torch.diff(starts, append=starts.new_tensor([len(order)])).index_select(0, place)
    new = torch.cumsum(lengths, 0, dtype=starts.dtype).sub_(lengths)
    shift = torch.repeat_interleave(old - new, lengths, output_size=len(order))
    ids = shift + torch.arange(len(order), dtype=starts.dtype, device=starts.device)
    return vector_keys.index_select(0, place), order.index_select(0, ids), new


def _select(values: Tensor | None, order: Tensor) -> Tensor | None:
    return None if values is None else values.index_select(0, order)


def _requests(
    layout: StackLayout,
    bases: Sequence[int],
    vector_keys: Tensor,
    by_region: Sequence[int],
    copy_cuts: Sequence[int],
    starts: Tensor,
    pooled_ids: Tensor | None,
    weights: Tensor | None,
) -> list[Request]:
    id_cuts = [0] * len(by_region)
    if pooled_ids is not None:
        cuts = torch.tensor(by_region, device=starts.device)
        ends = torch.cat([starts, starts.new_tensor([len(pooled_ids)])])
        id_cuts = ends.index_select(0, cuts).tolist()
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
