"""Decoded rows, column by column, and the batch that some of them make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rowmesh.features import Batch, KeyedJaggedTensor

__all__ = ["Layout", "Piece", "Rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which features a row has: ``features`` in order, ``lists`` those with several ids."""

    num_dense: int
    features: tuple[str, ...]
    lists: tuple[str, ...]
    id_type: type[np.int32] | type[np.int64]

    @property
    def singles(self) -> tuple[str, ...]:
        """Features of at most one id a row."""
        return tuple(name for name in self.features if name not in self.lists)

    def empty(self) -> "Rows":
        """No rows."""
        none = np.empty(0, dtype=self.id_type)
        return Rows(
            labels=np.empty(0, dtype=np.float32),
            dense=np.empty((self.num_dense, 0), dtype=np.float32),
            singles=np.empty((len(self.singles), 0), dtype=self.id_type),
            values=[none] * len(self.lists),
            offsets=[np.zeros(1, dtype=np.int64)] * len(self.lists),
        )


class Piece(NamedTuple):
    """Rows ``[first, last)`` of some."""

    rows: "Rows"
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """n rows: column-major, since a batch is key-major and Parquet is columnar.

    Args:
        labels: ``[n]``.
        dense: ``[dense columns, n]``.
        singles: ``[single features, n]`` ids, -1 where there is none.
        values, offsets: Of each list feature; row i has ``values[offsets[i]:offsets[i + 1]]``.
    """

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    singles: npt.NDArray[Any]
    values: list[npt.NDArray[Any]]
    offsets: list[npt.NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: npt.NDArray[np.int64]) -> "Rows":
        """The rows ``index``, in that order, copied."""
        values, offsets = [], []
        for ids, ends in zip(self.values, self.offsets, strict=True):
            lengths = np.diff(ends)[index]
            new = np.concatenate(([0], np.cumsum(lengths)))
            place = np.arange(new[-1]) + np.repeat(ends[index] - new[:-1], lengths)
            values.append(ids[place])
            offsets.append(new)
        return Rows(
            labels=self.labels[index],
            dense=np.take(self.dense, index, axis=1),
            singles=np.take(self.singles, index, axis=1),
            values=values,
            offsets=offsets,
        )

    @staticmethod
    def to_batch(pieces: Sequence[Piece], layout: Layout) -> Batch:
        """Rows ``[first, last)`` of each piece, one after the other; no pieces, no samples."""
        pieces = pieces or [Piece(layout.empty(), 0, 0)]
        labels = np.concatenate([p.rows.labels[p.first : p.last] for p in pieces])
        dense = np.concatenate([p.rows.dense[:, p.first : p.last] for p in pieces], axis=1)
        singles = np.concatenate([p.rows.singles[:, p.first : p.last] for p in pieces], axis=1)
        valid = singles >= 0
        values, lengths = singles[valid], valid.astype(np.int32)
        if layout.lists:
            values, lengths = _with_lists(pieces, layout, values, lengths)
        return Batch(
            dense_features=torch.from_numpy(np.ascontiguousarray(dense.T)),
            sparse_features=KeyedJaggedTensor(
                layout.features,
                torch.from_numpy(values.astype(np.int64, copy=False)),
                lengths=torch.from_numpy(lengths.reshape(-1)),
                stride=len(labels),
            ),
            labels=torch.from_numpy(labels),
        )


def _with_lists(
    pieces: Sequence[Piece],
    layout: Layout,
    values: npt.NDArray[Any],
    lengths: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Key-major values and lengths of all features, from those of the single ones."""
    ends = np.concatenate(([0], np.cumsum(lengths.sum(axis=1))))
    found = {
        name: (values[ends[f] : ends[f + 1]], lengths[f]) for f, name in enumerate(layout.singles)
    }
    for f, name in enumerate(layout.lists):
        bounds = [p.rows.offsets[f][p.first : p.last + 1] for p in pieces]
        ids = [p.rows.values[f][b[0] : b[-1]] for p, b in zip(pieces, bounds, strict=True)]
        bags = np.concatenate([np.diff(b) for b in bounds]).astype(np.int32)
        found[name] = np.concatenate(ids), bags
    parts = [found[name] for name in layout.features]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([bags for _, bags in parts])
