"""From a stack's vectors to a reader's: the columns of split tables put together again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn.bags import Reader
from rowmesh.nn.collections import Piece
from rowmesh.runtime.stacks import StackLayout

__all__ = ["join_columns"]


def join_columns(
    layouts: Sequence[StackLayout],
    vectors: Sequence[Tensor],
    features: KeyedJaggedTensor,
    readers: Sequence[Reader],
    *,
    pooled: bool,
) -> list[Piece]:
    """Every reader's vectors with all columns of its table.

    Args:
        layouts: Of the stacks.
        vectors: Of each stack, one per bag: sample-major if pooled, else reader-major.
        features: What was looked up.
        readers: Of the collection.
        pooled: Bags, or sequences.
    """
    whole: list[Piece] = []
    parts: dict[int, list[tuple[int, Tensor]]] = {}
    for layout, found in zip(layouts, vectors, strict=True):
        members = tuple(dict.fromkeys(layout.readers))
        if len(members) * layout.table_dim == len(layout.readers) * layout.dim and pooled:
            # a reader's pieces lie side by side: [B, readers, pieces, dim] as it is
            whole.append((members, found.view(-1, layout.table_dim)))
        elif layout.dim == layout.table_dim:
            whole.append((members, found))
        else:
            pieces = _by_reader(layout, found, features, readers, pooled)
            for reader, columns, piece in zip(layout.readers, layout.columns, pieces, strict=True):
                parts.setdefault(reader, []).append((columns[0], piece))
    for reader, found_parts in parts.items():
        found_parts.sort(key=lambda part: part[0])
        whole.append(((reader,), torch.cat([part for _, part in found_parts], dim=1)))
    return whole


def _by_reader(
    layout: StackLayout,
    vectors: Tensor,
    features: KeyedJaggedTensor,
    readers: Sequence[Reader],
    pooled: bool,
) -> list[Tensor]:
    """The vectors of each of the stack's readers."""
    if pooled:
        by_sample = vectors.view(features.stride(), len(layout.readers), layout.dim)
        return [by_sample[:, r] for r in range(len(layout.readers))]
    keys, totals = features.index_per_key(), features.length_per_key()
    return list(torch.split(vectors, [totals[keys[readers[r].feature]] for r in layout.readers]))
