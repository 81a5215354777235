"""Work on ids and rows, timed on a collection of one rank: the runtime without its messages."""

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np
import torch
from torch import nn

from rowmesh.comm.mesh import Mesh
from rowmesh.cost import RowCost
from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn.collections import EmbeddingBagCollection
from rowmesh.optim import RowwiseAdagrad
from rowmesh.planners import make_plan
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.shard import shard
from rowmesh.tables import EmbeddingBagConfig
from rowmesh.topology import Topology
from rowmesh.train.calibrate.clock import now

__all__ = ["BATCHES", "fit_costs", "measure_rows", "row_cost_of"]

_TABLES, _ROWS, _POOLING = 16, 40_000, 8
BATCHES: Final = (256, 4096)
_REPEATS: Final = 3
_Fit = Sequence[float]  # fixed, per id, per row


def measure_rows(
    dim: int, mesh: Mesh, *, batches: tuple[int, int] = BATCHES
) -> tuple[RowCost, float]:
    """The costs at one dim, and the seconds of a step whose batch is empty; means over ranks.

    Forward takes fixed + per id x ids + per row x distinct rows, and so do backward and step.
    Batches of two sizes (``batches``), with many distinct rows and with few, give those numbers by
    least squares, for `rows` and for `pooled` exchanges.

    Collective:
        All ranks, which work at the same time.
    """
    found = []
    for exchange in ("rows", "pooled"):
        table = _Timed(dim, exchange, mesh)
        points = [table.time(b, few) for b, few in itertools.product(batches, (False, True))]
        forward, rest = (fit_costs([(q, d, t[i]) for q, d, t in points]) for i in (0, 1))
        found += [forward, rest]
    numbers = torch.tensor(found, dtype=torch.float64, device=mesh.device)
    forward, rest, pooled, bags = (mesh.total(numbers) / mesh.world).tolist()
    return row_cost_of(dim, forward=forward, rest=rest, pooled=pooled, bags=bags)


def row_cost_of(
    dim: int, *, forward: _Fit, rest: _Fit, pooled: _Fit, bags: _Fit
) -> tuple[RowCost, float]:
    """The costs at one dim, and the seconds of an empty batch's step.

    Args:
        dim: Columns.
        forward, rest: Fixed, per id and per row: of a `rows` exchange's forward, and of its
            backward and step. An id and an empty batch cost both; a row is looked up in the first
            and updated in the second.
        pooled, bags: The same of a `pooled` exchange; ids and rows cost both.
    """
    cost = RowCost(
        dim=dim,
        id_s=forward[1] + rest[1],
        lookup_s=forward[2],
        update_s=rest[2],
        bag_id_s=pooled[1] + bags[1],
        bag_update_s=pooled[2] + bags[2],
    )
    return cost, forward[0] + rest[0]


def fit_costs(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Fixed, per id, per row, none below zero: least squares of relative errors.

    Args:
        points: Ids, distinct rows, seconds.
    """
    table = np.array(points)
    design = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]]) / table[:, 2:]
    scale = np.abs(design).max(0)
    best, least = np.zeros(3), float("inf")
    for chosen in itertools.product((False, True), repeat=3):  # which are above zero
        columns = np.flatnonzero(chosen)
        solution = np.zeros(3)
        if len(columns):
            part = design[:, columns] / scale[columns]
            solution[columns] = np.linalg.lstsq(part, np.ones(len(table)))[0] / scale[columns]
        error = float(np.square(design @ solution - 1.0).sum())
        if error < least - 1e-12 and (solution >= 0.0).all():
            best, least = solution, error
    fixed, per_id, per_row = best.tolist()
    return fixed, per_id, per_row


class _Timed:
    """A collection of one dim on a mesh of its own, this rank alone."""

    def __init__(self, dim: int, exchange: str, mesh: Mesh) -> None:
        self._mesh = mesh
        names = [f"t{i}" for i in range(_TABLES)]
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=_ROWS, embedding_dim=dim, feature_names=[name]
            )
            for name in names
        ]
        self._names = names
        self._model = nn.Sequential(EmbeddingBagCollection(configs, device="meta"))
        alone = Mesh(topology=Topology(), rank=0, lanes={}, device=mesh.device)
        split = "row_wise" if exchange == "rows" else "table_wise"
        plan = make_plan(self._model, alone.topology, split=split, exchange=exchange)
        shard(self._model, plan, alone)
        self._optimizer = Optimizer(
            self._model, dense=torch.optim.SGD, sparse=RowwiseAdagrad(lr=0.01)
        )

    def time(self, batch_size: int, few: bool) -> tuple[float, float, tuple[float, float]]:
        """Ids, distinct rows, and medians of the seconds of forward and of the rest of a step."""
        times = []
        num_ids = batch_size * _POOLING
        rows = max(1, min(_ROWS, num_ids // 4)) if few else _ROWS
        generator = torch.Generator().manual_seed(batch_size)
        distinct = 0.0
        for repeat in range(1 + _REPEATS):
            ids = torch.randint(rows, (_TABLES, num_ids), generator=generator)
            distinct += sum(len(torch.unique(part)) for part in ids) / (1 + _REPEATS)
            features = KeyedJaggedTensor(
                keys=self._names,
                values=ids.reshape(-1).to(self._mesh.device),
                lengths=torch.full((_TABLES * batch_size,), _POOLING, device=self._mesh.device),
            )
            self._mesh.total(0)
            if repeat:  # the first one makes buffers
                times.append(self._step(features))
            else:
                self._step(features)
        forward, rest = (median(column) for column in zip(*times, strict=True))
        return float(ids.numel()), distinct, (forward, rest)

    def _step(self, features: KeyedJaggedTensor) -> tuple[float, float]:
        device = self._mesh.device
        marks = [now(device)]
        vectors = self._model(features).values()
        marks.append(now(device))
        gradient = torch.ones_like(vectors)
        marks.append(now(device))
        vectors.backward(gradient)
        self._optimizer.step()
        marks.append(now(device))
        return marks[1] - marks[0], marks[3] - marks[2]
