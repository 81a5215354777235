"""A step of bench_dlrm.py's dense layers alone, on fixed embeddings."""

import argparse
import functools
import itertools
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import rowmesh as rm

__all__ = ["DENSE", "EPS", "dense_parts", "least_dense_parts", "sizes"]

EPS = 1e-8
DENSE = {
    "adagrad": functools.partial(torch.optim.Adagrad, eps=EPS),
    "sgd": torch.optim.SGD,
}


def sizes(text: str) -> list[int]:
    """``"512,256"`` as numbers."""
    return [int(word) for word in text.split(",")]


def dense_parts(
    args: argparse.Namespace, model: Any, mesh: rm.Mesh, batch: rm.Batch, count: int
) -> dict[str, float]:
    """Median ms of a dense step, and of what waits for the embeddings: ``fwd`` and ``bwd`` of the
    interaction and the top layers. Two steps come before those counted."""
    copy = _ours(args, model)
    return _timed(copy, args, mesh, batch, count, _width(args, model))


def least_dense_parts(
    args: argparse.Namespace, model: Any, mesh: rm.Mesh, batch: rm.Batch, count: int
) -> dict[str, float]:
    """The same of our layers or of torch's own, whichever step is shorter: for floors."""
    found = [
        _timed(copy, args, mesh, batch, count, _width(args, model))
        for copy in (_ours(args, model), _Plain(args, _width(args, model) // args.dim))
    ]
    return min(found, key=lambda parts: parts["ms"])


class _Plain(nn.Module):
    """The same layers of nothing but torch."""

    def __init__(self, args: argparse.Namespace, num_features: int) -> None:
        super().__init__()
        pairs = torch.triu_indices(num_features + 1, num_features + 1, offset=1)
        self._first, self._second = pairs
        self.dense_arch = _stack(13, sizes(args.bottom), relu_last=True)
        self.over_arch = _stack(args.dim + pairs.shape[1], sizes(args.top), relu_last=False)

    def interaction(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """``[B, D + pairs]``"""
        vectors = torch.cat([dense, pooled], 1).view(len(dense), -1, dense.shape[1])
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense, dots[:, self._first, self._second]], 1)


def _stack(inputs: int, outputs: list[int], *, relu_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in outputs:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers[: len(layers) if relu_last else -1])


def _width(args: argparse.Namespace, model: Any) -> int:
    """Columns of all pooled embeddings."""
    return int(args.dim * len(model.embedding_bag_collection.readers))


def _ours(args: argparse.Namespace, model: Any) -> rm.models.DLRM:
    return rm.models.DLRM(
        rm.EmbeddingBagCollection(model.embedding_bag_collection.configs(), device="meta"),
        dense_in_features=13,
        dense_arch_layer_sizes=sizes(args.bottom),
        over_arch_layer_sizes=sizes(args.top),
    )


def _timed(
    copy: Any, args: argparse.Namespace, mesh: rm.Mesh, batch: rm.Batch, count: int, width: int
) -> dict[str, float]:
    layers = [*copy.dense_arch.parameters(), *copy.over_arch.parameters()]
    optimizer = DENSE[args.dense_opt](layers, lr=args.lr)
    pooled = (torch.randn(args.batch, width) / 100).requires_grad_()
    loss = torch.nn.BCEWithLogitsLoss()
    times = []
    mesh.total(0)
    for _ in range(2 + count):
        marks = [time.perf_counter()]
        bottom = copy.dense_arch(batch.dense_features)
        inner = bottom.detach().requires_grad_()
        marks.append(time.perf_counter())
        losses = loss(copy.over_arch(copy.interaction(inner, pooled)).squeeze(1), batch.labels)
        marks.append(time.perf_counter())
        losses.backward()
        marks.append(time.perf_counter())
        bottom.backward(inner.grad)
        optimizer.step()
        optimizer.zero_grad()
        pooled.grad = None
        marks.append(time.perf_counter())
        times.append([1e3 * (b - a) for a, b in itertools.pairwise(marks)])
    kept = times[2:]
    return {
        "ms": median(sum(parts) for parts in kept),
        "fwd": median(parts[1] for parts in kept),
        "bwd": median(parts[2] for parts in kept),
    }
