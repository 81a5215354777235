"""The three sums everything is made of: pool a bag, add runs of equal keys, coalesce rows.

Each adds in the order given, from zero, in fp32; the runtime and the oracle both call these,
which is why they agree to the bit. See docs/exactness.md. Compiled code does the same where it is
there (`rowmesh.native`).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rowmesh import native

__all__ = ["coalesce", "pool", "run_numbers", "run_starts", "stable_sort"]


def pool(
    source: Tensor, positions: Tensor, starts: Tensor, weights: Tensor | None = None
) -> Tensor:
    """``out[b] = sum of weights[i] * source[positions[i]]``, i from starts[b] to starts[b + 1].

    Each product is rounded to fp32 before it is added.

    Args:
        source: ``[n, D]``; low precision is widened before the sum.
        positions: ``[m]`` int32 (faster) or int64 rows of ``source``.
        starts: ``[bags]`` of the same dtype: where each bag begins; the last ends at m.
        weights: ``[m]`` fp32, or None for 1.

    Returns:
        ``[bags, D]`` fp32; zeros for an empty bag.
    """
    if len(starts) == 0 or len(positions) == 0:
        return source.new_zeros((len(starts), source.shape[1]), dtype=torch.float32)
    if source.dtype != torch.float32 or weights is not None:
        source = source.index_select(0, positions).float()
        positions = torch.arange(len(source), dtype=positions.dtype, device=source.device)
        if weights is not None:
            # Rounded before the sum: torch's fused form would keep more bits than a product
            # that has travelled, and plans that send products would differ from those that don't.
            source *= weights.unsqueeze(1)
    return F.embedding_bag(positions, source, starts, mode="sum")


def stable_sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """``keys`` ascending, equal ones in the order given; and, in int32, where each was."""
    found = native.stable_sort(keys)
    if found is not None:
        return found
    keys, order = torch.sort(keys, stable=True)
    return keys, order.to(torch.int32)


def run_numbers(order: Tensor, starts: Tensor) -> Tensor:
    """Of every key, before `stable_sort`, the number of its run: ``[n]`` int32.

    Args:
        order: Where each sorted key was.
        starts: Where runs begin among the sorted keys.
    """
    found = native.run_numbers(order, starts)
    if found is not None:
        return found
    first = torch.zeros_like(order)
    first[starts.long()] = 1
    number = torch.cumsum(first, 0, dtype=torch.int32).sub_(1)
    return torch.empty_like(number).scatter_(0, order.long(), number)


def run_starts(*keys: Tensor) -> Tensor:
    """Where a new run begins in sorted ``keys``: positions at which any of them changes."""
    found = native.run_starts(keys[0]) if len(keys) == 1 else None
    if found is not None:
        return found
    first = torch.ones_like(keys[0], dtype=torch.bool)
    if len(first):
        changed = first[1:]
        torch.ne(keys[0][1:], keys[0][:-1], out=changed)
        for key in keys[1:]:
            changed |= key[1:] != key[:-1]
    return first.nonzero().squeeze(1).to(torch.int32)


def coalesce(
    rows: Tensor,
    values: Tensor,
    *,
    index: Tensor | None = None,
    weights: Tensor | None = None,
    labels: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Add the values of each row, in a tree: equal first label, then equal second, ..., then all.

    Occurrence i brings ``weights[i] * values[index[i]]`` to row ``rows[i]``. Within a node of
    the tree occurrences are added in the order given; the labels of a row must come in runs.

    Args:
        rows: ``[n]`` row of each occurrence, in any order.
        values: ``[m, D]`` fp32.
        index: ``[n]`` row of ``values`` for each occurrence; None for 0 .. n - 1.
        weights: ``[n]`` fp32, or None for 1.
        labels: Each ``[n]``, finest first: e.g. the rank an occurrence came from.

    Returns:
        The distinct rows, ascending, and their sums ``[distinct, D]``.
    """
    found = native.coalesce(rows, values, index=index, weights=weights, labels=labels)
    if found is not None:
        return found
    rows, order = torch.sort(rows, stable=True)
    labels = [label.index_select(0, order) for label in labels]
    position = (order if index is None else index.index_select(0, order)).to(torch.int32)
    if weights is not None:
        weights = weights.index_select(0, order)
    is_added = False
    for level in range(len(labels) + 1):
        starts = run_starts(rows, *labels[level:])
        if len(starts) == len(rows) and weights is None:
            continue  # nothing to add at this level
        values, is_added = pool(values, position, starts, weights), True
        position = torch.arange(len(starts), dtype=torch.int32, device=values.device)
        rows, weights = rows.index_select(0, starts), None
        labels = [label.index_select(0, starts) for label in labels]
    return rows, values if is_added else values.index_select(0, position)
