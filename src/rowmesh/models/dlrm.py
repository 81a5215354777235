"""DLRM (https://arxiv.org/abs/1906.00091), layer for layer the one of TorchRec."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.errors import InputError
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.models.layers import (
    MLP,
    PairwiseDots,
    check_layer_sizes,
    ordered_values,
    pooled_names,
    table_configs,
)

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """Dense MLP and embedding bags, their pairwise dot products, and an MLP to one logit.

    ::

        d      = dense_arch(dense_features)                          [B, D], ReLU at the end
        v      = embedding_bag_collection(sparse_features)           [B, F, D]
        logits = over_arch([d, <v_i, v_j> for i < j, v_0 = d])       [B], linear at the end

    Args:
        embedding_bag_collection: Tables of one embedding dim D: any module with
            ``embedding_bag_configs()`` that maps a KeyedJaggedTensor to a KeyedTensor.
        dense_in_features: Columns of the dense input.
        dense_arch_layer_sizes: Of the dense MLP; the last is D.
        over_arch_layer_sizes: Of the MLP after the dot products; the last is 1.
        dense_device: Where the dense parameters are made.

    Raises:
        InputError: If a size does not fit, naming the argument.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int] = (512, 256, 64),
        over_arch_layer_sizes: Sequence[int] = (512, 512, 256, 1),
        *,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        configs = table_configs(embedding_bag_collection)
        dims = {c.name: c.embedding_dim for c in configs}
        dim = configs[0].embedding_dim
        if set(dims.values()) != {dim}:
            raise InputError(
                f"DLRM needs one embedding_dim for its dot products, got {dims}: give the "
                f"tables one dim, or use DCN"
            )
        if dense_in_features < 1:
            raise InputError(f"dense_in_features={dense_in_features} must be at least 1")
        check_layer_sizes(
            "dense_arch_layer_sizes", dense_arch_layer_sizes, last=dim, why="the embedding_dim"
        )
        check_layer_sizes(
            "over_arch_layer_sizes", over_arch_layer_sizes, last=1, why="the logit of a sample"
        )
        self.embedding_bag_collection = embedding_bag_collection
        self.feature_names = pooled_names(configs)
        self.dense_arch = MLP(
            dense_in_features, dense_arch_layer_sizes, relu_last=True, device=dense_device
        )
        self.interaction = PairwiseDots(len(self.feature_names), dim, device=dense_device)
        self.over_arch = MLP(
            self.interaction.out_features,
            over_arch_layer_sizes,
            relu_last=False,
            device=dense_device,
        )

    def forward(self, batch: Batch) -> Tensor:
        """``[B]``: the binary cross-entropy of each sample, neither summed nor averaged."""
        logits = self.logits(batch.dense_features, batch.sparse_features)
        labels = batch.labels.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def logits(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B]``: log-odds that the label is 1."""
        # Before the lookup: rows arrive meanwhile, and in backward its gradients leave first.
        dense = self.dense_arch(dense_features)
        pooled = self.embedding_bag_collection(sparse_features)
        x = self.interaction(dense, ordered_values(pooled, self.feature_names))
        logits: Tensor = self.over_arch(x).squeeze(1)
        return logits
