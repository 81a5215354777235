"""Sorted keys and their runs: positions are int32."""

import torch
from torch import Tensor

from rowmesh.native.library import is_wide, library, pointer, takes

__all__ = [
    "keep_terms",
    "mark_pooled",
    "move_runs",
    "run_numbers",
    "run_starts",
    "stable_sort",
]

_SMALL, _FLOAT, _BOOL = (torch.int32,), (torch.float32,), (torch.bool,)


def stable_sort(keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """``keys`` ascending, and where each was; None also for negative keys."""
    lib = library()
    if lib is None or not takes(keys) or keys.dim() != 1:
        return None
    found, order = torch.empty_like(keys), torch.empty(len(keys), dtype=torch.int32)
    done = lib.rm_sort(len(keys), pointer(keys), is_wide(keys), pointer(found), pointer(order))
    return (found, order) if done == 0 else None


def run_starts(keys: Tensor) -> Tensor | None:
    """Where runs of equal keys begin."""
    lib = library()
    if lib is None or not takes(keys):
        return None
    starts = torch.empty(len(keys), dtype=torch.int32)
    count = lib.rm_run_starts(len(keys), pointer(keys), is_wide(keys), pointer(starts))
    return starts[:count]


def run_numbers(order: Tensor, starts: Tensor) -> Tensor | None:
    """The run of every entry, in the order before it was sorted."""
    lib = library()
    if lib is None or not takes(order, starts, dtypes=_SMALL):
        return None
    out = torch.empty_like(order)
    lib.rm_run_numbers(len(order), pointer(order), len(starts), pointer(starts), pointer(out))
    return out


def move_runs(order: Tensor, starts: Tensor, place: Tensor) -> tuple[Tensor, Tensor] | None:
    """The order and the starts of runs when run ``place[i]`` becomes the i-th."""
    lib = library()
    if lib is None or not takes(order, starts, dtypes=_SMALL):
        return None
    if not takes(place, dtypes=(torch.int64,)) or len(place) != len(starts):
        return None
    moved, begins = torch.empty_like(order), torch.empty_like(starts)
    old = (len(order), pointer(order), len(starts), pointer(starts))
    lib.rm_move_runs(*old, pointer(place), pointer(moved), pointer(begins))
    return moved, begins


def mark_pooled(
    order: Tensor, starts: Tensor, slots: Tensor, reader: Tensor, is_pooled: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Slots in sorted order, complemented unless first of a run; which ids stay terms of sums, in
    sorted order and in the ids' own."""
    lib = library()
    if lib is None or not takes(order, starts, reader, dtypes=_SMALL):
        return None
    if not takes(slots) or not takes(is_pooled, dtypes=_BOOL):
        return None
    marked = torch.empty_like(slots)
    keep, keep_id = (torch.empty(len(order), dtype=torch.bool) for _ in range(2))
    lib.rm_mark_pooled(
        *(len(order), pointer(order), len(starts), pointer(starts)),
        *(pointer(reader), pointer(is_pooled), pointer(slots), is_wide(slots)),
        *(pointer(marked), pointer(keep), pointer(keep_id)),
    )
    return marked, keep, keep_id


def keep_terms(
    keep: Tensor, positions: Tensor, starts: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Positions, starts and weights of sums without the terms that ``keep`` does not mark."""
    lib = library()
    if lib is None or not takes(positions, starts, dtypes=_SMALL):
        return None
    if not takes(keep, dtypes=_BOOL) or not takes(weights, dtypes=_FLOAT):
        return None
    kept, begins = torch.empty_like(positions), torch.empty_like(starts)
    kept_weights = None if weights is None else torch.empty_like(weights)
    count = lib.rm_keep_terms(
        *(len(keep), pointer(keep), pointer(positions), pointer(weights)),
        *(len(starts), pointer(starts)),
        *(pointer(kept), pointer(kept_weights), pointer(begins)),
    )
    return kept[:count], begins, None if kept_weights is None else kept_weights[:count]
