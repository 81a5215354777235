"""What a change does to quality: all tables as one, rows by frequency, NE of held-out samples."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rowmesh.data import Source
from rowmesh.errors import InputError
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.tables import EmbeddingBagConfig
from rowmesh.train.metrics import ClickMetrics

__all__ = ["OneTable", "count_rows", "deciles", "judge_clicks", "rarest_of_samples"]


class OneTable:
    """A source whose tables are one: row i of the f-th table is row ``first_f + i`` of it.

    Rules that treat rows one by one learn the same from it, in fewer and larger operations.

    Args:
        source: Its tables pool sums, and each is read by one feature.

    Raises:
        InputError: If a table is read by several features or by none.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._starts = source, {}
        self.num_dense, self.steps_per_epoch = source.num_dense, source.steps_per_epoch
        self.num_rows = 0
        for table in source.tables(1):
            if len(table.feature_names) != 1:
                raise InputError(
                    f"table {table.name!r} is read by {len(table.feature_names)} features: tables "
                    f"that are joined have one each"
                )
            self._starts[table.feature_names[0]] = self.num_rows
            self.num_rows += table.num_embeddings

    def tables(self, embedding_dim: int) -> Sequence[EmbeddingBagConfig]:
        """The one table."""
        return [
            EmbeddingBagConfig(
                name="all",
                num_embeddings=self.num_rows,
                embedding_dim=embedding_dim,
                feature_names=list(self._starts),
            )
        ]

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        """Those of the source."""
        return map(self._join, self._source.batches(rank=rank, world=world, start=start))

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        """Those of the source."""
        return map(self._join, self._source.held_out(rank=rank, world=world))

    def _join(self, batch: Batch) -> Batch:
        old = batch.sparse_features
        keys = old.keys()
        sizes = old.lengths().view(len(keys), -1).sum(1)
        first = torch.tensor([self._starts[key] for key in keys])
        values = old.values() + torch.repeat_interleave(first, sizes)
        joined = KeyedJaggedTensor(keys, values, lengths=old.lengths(), stride=old.stride())
        return replace(batch, sparse_features=joined)


def count_rows(batches: Sequence[Batch], num_rows: int) -> Tensor:
    """``[num_rows]``: how often each row is read."""
    values = torch.cat([batch.sparse_features.values() for batch in batches])
    return torch.bincount(values, minlength=num_rows)


def rarest_of_samples(batch: Batch, counts: Tensor) -> Tensor:
    """``[B]``: the count of each sample's rarest row; the largest count for one without rows."""
    features = batch.sparse_features
    sample = torch.repeat_interleave(
        torch.arange(features.stride()).repeat(len(features.keys())), features.lengths().long()
    )
    least = counts.new_full((features.stride(),), int(counts.max()))
    return least.scatter_reduce(0, sample, counts[features.values()], "amin")


def deciles(values: Tensor) -> Tensor:
    """``[n]``: 0 for the lowest tenth of the values, .., 9; ties in the order given."""
    places = torch.empty_like(values, dtype=torch.int64)
    places[torch.sort(values, stable=True).indices] = torch.arange(len(values))
    return places * 10 // max(len(values), 1)


def judge_clicks(
    logits: Tensor, labels: Tensor, true: Tensor | None, rarest: Tensor
) -> dict[str, Any]:
    """``auc``, ``ne``, ``mean_kl`` and ``bayes_ne`` of `ClickMetrics`, and ``ne_deciles``.

    The third and fourth are None without a truth. Deciles are of samples in ten parts of equal
    size, by how often the sample's rarest row is in the training data, rarest first.

    Args:
        logits: ``[B]``.
        labels: ``[B]``.
        true: ``[B]`` probabilities.
        rarest: ``[B]``, as of `rarest_of_samples`.
    """
    metrics, tenth = ClickMetrics(), deciles(rarest)
    metrics.update(logits, labels, true)
    result = metrics.result()
    found: dict[str, Any] = {name: result[name] for name in ("auc", "ne")}
    for name in ("bayes_ne", "mean_kl"):
        found[name] = None if math.isnan(result[name]) else result[name]
    found["ne_deciles"] = [_ne(logits[tenth == d], labels[tenth == d]) for d in range(10)]
    return found


def _ne(logits: Tensor, labels: Tensor) -> float | None:
    metrics = ClickMetrics(num_bins=1)
    metrics.update(logits, labels)
    ne = metrics.result()["ne"]
    return None if math.isnan(ne) else ne
