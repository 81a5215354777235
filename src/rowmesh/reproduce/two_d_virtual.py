"""One training run of shard groups in one process, as virtual ranks, and what came of it."""

import functools
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rowmesh.data import Source
from rowmesh.features import Batch
from rowmesh.models import DCN
from rowmesh.optim import MomentumScaledRowwiseAdagrad
from rowmesh.placement import MeshShape, Plan, Sync, TablePlan, Tier
from rowmesh.reproduce.two_d_arms import Arm, Learning
from rowmesh.reproduce.two_d_data import (
    OneTable,
    count_rows,
    cut_batch,
    deciles,
    rarest_of_samples,
)
from rowmesh.reproduce.two_d_model import Additive
from rowmesh.runtime.oracle import Oracle
from rowmesh.tables import PoolingType
from rowmesh.train.metrics import ClickMetrics
from rowmesh.train.model import ModelConfig, build_model

__all__ = ["plan_of", "train", "train_arm"]

_LEAST = 1e-30  # a moment of 0 has no logarithm


def plan_of(table_name: str, num_rows: int, dim: int, features: Sequence[str], arm: Arm) -> Plan:
    """One table, whole on the first rank of every group."""
    table = TablePlan(
        name=table_name,
        collection="embedding_bag_collection",
        num_embeddings=num_rows,
        embedding_dim=dim,
        data_type="fp32",
        pooling=PoolingType.SUM,
        feature_names=tuple(features),
        virtual_shards=1,
        tiers=(Tier(ranks=(0,)),),
    )
    mesh = MeshShape(hosts=arm.world, local=1, group=arm.world // arm.groups)
    sync = Sync(mode=arm.mode, period=arm.period)
    return Plan(mesh=mesh, tables=(table,), sync=sync).validate()


def train(
    source: OneTable, batches: Sequence[Batch], how: Learning, arm: Arm, *, lr: float, seed: int
) -> Oracle:
    """Step through ``batches``, each cut into a part for every virtual rank; sync at the end."""
    (table,) = source.tables(how.dim)
    oracle = Oracle(
        _build(source, how, seed),
        dense=functools.partial(torch.optim.Adam, lr=how.dense_lr),
        sparse=MomentumScaledRowwiseAdagrad(lr=lr, eps=how.eps, scale=arm.scale),
        plan=plan_of(table.name, table.num_embeddings, how.dim, table.feature_names, arm),
    )
    assert oracle.dense is not None
    for step, batch in enumerate(batches):
        factor = 1 - step / len(batches)
        for group in oracle.dense.param_groups:
            group["lr"] = factor * how.dense_lr
        oracle.step(cut_batch(batch, arm.world), lr=factor * lr)
    oracle.sync()
    return oracle


def _build(source: OneTable, how: Learning, seed: int) -> DCN | Additive:
    if how.model == "additive":
        return Additive(source, dim=how.dim, seed=seed)
    config = ModelConfig(
        kind="dcn", dim=how.dim, dense_layers=how.dense_layers, over_layers=(), cross_layers=1
    )
    model = build_model(config, source, seed=seed)
    assert isinstance(model, DCN)
    return model


def train_arm(source: Source, how: Learning, arm: Arm, *, lr: float, seed: int) -> dict[str, Any]:
    """Train and evaluate.

    Returns:
        ``auc``, ``ne``, ``mean_kl`` and ``bayes_ne`` of `ClickMetrics` (the last two None without
        a truth); ``ne_deciles``: of held-out samples in ten parts of equal size, by how often the
        sample's rarest row is in the training data, rarest first; ``log_moments``: mean of log v
        over the rows that were trained, in ten parts by how often.
    """
    joined = OneTable(source)
    batches = list(islice(joined.batches(rank=0, world=1), how.steps))
    oracle = train(joined, batches, how, arm, lr=lr, seed=seed)
    counts = count_rows(batches, joined.num_rows)
    model = oracle.model
    assert isinstance(model, DCN | Additive)
    found = _evaluate(model, list(joined.held_out(rank=0, world=1)), counts)
    return found | {"log_moments": _log_moments(oracle.states["all"]["v"], counts)}


@torch.no_grad()
def _evaluate(model: DCN | Additive, batches: Sequence[Batch], counts: Tensor) -> dict[str, Any]:
    logits = torch.cat([model.logits(b.dense_features, b.sparse_features) for b in batches])
    labels = torch.cat([b.labels for b in batches])
    known = [b.true_probabilities for b in batches if b.true_probabilities is not None]
    metrics = ClickMetrics()
    metrics.update(logits, labels, torch.cat(known) if len(known) == len(batches) else None)
    result = metrics.result()
    tenth = deciles(torch.cat([rarest_of_samples(b, counts) for b in batches]))
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


def _log_moments(moments: Tensor, counts: Tensor) -> list[float | None]:
    seen = counts > 0
    logs, tenth = moments[seen].double().clamp(min=_LEAST).log(), deciles(counts[seen])
    return [float(logs[tenth == d].mean()) if bool((tenth == d).any()) else None for d in range(10)]
