"""The model of planted clicks: as additive as their truth."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.data import Source
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.nn import EmbeddingBagCollection
from rowmesh.tables import EmbeddingBagConfig

__all__ = ["Additive"]


class Additive(nn.Module):
    """``logit = b + w . dense + sum_f mean_d(v_f)``, v_f the vector of feature f; w, b start at 0.

    A row's gradient depends on the errors of its samples alone, on no other parameter's size: so
    two arms' moments differ by what the arms do.

    Args:
        source: Whose tables, all pooled, and dense features to read.
        dim: Columns of every table.
        seed: Of the tables' initial values.
    """

    def __init__(self, source: Source, *, dim: int, seed: int) -> None:
        super().__init__()
        tables = [t for t in source.tables(dim) if isinstance(t, EmbeddingBagConfig)]
        self.embedding_bag_collection = EmbeddingBagCollection(
            tables=tables, device="meta", seed=seed
        )
        self.dense = nn.Linear(source.num_dense, 1)
        with torch.no_grad():
            self.dense.weight.zero_()
            self.dense.bias.zero_()
        self._dim = dim

    def forward(self, batch: Batch) -> Tensor:
        """``[B]`` losses."""
        logits = self.logits(batch.dense_features, batch.sparse_features)
        return F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")

    def logits(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B]``."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        logits: Tensor = self.dense(dense_features).squeeze(1) + pooled.sum(1) / self._dim
        return logits
