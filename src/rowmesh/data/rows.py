"""Decoded rows and the batches that some of them make."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rowmesh.features import Batch, KeyedJaggedTensor

__all__ = ["Bags", "Layout", "Piece", "Rows"]


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
        bags = Bags(np.empty(0, dtype=self.id_type), np.zeros(1, dtype=np.int64))
        return Rows(
            labels=np.empty(0, dtype=np.float32),
            dense=np.empty((0, self.num_dense), dtype=np.float32),
            singles=np.empty((len(self.singles), 0), dtype=self.id_type),
            bags=[bags] * len(self.lists),
        )


class Piece(NamedTuple):
    """Rows ``[first, last)`` of some."""

    rows: "Rows"
    first: int
    last: int


class Bags(NamedTuple):
    """A list feature: row i has ``values[offsets[i]:offsets[i + 1]]``."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    def take(self, index: npt.NDArray[np.int64]) -> "Bags":
        """Those of the rows ``index``, in that order, copied."""
        lengths = np.diff(self.offsets)[index]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], lengths)
        return Bags(self.values[place], offsets)

    def part(self, first: int, last: int) -> "Bags":
        """Those of rows ``[first, last)``, not copied; offsets do not begin at 0."""
        offsets = self.offsets[first : last + 1]
        return Bags(self.values[offsets[0] : offsets[-1]], offsets)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """n rows: dense numbers row by row and ids column by column, as they are in a batch.

    Args:
        labels: ``[n]``.
        dense: ``[n, dense columns]``.
        singles: ``[single features, n]`` ids, -1 where there is none.
        bags: Of each list feature.
    """

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    singles: npt.NDArray[Any]
    bags: list[Bags]

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def to_batches(
        pieces: Sequence[Piece], layout: Layout, *, steps: int = 1, run: int = 0
    ) -> Iterator[Batch]:
        """Batches of the rows of all pieces, one after the other; no pieces, no samples.

        With several steps the rows are runs of ``run``, ``steps`` of them for each stream, and
        batch j has run j of each stream: the slices of streams are put together once, not once a
        batch.
        """
        rows = _joined(pieces or [Piece(layout.empty(), 0, 0)])
        if steps == 1:
            yield _batch(rows, layout)
            return
        num = len(rows) // steps
        runs = num // run, steps, run
        labels, dense = rows.labels.reshape(runs), rows.dense.reshape(*runs, layout.num_dense)
        singles = rows.singles.reshape(len(layout.singles), *runs)
        order = np.arange(len(rows)).reshape(runs).swapaxes(0, 1).reshape(-1)
        bags = [bag.take(order) for bag in rows.bags]
        for j in range(steps):
            step = Rows(
                labels=labels[:, j].copy().reshape(num),
                dense=dense[:, j].copy().reshape(num, layout.num_dense),
                singles=singles[:, :, j].copy().reshape(len(singles), num),
                bags=[bag.part(j * num, (j + 1) * num) for bag in bags],
            )
            yield _batch(step, layout)


def _joined(pieces: Sequence[Piece]) -> Rows:
    """The rows of all pieces, one after the other, copied."""
    bags = []
    for f in range(len(pieces[0].rows.bags)):
        parts = [p.rows.bags[f].part(p.first, p.last) for p in pieces]
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        values = np.concatenate([part.values for part in parts])
        bags.append(Bags(values, np.concatenate(([0], np.cumsum(lengths)))))
    return Rows(
        labels=np.concatenate([p.rows.labels[p.first : p.last] for p in pieces]),
        dense=np.concatenate([p.rows.dense[p.first : p.last] for p in pieces]),
        singles=np.concatenate([p.rows.singles[:, p.first : p.last] for p in pieces], axis=1),
        bags=bags,
    )


def _batch(rows: Rows, layout: Layout) -> Batch:
    valid = rows.singles >= 0
    values, lengths = rows.singles[valid], valid.astype(np.int32)
    if layout.lists:
        values, lengths = _with_lists(rows, layout, values, lengths)
    return Batch(
        dense_features=torch.from_numpy(rows.dense),
        sparse_features=KeyedJaggedTensor(
            layout.features,
            torch.from_numpy(values.astype(np.int64, copy=False)),
            lengths=torch.from_numpy(lengths.reshape(-1)),
            stride=len(rows),
        ),
        labels=torch.from_numpy(rows.labels),
    )


def _with_lists(
    rows: Rows, layout: Layout, values: npt.NDArray[Any], lengths: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Key-major values and lengths of all features, from those of the single ones."""
    ends = np.concatenate(([0], np.cumsum(lengths.sum(axis=1))))
    found = {
        name: (values[ends[f] : ends[f + 1]], lengths[f]) for f, name in enumerate(layout.singles)
    }
    for name, bags in zip(layout.lists, rows.bags, strict=True):
        found[name] = bags.values, np.diff(bags.offsets).astype(np.int32)
    parts = [found[name] for name in layout.features]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([bags for _, bags in parts])
