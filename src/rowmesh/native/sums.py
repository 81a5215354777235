"""Sums of rows that occur several times."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.native.library import is_wide, library, pointer, takes
from rowmesh.native.runs import stable_sort

__all__ = ["coalesce"]

_FLOAT, _MOST_LABELS = (torch.float32,), 100


def coalesce(
    rows: Tensor,
    values: Tensor,
    *,
    index: Tensor | None,
    weights: Tensor | None,
    labels: Sequence[Tensor],
) -> tuple[Tensor, Tensor] | None:
    """`rowmesh.nn.kernels.coalesce`."""
    lib = library()
    if lib is None or not takes(rows, index) or len(labels) > _MOST_LABELS:
        return None
    if not takes(values, weights, dtypes=_FLOAT) or not takes(*labels):
        return None
    num, sizes = len(rows), {len(t) for t in (index, weights, *labels) if t is not None}
    in_order = stable_sort(rows)
    if in_order is None or not sizes <= {num} or (index is None and num > len(values)):
        return None
    rows, order = in_order
    marks, levels = _levels(rows, order, labels, is_weighted=weights is not None)
    index = None if index is None else index.to(torch.int32)
    chosen = (ctypes.c_int32 * len(levels))(*(level for level, _ in levels))
    num_rows, dim = levels[-1][1] if levels else num, values.shape[1]
    found, sums = rows.new_empty(num_rows), values.new_empty((num_rows, dim))
    partial = values.new_empty((len(levels), dim))
    done = lib.rm_add_tree(
        *(num, pointer(rows), is_wide(rows), pointer(order), pointer(index), pointer(weights)),
        *(len(values), pointer(values), dim, pointer(marks), len(levels), chosen),
        *(pointer(partial), pointer(found), pointer(sums)),
    )
    return (found, sums) if done == 0 else None


def _levels(
    rows: Tensor, order: Tensor, labels: Sequence[Tensor], *, is_weighted: bool
) -> tuple[Tensor, list[tuple[int, int]]]:
    """How far node boundaries reach, and the levels that add something with their nodes.

    A level at which every node has one part is left out: x is then not 0 + x, which matters to -0.
    """
    lib = library()
    assert lib is not None
    wide = any(is_wide(label) for label in labels)
    labels = [label.long() for label in labels] if wide else labels
    pointers = (ctypes.c_void_p * len(labels))(*(label.data_ptr() for label in labels))
    marks = torch.empty(len(rows), dtype=torch.uint8)
    nodes = (ctypes.c_int64 * (len(labels) + 1))()
    lib.rm_mark_tree(
        *(len(rows), pointer(rows), is_wide(rows), pointer(order)),
        *(len(labels), wide, pointers, pointer(marks), nodes),
    )
    parts = len(rows)
    levels: list[tuple[int, int]] = []
    for level, count in enumerate(nodes):
        if count != parts or (is_weighted and not levels):
            levels.append((level, count))
            parts = count
    return marks, levels
