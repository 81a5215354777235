"""One training run on synthetic clicks: model, plan, shards, loop, evaluation."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from rowmesh.comm.mesh import Mesh
from rowmesh.data import EVAL_STEP, SyntheticClicks
from rowmesh.errors import InputError, did_you_mean
from rowmesh.features import Batch
from rowmesh.models import DLRM
from rowmesh.nn import EmbeddingBagCollection
from rowmesh.optim import SGD, Adagrad, Adam, RowwiseAdagrad, UpdateRule
from rowmesh.placement import Plan
from rowmesh.planners import make_plan
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.shard import shard
from rowmesh.stats import Stats
from rowmesh.topology import Link, Topology
from rowmesh.train.metrics import ClickMetrics

__all__ = ["RunConfig", "build_model", "plan_run", "train"]

_SPARSE: Final[dict[str, Callable[..., UpdateRule]]] = {
    "rowwise_adagrad": RowwiseAdagrad,
    "adagrad": Adagrad,
    "adam": Adam,
    "sgd": SGD,
}
_DENSE: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything a run depends on, besides the mesh; the default learns in about a minute.

    Args:
        data: Tables, ids and planted labels; its batch size is per rank.
        dim: Columns of every table.
        dense_layers: Hidden sizes of the MLP on dense features; ``dim`` follows.
        over_layers: Hidden sizes of the MLP on the dot products; one logit follows.
        split, exchange: As for `make_plan`.
        sparse: Update rule of the tables: rowwise_adagrad, adagrad, adam or sgd.
        sparse_lr: Its learning rate at the first step; it falls to 0 in a line.
        dense, dense_lr: The same for everything else: adagrad, adam or sgd.
        steps: Training steps.
        eval_steps: Held-out batches of each rank.
        seed: Of the initial values of tables and layers; the data has its own.

    Raises:
        InputError: If a number is out of range or a name is unknown.
    """

    data: SyntheticClicks = field(default_factory=lambda: SyntheticClicks(cap=100_000))
    dim: int = 16
    dense_layers: tuple[int, ...] = (64, 32)
    over_layers: tuple[int, ...] = (64, 32)
    split: str = "auto"
    exchange: str = "auto"
    sparse: str = "rowwise_adagrad"
    sparse_lr: float = 0.05
    dense: str = "adagrad"
    dense_lr: float = 0.05
    steps: int = 300
    eval_steps: int = 20
    seed: int = 1

    def __post_init__(self) -> None:
        for name, limit in (("dim", 1), ("steps", 1), ("eval_steps", 1), ("seed", 0)):
            if getattr(self, name) < limit:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least {limit}")
        for name, known in (("sparse", _SPARSE), ("dense", _DENSE)):
            word, lr = getattr(self, name), getattr(self, f"{name}_lr")
            if word not in known:
                raise InputError(f"unknown {name} optimiser {word!r}{did_you_mean(word, known)}")
            if not 0.0 <= lr < float("inf"):
                raise InputError(f"{name}_lr is {lr}, but must be from 0 and finite")


def build_model(config: RunConfig, *, device: torch.device | str = "cpu") -> DLRM:
    """The model as for one device: tables on ``meta``, dense layers drawn from the seed."""
    configs = config.data.tables(config.dim)
    tables = EmbeddingBagCollection(tables=configs, device="meta", seed=config.seed)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        layers = (*config.dense_layers, config.dim), (*config.over_layers, 1)
        return DLRM(tables, config.data.num_dense, *layers, dense_device=device)


def plan_run(
    config: RunConfig, model: nn.Module, topology: Topology, *, num_batches: int = 4
) -> Plan:
    """The plan of a run, from what rank 0's first batches ask for: the same on all ranks.

    With ``num_batches=0`` no data is made, and ids are assumed to follow the data's Zipf law.
    """
    data, tables = config.data, config.data.tables(config.dim)
    if num_batches:
        batches = (data.batch_at(0, step).sparse_features for step in range(num_batches))
        stats = Stats.from_batches(tables, batches)
    else:
        factors = {t.name: float(n) for t, n in zip(tables, data.pooling_factors, strict=True)}
        stats = Stats.assume(
            tables, batch_size=data.batch_size, pooling_factors=factors, alpha=data.alpha
        )
    return make_plan(model, topology, stats=stats, split=config.split, exchange=config.exchange)


def train(
    config: RunConfig,
    mesh: Mesh,
    *,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:
    """Train and evaluate as ``config`` says.

    Args:
        config: The same on all ranks.
        mesh: From `rowmesh.init_mesh`.
        on_plan: Called with the plan, before the first step.
        on_step: Called with the number of steps done and the mean loss of this rank's batch.

    Returns:
        The same on all ranks, but for the times: what `ClickMetrics.result` says of the held-out
        batches; ``bayes_auc``, the AUC of the planted probabilities; ``bytes`` that all ranks
        sent in training, by link; ``train_s``, and ``samples_per_s`` of all ranks, both with the
        making of the data; ``ranks``, ``steps`` and the plan's ``exactness``.

    Collective:
        All ranks.
    """
    model = build_model(config, device=mesh.device)
    plan = plan_run(config, model, mesh.topology)
    on_plan(plan)
    shard(model, plan, mesh)
    mesh.ledger.reset()
    start = time.perf_counter()
    _fit(config, model, mesh, on_step)
    train_s = time.perf_counter() - start
    links = [Link.HOST.value, Link.CROSS.value]
    sent = mesh.total(torch.tensor([mesh.ledger.by_link()[link] for link in links]))
    return _evaluate(config, model, mesh) | {
        "bytes": dict(zip(links, sent.tolist(), strict=True)),
        "train_s": train_s,
        "samples_per_s": config.steps * config.data.batch_size * mesh.world / train_s,
        "ranks": mesh.world,
        "steps": config.steps,
        "exactness": plan.exactness.value,
    }


def _batches(config: RunConfig, mesh: Mesh, steps: range) -> Iterator[Batch]:
    return (config.data.batch_at(mesh.rank, step).to(mesh.device) for step in steps)


def _fit(config: RunConfig, model: DLRM, mesh: Mesh, on_step: Callable[[int, float], None]) -> None:
    optimizer = Optimizer(
        model,
        dense=functools.partial(_DENSE[config.dense], lr=config.dense_lr),
        sparse=_SPARSE[config.sparse](lr=config.sparse_lr),
    )
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / config.steps)
    loader = _batches(config, mesh, range(config.steps))
    for step, batch in enumerate(mesh.batches(loader)):
        losses = model(batch)
        mesh.mean(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        on_step(step + 1, float(losses.detach().mean()))


@torch.no_grad()
def _evaluate(config: RunConfig, model: DLRM, mesh: Mesh) -> dict[str, Any]:
    """Metrics of the model, and the AUC of the truth, on every rank's own held-out batches."""
    found, best = ClickMetrics(), ClickMetrics()
    for batch in _batches(config, mesh, range(EVAL_STEP, EVAL_STEP + config.eval_steps)):
        logits = model.logits(batch.dense_features, batch.sparse_features)
        assert batch.true_probabilities is not None
        found.update(logits, batch.labels, batch.true_probabilities)
        best.update(torch.logit(batch.true_probabilities), batch.labels)
    whole, bayes = (
        ClickMetrics.from_state(mesh.total(metrics.state()).cpu()).result()
        for metrics in (found, best)
    )
    return {**whole, "bayes_auc": bayes["auc"]}
