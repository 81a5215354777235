"""What the models are built of: an MLP, the pairwise dot products, and repeatable weights."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowmesh import native
from rowmesh.errors import InputError
from rowmesh.features import KeyedTensor
from rowmesh.models.linear import Linear
from rowmesh.tables import TableConfig, configs_of

__all__ = [
    "MLP",
    "PairwiseDots",
    "check_layer_sizes",
    "ordered_values",
    "pooled_names",
    "seed_dense",
    "table_configs",
]

# A block's vectors and products stay in a core's cache between the copy, the product and the
# gather; a whole batch of 2048 costs a quarter more (benchmarked with 26 features of 64 columns).
_BLOCK_SAMPLES = 256


class MLP(nn.Module):
    """Linear layers with a ReLU between them: ``h_{l+1} = relu(W_l h_l + b_l)``.

    Weights and biases start as torch's `nn.Linear` makes them.

    Args:
        in_features: Columns of the input.
        layer_sizes: Outputs of each layer; with none the MLP returns its input.
        relu_last: Whether the last layer has a ReLU too.
        device: Where the parameters are made.
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        *,
        relu_last: bool,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = [in_features, *layer_sizes]
        self.layers = nn.ModuleList(Linear(i, o, device=device) for i, o in pairwise(sizes))
        self.relu_last = relu_last

    def forward(self, x: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, layer_sizes[-1]]``."""
        last = len(self.layers) - 1
        for number, linear in enumerate(self.layers):
            x = linear(x)
            if number < last or self.relu_last:
                x = x.relu_()  # in place: a Linear's backward does not read its output
        return x


class PairwiseDots(nn.Module):
    """DLRM's interaction (https://arxiv.org/abs/1906.00091): ``[d, <v_i, v_j> for i < j]``.

    ``v_0 = d`` is the dense vector and ``v_1 .. v_F`` are the features' vectors. The products
    come row by row of the upper triangle: ``<v_0, v_1>, <v_0, v_2>, .., <v_{F-1}, v_F>``.
    With G the symmetric matrix of their gradients, zero on the diagonal, the gradient of V is
    ``G V``, and can be differentiated again.

    Args:
        num_features: F, from 1.
        dim: Columns of every vector.
        device: Where the index tables are made.
    """

    def __init__(
        self, num_features: int, dim: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.num_features, self.dim = num_features, dim
        count = num_features + 1
        i, j = torch.triu_indices(count, count, offset=1, device=device)
        self.out_features = dim + i.numel()
        # v_F is never a left factor and v_0 never a right one, so F x F products are computed.
        triangle = i * num_features + (j - 1)
        symmetric = torch.zeros(count, count, dtype=torch.int64, device=device)
        symmetric[i, j] = symmetric[j, i] = torch.arange(dim, self.out_features, device=device)
        self.register_buffer("triangle", triangle, persistent=False)
        self.register_buffer("symmetric", symmetric.reshape(-1), persistent=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """``[B, dim]`` and ``[B, F * dim]`` to ``[B, dim + F (F + 1) / 2]``."""
        vectors = pooled.reshape(len(dense), self.num_features, self.dim)
        out: Tensor = _PairwiseDots.apply(dense, vectors, self.triangle, self.symmetric)  # type: ignore[no-untyped-call]
        return out


def _dots(dense: Tensor, vectors: Tensor, triangle: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The dense vectors and all products of a block of samples."""
    x = torch.cat((dense.unsqueeze(1), vectors), dim=1)
    products = torch.bmm(x[:, :-1], x[:, 1:].transpose(1, 2))
    return torch.cat((dense, products.flatten(1).index_select(1, triangle)), dim=1, out=out)


class _PairwiseDots(torch.autograd.Function):
    """Compiled, or one batched product each way, over blocks of samples; no gradient of a gather.

    The two differ in the last bits: a batched product adds in an order of its library's.
    """

    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, vectors: Tensor, triangle: Tensor, symmetric: Tensor
    ) -> Tensor:
        ctx.save_for_backward(dense, vectors, symmetric)
        if torch.compiler.is_compiling():  # no calls of C, no blocks: their number would be traced
            return _dots(dense, vectors, triangle)
        if (found := native.pairwise_dots(dense, vectors)) is not None:
            return found
        out = dense.new_empty(len(dense), dense.shape[1] + len(triangle))
        blocks = (torch.split(t, _BLOCK_SAMPLES) for t in (dense, vectors, out))
        for d, v, o in zip(*blocks, strict=True):
            _dots(d, v, triangle, out=o)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dense, vectors, symmetric = ctx.saved_tensors
        count, dim = vectors.shape[1] + 1, dense.shape[1]
        # create_graph=True, or traced: operations with a gradient, no blocks
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            x = torch.cat((dense.unsqueeze(1), vectors), dim=1)
            both = grad.index_select(1, symmetric).view(-1, count, count)
            both = both - torch.diag_embed(both.diagonal(dim1=1, dim2=2))
            grad_x = torch.bmm(both, x)
            return grad_x[:, 0] + grad[:, :dim], grad_x[:, 1:], None, None
        if (found := native.pairwise_dots_backward(dense, vectors, grad)) is not None:
            return *found, None, None
        grad_dense = torch.empty_like(dense, memory_format=torch.contiguous_format)
        grad_vectors = torch.empty_like(vectors, memory_format=torch.contiguous_format)
        tensors = (dense, vectors, grad, grad_dense, grad_vectors)
        blocks = (torch.split(t, _BLOCK_SAMPLES) for t in tensors)
        for d, v, g, gd, gv in zip(*blocks, strict=True):
            x = torch.cat((d.unsqueeze(1), v), dim=1)
            both = g.index_select(1, symmetric).view(-1, count, count)
            both.diagonal(dim1=1, dim2=2).zero_()
            torch.bmm(both[:, 1:], x, out=gv)
            torch.add(torch.bmm(both[:, :1], x).squeeze(1), g[:, :dim], out=gd)
        return grad_dense, grad_vectors, None, None


def seed_dense(named_parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Overwrite Linear parameters with values that depend on seed, order and shape alone.

    The k-th parameter is uniform in ``±1/sqrt(in)``, from numpy's generator ``[seed, k]``, with
    ``in`` the columns of the latest weight. Names play no part, so two libraries' models with
    the same layers in the same order become equal, on every rank without a broadcast.

    Args:
        named_parameters: Weights ``[out, in]``, each followed by its bias ``[out]`` if it has
            one: for DLRM those of ``dense_arch``, then of ``over_arch``, without the tables.
        seed: Any non-negative integer.

    Raises:
        InputError: If a bias comes before the first weight, or a shape is neither.
    """
    columns = 0
    for number, (name, parameter) in enumerate(named_parameters):
        columns = parameter.shape[1] if parameter.dim() == 2 else columns
        if parameter.dim() not in (1, 2) or not columns:
            raise InputError(
                f"parameter {name!r} of shape {list(parameter.shape)} is no weight [out, in] "
                f"and no bias after one: pass the parameters of Linear layers in their order"
            )
        bound = columns**-0.5
        values = np.random.default_rng([seed, number]).uniform(-bound, bound, parameter.shape)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def table_configs(collection: nn.Module) -> list[TableConfig]:
    """The tables of one pooled embedding collection.

    Raises:
        InputError: If ``collection`` has no ``embedding_bag_configs()`` or reads no feature.
    """
    configs = configs_of(collection)
    if not callable(getattr(collection, "embedding_bag_configs", None)):
        raise InputError(
            f"{type(collection).__name__} has no embedding_bag_configs(): pass an "
            f"EmbeddingBagCollection"
        )
    if not any(c.feature_names for c in configs):
        raise InputError("the embedding bag collection reads no feature: the model needs one")
    return configs


def pooled_names(configs: Sequence[TableConfig]) -> list[str]:
    """Features in the order of the tables; one that two tables read is ``feature@table``."""
    readers = Counter(feature for config in configs for feature in config.feature_names)
    return [
        feature if readers[feature] == 1 else f"{feature}@{config.name}"
        for config in configs
        for feature in config.feature_names
    ]


def ordered_values(pooled: KeyedTensor, names: list[str]) -> Tensor:
    """The vectors of ``names`` side by side; no copy where they are so already."""
    if pooled.keys() == names:
        return pooled.values()
    return torch.cat([pooled[name] for name in names], dim=1)


def check_layer_sizes(argument: str, sizes: Sequence[int], *, last: int, why: str) -> None:
    """Raise InputError unless all sizes are positive and the last one is ``last``."""
    if not sizes or min(sizes) < 1 or sizes[-1] != last:
        raise InputError(
            f"{argument}={list(sizes)} must be positive sizes that end in {last}, {why}: "
            f"set its last entry to {last}"
        )
