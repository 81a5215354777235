"""One run: an arm trained on the ranks of a mesh, and its normalised entropy."""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from harness.quality import OneTable, count_rows, judge_clicks, rarest_of_samples
from torch import Tensor

import rowmesh as rm
from rowmesh.comm.agreement import on_rank_0
from rowmesh.features import Batch
from rowmesh.train.model import build_model
from rowmesh.train.optimiser import OptimiserConfig, make_optimizer, set_learning_rates

from .data import Trial
from .model import Wide

__all__ = ["ARMS", "CONTROL", "Arm", "Material", "crude", "prepare", "train"]

_COUNTED = 16  # batches of rank 0 that hot rows are chosen from
_HOT = 64


@dataclass(frozen=True, slots=True)
class Arm:
    """A name and its codecs; a ``crude`` arm sends fp32 but cripples gradients first."""

    name: str
    codecs: str = "fp32"
    is_crude: bool = False


CONTROL = "control: 2 bits, one scale"
ARMS = (
    Arm("fp32"),
    Arm("bf16", "bf16"),
    Arm("fp16", "fp16"),
    Arm("int8", "int8"),
    Arm("forward=fp16,backward=bf16", "forward=fp16,backward=bf16"),
    Arm(CONTROL, is_crude=True),
)


@dataclass(frozen=True, slots=True)
class Material:
    """What all arms of a seed share: this rank's batches, and what is known of rows."""

    source: OneTable
    batches: list[Batch]
    held_out: list[Batch]
    counts: Tensor
    stats: rm.Stats


def prepare(trial: Trial, mesh: rm.Mesh, *, seed: int) -> Material:
    """Read a seed's data once.

    Collective:
        All ranks.
    """
    source = OneTable(trial.source(seed))
    batches = list(islice(source.batches(rank=mesh.rank, world=mesh.world), trial.steps))
    held_out = list(source.held_out(rank=mesh.rank, world=mesh.world))
    counts = mesh.total(count_rows(batches, source.num_rows).double())
    features = [batch.sparse_features for batch in batches[:_COUNTED]]
    stats = on_rank_0(mesh, lambda: rm.Stats.from_batches(source.tables(trial.model.dim), features))
    return Material(source, batches, held_out, counts, stats)


def train(
    trial: Trial, arm: Arm, material: Material, mesh: rm.Mesh, *, rate: float, seed: int
) -> dict[str, Any]:
    """Train on this rank's batches, evaluate on all held-out ones.

    Collective:
        All ranks.
    """
    model = _build(trial, material.source, seed)
    plan = on_rank_0(
        mesh,
        lambda: rm.make_plan(
            model,
            mesh.topology,
            stats=material.stats,
            split="row_wise",
            exchange="rows",
            tiers=f"hot:{_HOT}",
            codecs=arm.codecs,
        ),
    )
    rm.shard(model, plan, mesh)
    if arm.is_crude:
        _cripple(model)
    how = OptimiserConfig(
        sparse_lr=rate * trial.sparse_lr,
        sparse_eps=trial.eps,
        dense="adam",
        dense_lr=rate * trial.dense_lr,
    )
    optimizer = make_optimizer(how, model)
    mesh.ledger.reset()
    for step, batch in enumerate(material.batches):
        set_learning_rates(how, optimizer, step=step, num_steps=len(material.batches))
        mesh.mean(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = sum(n for links in mesh.ledger.by_edge().values() for n in links.values())
    found = _evaluate(model, material, mesh)
    about = {"exactness": plan.exactness.value, "mb_step": sent / len(material.batches) / 1e6}
    return {"set": trial.name, "arm": arm.name, "rate": rate, "seed": seed, **about, **found}


def _build(trial: Trial, source: OneTable, seed: int) -> Any:
    if trial.is_wide:
        layers = trial.model.dense_layers
        return Wide(source, dim=trial.model.dim, dense_layers=layers, seed=seed)
    return build_model(trial.model, source, seed=seed)


def crude(grad: Tensor) -> Tensor:
    """-1, 0 or 1 times one scale for all of the tensor, its largest number: what is below half of
    that vanishes, as small rows do beside a large one where there is no scale for every row."""
    scale = grad.abs().max()
    return torch.round(grad / scale) * scale if float(scale) > 0 else grad


def _cripple(model: Any) -> None:
    """Every gradient through `crude` before it leaves its rank."""

    def hook(module: Any, args: Any, output: Any) -> None:
        if output.values().requires_grad:
            output.values().register_hook(crude)

    model.embedding_bag_collection.register_forward_hook(hook)
    for name, parameter in model.named_parameters():
        if not name.startswith("embedding_bag_collection"):
            parameter.register_hook(crude)


@torch.no_grad()
def _evaluate(model: Any, material: Material, mesh: rm.Mesh) -> dict[str, Any]:
    logits = [model.logits(b.dense_features, b.sparse_features) for b in material.held_out]
    mine = [
        (z, b.labels, b.true_probabilities, rarest_of_samples(b, material.counts))
        for z, b in zip(logits, material.held_out, strict=True)
    ]
    every = [part for rank in mesh.gather_objects(mine, edge=None) for part in rank]
    z, labels, rarest = (torch.cat([part[i] for part in every]) for i in (0, 1, 3))
    true = None if every[0][2] is None else torch.cat([part[2] for part in every])
    return judge_clicks(z, labels, true, rarest)
