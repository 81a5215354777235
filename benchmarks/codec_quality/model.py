"""The model of planted clicks: as additive in rows, and as deep in dense features, as the truth."""

from collections.abc import Sequence

import torch
from harness.quality import OneTable
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.models.layers import MLP
from rowmesh.nn import EmbeddingBagCollection

__all__ = ["Wide"]


class Wide(nn.Module):
    """``logit = w . [MLP(dense), v_1, .., v_F]``, v_f the vector of feature f.

    w is learnt, so that the numbers of a row's gradient are of different size.

    Args:
        source: Whose table and dense features to read.
        dim: Columns of the table.
        dense_layers: Sizes of the MLP.
        seed: Of all initial values.
    """

    def __init__(
        self, source: OneTable, *, dim: int, dense_layers: Sequence[int], seed: int
    ) -> None:
        super().__init__()
        tables = list(source.tables(dim))
        self.embedding_bag_collection = EmbeddingBagCollection(
            tables=tables, device="meta", seed=seed
        )
        width = dense_layers[-1] + sum(len(t.feature_names) * dim for t in tables)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.dense_arch = MLP(source.num_dense, dense_layers, relu_last=True)
            self.over = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> Tensor:
        """``[B]`` losses."""
        logits = self.logits(batch.dense_features, batch.sparse_features)
        return F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")

    def logits(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B]``."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        joined = torch.cat([self.dense_arch(dense_features), pooled], dim=1)
        logits: Tensor = self.over(joined).squeeze(1)
        return logits
