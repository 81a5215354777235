"""A model may change what a collection gives it in place, before and after `rm.shard`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.optim import SGD
from rowmesh.planners import Constraints, Pin
from tests.ranks import run_on_ranks

KINDS = ["one dim", "two dims", "mean", "sequences", "frozen"]
NUM_ROWS = 12


def collection_of(kind: str) -> nn.Module:
    dims = (4, 8) if kind == "two dims" else (4, 4)
    if kind == "sequences":
        return rm.EmbeddingCollection([rm.EmbeddingConfig(**t) for t in tables(dims)], seed=3)
    pooling = rm.PoolingType.MEAN if kind == "mean" else rm.PoolingType.SUM
    bags = [rm.EmbeddingBagConfig(pooling=pooling, **t) for t in tables(dims)]
    found = rm.EmbeddingBagCollection(bags, seed=3)
    if kind == "frozen":
        found.table_modules()["a"].weight.requires_grad_(False)
    return found


def tables(dims: tuple[int, int]) -> list[dict[str, Any]]:
    names = [("a", ["x", "y"]), ("b", ["z"])]
    return [
        {"name": n, "num_embeddings": NUM_ROWS, "embedding_dim": d, "feature_names": f}
        for (n, f), d in zip(names, dims, strict=True)
    ]


def double_(out: Any) -> Tensor:
    """Every way to reach the vectors, each changed in place."""
    if isinstance(out, dict):
        for jagged in out.values():
            jagged.values().mul_(2.0)
        return torch.cat([out[key].values().relu_().sum(1) for key in sorted(out)])
    out.values().mul_(2.0)
    out["x"].add_(0.5)
    return out.values().relu_()


def double(out: Any) -> Tensor:
    """The same, with nothing changed in place."""
    if isinstance(out, dict):
        return torch.cat([(2.0 * out[key].values()).relu().sum(1) for key in sorted(out)])
    values = 2.0 * out.values()
    width = out["x"].shape[1]
    return torch.cat([values[:, :width] + 0.5, values[:, width:]], dim=1).relu()


class Model(nn.Module):
    def __init__(self, kind: str, head: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.collection, self.head = collection_of(kind), head
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: rm.KeyedJaggedTensor) -> Tensor:
        found = self.head(self.collection(features)) * self.scale
        return found.sum() * features.lengths().new_ones(features.stride(), dtype=found.dtype)


def batch(rank: int, step: int) -> rm.KeyedJaggedTensor:
    def ids(first: int) -> Tensor:
        return (torch.tensor([3, 3, 5, 1, 7, 0, 3, 2]) + first + step + rank) % NUM_ROWS

    jagged = rm.JaggedTensor(ids(0), lengths=torch.tensor([3, 0, 5]))
    return rm.KeyedJaggedTensor.from_dict(
        {"x": jagged, "y": rm.JaggedTensor(ids(1)[:3], lengths=torch.ones(3).int()), "z": jagged}
    )


def train(mesh: Mesh, kind: str, in_place: bool, depth: int) -> Any:
    """Losses of some steps and of evaluations between them, and the tables."""
    model = Model(kind, double_ if in_place else double)
    constraints = Constraints(pin={"a": Pin(split="row_wise")}) if mesh.world > 1 else None
    plan = rm.make_plan(model, mesh.topology, constraints=constraints)
    rm.shard(model, replace(plan, depth=depth), mesh)
    optimizer = rm.Optimizer(
        model, dense=lambda parameters: torch.optim.SGD(parameters, lr=0.01), sparse=SGD(lr=0.01)
    )
    losses = []
    for features in rm.Pipeline(model).batches([batch(mesh.rank, step) for step in range(4)]):
        found = model(features)
        mesh.mean(found).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [found.detach(), model(batch(mesh.rank, 9)), model(batch(mesh.rank, 9))]
    with torch.inference_mode():
        losses.append(model(batch(mesh.rank, 9)).clone())
    return losses, rm.full_state_dict(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "depth"), [(1, 1), (2, 1), (2, 2)])
def test_a_sharded_output_may_be_changed_in_place(kind: str, world: int, depth: int) -> None:
    changed, kept = (run_on_ranks(world, train, kind, way, depth) for way in (True, False))
    for (losses, tables), (expected, wanted) in zip(changed, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        assert tables.keys() == wanted.keys()
        assert all(torch.equal(tables[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_so_may_an_unsharded_one(kind: str) -> None:
    grads = []
    for head in (double_, double):
        model = Model(kind, head)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            model(batch(0, 0))
        model(batch(0, 0)).sum().backward()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for in_place, copied in zip(*grads, strict=True):
        assert torch.equal(in_place.to_dense(), copied.to_dense())


def verified(mesh: Mesh, kind: str) -> str:
    plan = rm.make_plan(Model(kind, double_), mesh.topology)
    batches = [batch(mesh.rank, step) for step in range(2)]
    found = rm.verify(
        lambda: Model(kind, double_),
        plan,
        mesh,
        batches,
        dense=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        sparse=SGD(lr=0.01),
    )
    return str(found)


@pytest.mark.parametrize("kind", ["one dim", "sequences"])
def test_the_oracle_takes_such_a_model_too(kind: str) -> None:
    assert run_on_ranks(2, verified, kind)[0].startswith("verified")
