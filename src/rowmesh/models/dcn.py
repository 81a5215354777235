"""DCN v2 (https://arxiv.org/abs/2008.13535), stacked: cross layers, then an MLP."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.errors import InputError
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.models.layers import (
    MLP,
    check_layer_sizes,
    ordered_values,
    pooled_names,
    table_configs,
)
from rowmesh.models.linear import Linear

__all__ = ["DCN", "CrossNet"]


class CrossNet(nn.Module):
    """Cross layers: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``, with ``*`` by element.

    Args:
        in_features: Columns n of the input and the output.
        num_layers: Number of layers; 0 returns the input.
        low_rank_dim: r for ``W_l = U_l V_l`` with U ``[n, r]`` and V ``[r, n]``: 2 n r weights
            instead of n². None for a full W.
        device: Where the parameters are made.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        low_rank_dim: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        inner = in_features if low_rank_dim is None else low_rank_dim
        self.v = nn.ModuleList(
            Linear(in_features, inner, bias=False, device=device)
            for _ in range(0 if low_rank_dim is None else num_layers)
        )
        self.w = nn.ModuleList(Linear(inner, in_features, device=device) for _ in range(num_layers))

    def forward(self, x0: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, in_features]``."""
        x = x0
        for number, linear in enumerate(self.w):
            inner = self.v[number](x) if self.v else x
            x = torch.addcmul(x, x0, linear(inner))
        return x


class DCN(nn.Module):
    """Dense MLP and embedding bags side by side, cross layers, and an MLP to one logit.

    ::

        x_0    = [dense_arch(dense_features), embedding_bag_collection(sparse_features)]
        logits = over_arch(crossnet(x_0))                            [B], linear at the end

    Args:
        embedding_bag_collection: Tables of any dims: any module with
            ``embedding_bag_configs()`` that maps a KeyedJaggedTensor to a KeyedTensor.
        dense_in_features: Columns of the dense input.
        dense_arch_layer_sizes: Of the dense MLP, with a ReLU at the end; with none the dense
            features are taken as they are.
        over_arch_layer_sizes: Of the MLP after the cross layers; the last is 1.
        dcn_num_layers: Number of cross layers.
        dcn_low_rank_dim: Rank of the cross layers' weights; None for full ones.
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
        dcn_num_layers: int = 3,
        dcn_low_rank_dim: int | None = None,
        *,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        configs = table_configs(embedding_bag_collection)
        for argument, value, limit in (
            ("dense_in_features", dense_in_features, 1),
            ("dcn_num_layers", dcn_num_layers, 1),
            ("dcn_low_rank_dim", 1 if dcn_low_rank_dim is None else dcn_low_rank_dim, 1),
            ("the smallest of dense_arch_layer_sizes", min(dense_arch_layer_sizes, default=1), 1),
        ):
            if value < limit:
                raise InputError(f"{argument} is {value}, but must be at least {limit}")
        check_layer_sizes(
            "over_arch_layer_sizes", over_arch_layer_sizes, last=1, why="the logit of a sample"
        )
        self.embedding_bag_collection = embedding_bag_collection
        self.feature_names = pooled_names(configs)
        self.dense_arch = MLP(
            dense_in_features, dense_arch_layer_sizes, relu_last=True, device=dense_device
        )
        width = [dense_in_features, *dense_arch_layer_sizes][-1]
        width += sum(c.embedding_dim * len(c.feature_names) for c in configs)
        self.crossnet = CrossNet(
            width, dcn_num_layers, low_rank_dim=dcn_low_rank_dim, device=dense_device
        )
        self.over_arch = MLP(width, over_arch_layer_sizes, relu_last=False, device=dense_device)

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
        x0 = torch.cat((dense, ordered_values(pooled, self.feature_names)), dim=1)
        logits: Tensor = self.over_arch(self.crossnet(x0)).squeeze(1)
        return logits
