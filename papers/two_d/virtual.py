"""One training run of shard groups in one process, as virtual ranks, and what came of it."""

import functools
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.quality import (
    OneTable,
    count_rows,
    deciles,
    judge_clicks,
    rarest_of_samples,
)
from papers.two_d.arms import Arm, Learning
from rowmesh.data import Source
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.models import DCN
from rowmesh.nn import EmbeddingBagCollection
from rowmesh.optim import MomentumScaledRowwiseAdagrad
from rowmesh.placement import MeshShape, Plan, Sync, TablePlan, Tier
from rowmesh.runtime.oracle import Oracle
from rowmesh.tables import EmbeddingBagConfig, PoolingType
from rowmesh.train.model import ModelConfig, build_model

__all__ = ["Additive", "cut_batch", "plan_of", "train", "train_arm"]

_LEAST = 1e-30  # a moment of 0 has no logarithm


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


def cut_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Samples [p * B / n, (p + 1) * B / n) of a batch for each of n parts, without weights."""
    if num_parts == 1:
        return [batch]
    features, count = batch.sparse_features, batch.sparse_features.stride()
    keys, lengths = features.keys(), features.lengths().view(-1, count)
    sample = torch.repeat_interleave(
        torch.arange(count).repeat(len(keys)), features.lengths().long()
    )
    cuts = [part * count // num_parts for part in range(num_parts + 1)]
    found = []
    for start, stop in pairwise(cuts):
        true = batch.true_probabilities
        mine = KeyedJaggedTensor(
            keys,
            features.values()[(sample >= start) & (sample < stop)],
            lengths=lengths[:, start:stop].reshape(-1),
            stride=stop - start,
        )
        found.append(
            Batch(
                dense_features=batch.dense_features[start:stop],
                sparse_features=mine,
                labels=batch.labels[start:stop],
                true_probabilities=None if true is None else true[start:stop],
            )
        )
    return found


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
        What `judge_clicks` says of held-out samples; ``log_moments``: mean of log v over the rows
        that were trained, in ten parts by how often.
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
    true = torch.cat(known) if len(known) == len(batches) else None
    return judge_clicks(
        logits, labels, true, torch.cat([rarest_of_samples(b, counts) for b in batches])
    )


def _log_moments(moments: Tensor, counts: Tensor) -> list[float | None]:
    seen = counts > 0
    logs, tenth = moments[seen].double().clamp(min=_LEAST).log(), deciles(counts[seen])
    return [float(logs[tenth == d].mean()) if bool((tenth == d).any()) else None for d in range(10)]
