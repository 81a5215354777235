"""A step of the dense layers alone: embeddings that are simply there, and no messages."""

from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rowmesh.comm.mesh import Mesh
from rowmesh.cost import DenseCost
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.nn.bags import as_features
from rowmesh.nn.collections import EmbeddingBagCollection, EmbeddingCollection, Piece
from rowmesh.tables import dense_parameters, named_collections
from rowmesh.train.calibrate.clock import now
from rowmesh.train.config import RunConfig
from rowmesh.train.model import build_model

__all__ = ["count_dense", "measure_dense"]

_REPEATS: Final = 12


def measure_dense(config: RunConfig, mesh: Mesh) -> DenseCost:
    """Medians of the slowest rank's forward, backward and optimiser step.

    Collective:
        All ranks, each with a batch of its own, at the same time.
    """
    batch = next(config.data.batches(rank=mesh.rank, world=mesh.world)).to(mesh.device)
    probe = _Probe(config, mesh.device)
    flops, parameters = probe.count(batch)
    times = []
    for repeat in range(2 + _REPEATS):
        mesh.total(0)
        if repeat < 2:
            probe.step(batch)
        else:
            times.append(probe.step(batch))
    steps = zip(*mesh.gather_objects(times), strict=True)  # of every rank, its four times
    slowest = [max(step, key=sum) for step in steps]
    forward, backward, step, tail = (median(column) for column in zip(*slowest, strict=True))
    return DenseCost(
        flops=flops,
        parameters=parameters,
        forward_s=forward,
        backward_s=backward,
        step_s=step,
        tail_s=min(tail, backward),
    )


def count_dense(config: RunConfig, batch: Batch) -> tuple[float, float]:
    """Flops of a step of the dense layers on ``batch``, and their parameters."""
    return _Probe(config, torch.device("cpu")).count(batch)


class _Probe:
    """The model of a config whose collections give fixed vectors."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._device = device
        self._model = build_model(config.model, config.data, seed=config.seed, device=device)
        self._fixed = [_Fixed(module) for _, module, _ in named_collections(self._model)]
        parameters = [p for p in dense_parameters(self._model) if p.requires_grad]
        self._parameters = parameters
        self._optimizer = config.optimiser.make_dense(parameters)

    def count(self, batch: Batch) -> tuple[float, float]:
        """Flops of forward and backward, and parameters."""
        with FlopCounterMode(display=False) as counter:
            self._model(batch).sum().backward()
        self._optimizer.zero_grad()
        for fixed in self._fixed:
            fixed.forget()
        return float(counter.get_total_flops()), float(sum(p.numel() for p in self._parameters))

    def step(self, batch: Batch) -> tuple[float, float, float, float]:
        """Seconds of forward, backward, step, and of backward after the vectors' gradients."""
        start = now(self._device)
        losses = self._model(batch)
        loss = losses.sum() / max(len(losses), 1)
        forward = now(self._device)
        loss.backward()
        backward = now(self._device)
        self._optimizer.step()
        self._optimizer.zero_grad()
        end = now(self._device)
        known = max((fixed.forget() for fixed in self._fixed), default=backward)
        return forward - start, backward - forward, end - backward, max(0.0, backward - known)


class _Fixed:
    """An engine whose vectors are a leaf; it notes when their gradient is known."""

    def __init__(self, collection: nn.Module) -> None:
        assert isinstance(collection, EmbeddingBagCollection | EmbeddingCollection)
        self._collection, self._known_at = collection, 0.0
        self._leaves: dict[tuple[int, int], Tensor] = {}
        collection.engine = self

    @property
    def device(self) -> torch.device:
        """Where the last vectors were made."""
        return next((leaf.device for leaf in self._leaves.values()), torch.device("cpu"))

    def __call__(self, features: Any) -> tuple[KeyedJaggedTensor, list[Piece]]:
        """Small random vectors, made once."""
        features = as_features(features)
        configs, readers = self._collection.configs(), self._collection.readers
        pieces: list[Piece] = []
        for dim in sorted({config.embedding_dim for config in configs}):
            members = [i for i, r in enumerate(readers) if configs[r.table].embedding_dim == dim]
            count = features.stride() * len(members)
            if not self._collection.pooled:
                names = [readers[i].feature for i in members]
                count = sum(len(features[name].values()) for name in names)
            pieces.append((members, self._leaf(count, dim, features.values().device)))
        return features, pieces

    def _leaf(self, count: int, dim: int, device: torch.device) -> Tensor:
        if (count, dim) not in self._leaves:
            generator = torch.Generator(device).manual_seed(dim)
            vectors = torch.randn((count, dim), generator=generator, device=device) / 100.0
            vectors.requires_grad_().register_post_accumulate_grad_hook(self._note)
            self._leaves[count, dim] = vectors
        return self._leaves[count, dim]

    def _note(self, leaf: Tensor) -> None:
        self._known_at = now(leaf.device)

    def forget(self) -> float:
        """Drop the gradients; when they were known."""
        for leaf in self._leaves.values():
            leaf.grad = None
        return self._known_at
