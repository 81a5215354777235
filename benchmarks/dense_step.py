"""A step of bench_dlrm.py's dense layers alone, on fixed embeddings."""

import argparse
import functools
import itertools
import time
from statistics import median
from typing import Any

import torch

import rowmesh as rm

__all__ = ["DENSE", "EPS", "dense_parts", "sizes"]

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
    copy = rm.models.DLRM(
        rm.EmbeddingBagCollection(model.embedding_bag_collection.configs(), device="meta"),
        dense_in_features=13,
        dense_arch_layer_sizes=sizes(args.bottom),
        over_arch_layer_sizes=sizes(args.top),
    )
    layers = [*copy.dense_arch.parameters(), *copy.over_arch.parameters()]
    optimizer = DENSE[args.dense_opt](layers, lr=args.lr)
    width = args.dim * len(model.embedding_bag_collection.readers)
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
