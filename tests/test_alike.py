"""Ranks that disagree about what `rm.shard` and `rm.Optimizer` are given: one sentence on all."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.placement import Copies, Tier, make_hot_set
from rowmesh.planners import Constraints, Pin
from rowmesh.runtime.embeddings import sharded_engines
from tests.ranks import run_on_ranks

ROWS, DIM = 60, 4
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Model(nn.Module):
    """Two tables, one layer, a loss per sample."""

    def __init__(self, *, device: str = "meta", seed: int = 0, width: int = 1) -> None:
        super().__init__()
        tables = [
            rm.EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]
            )
            for name in ("user", "item")
        ]
        self.tables = rm.EmbeddingBagCollection(tables, device=device, seed=seed)
        self.out = nn.Linear(2 * DIM, width)

    def forward(self, features: rm.KeyedJaggedTensor) -> torch.Tensor:
        return self.out(self.tables(features).values()).sum(1)


def features(rank: int, step: int = 0) -> rm.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = {name: torch.randint(0, ROWS, (6,), generator=generator) for name in ("user", "item")}
    return rm.KeyedJaggedTensor.from_dense(ids)


def plan_for(mesh: Mesh, model: nn.Module, split: str = "row_wise", **pins: str) -> rm.Plan:
    pin = {table: Pin(split=word) for table, word in pins.items()}
    return rm.make_plan(model, mesh.topology, split=split, constraints=Constraints(pin=pin))


def with_hot(plan: rm.Plan, ids: list[int], world: int) -> rm.Plan:
    """The plan with hot rows of the first table."""
    first = plan.tables[0]
    hot = make_hot_set(first.name, np.array(ids))
    tier = Tier(ranks=tuple(range(world)), copies=Copies.WORLD, rows=hot)
    first = replace(first, tiers=(tier, *first.tiers))
    return replace(plan, tables=(first, *plan.tables[1:])).validate()


def sharded(mesh: Mesh, how: str) -> None:
    """Shard and make an optimiser, the last rank in another way than the others."""
    is_other = mesh.rank == mesh.world - 1
    odd = how if is_other else ""
    model = Model(
        device="cpu" if odd == "values" else "meta",
        seed=7 if odd == "seed" else 0,
        width=2 if odd == "layer" else 1,
    )
    plan = plan_for(mesh, model, **({"item": "table_wise"} if odd == "pin" else {}))
    if how == "hot rows":
        plan = with_hot(plan, [1, 2 + is_other], mesh.world)
    if odd == "depth":
        plan = replace(plan, depth=2)
    if odd == "mesh":
        plan = rm.make_plan(model, rm.Topology(hosts=1, local=mesh.world + 1))
    if odd == "frozen":
        model.out.bias.requires_grad_(False)
        plan = plan_for(mesh, model)
    rm.shard(model, plan, mesh)
    rule: Any = rm.RowwiseAdagrad(lr=0.2 if odd == "rate" else 0.1)
    dense: Any = torch.optim.Adam if odd == "dense" else SGD
    if odd == "rule":
        rule = rm.SGD(lr=0.1)
    if odd == "dense rate":
        dense = functools.partial(torch.optim.SGD, lr=0.3)
    rm.Optimizer(model, dense=dense, sparse=rule)


def complaint(mesh: Mesh, how: str) -> str:
    try:
        sharded(mesh, how)
    except rm.RowmeshError as error:
        mesh.total(0)  # the mesh can be used afterwards
        return f"{type(error).__name__}: {error}"
    return ""


SENTENCES = {
    "": "",
    "pin": "table 'item': its split is row-wise on rank 0 and table-wise on rank {last}: build",
    "hot rows": "table 'user': its hot rows is ",
    "depth": "the plan's depth is 1 on rank 0 and 2 on rank {last}",
    "seed": "the initial values of table 'user' are of seed 0, from ",
    "layer": "'out.weight' is float32 [1, 8], trained on rank 0 and float32 [2, 8], trained on",
    "frozen": "'out.bias' is float32 [1], trained on rank 0 and float32 [1], frozen on rank {last}",
    "values": "table 'user' has values on rank {last}, but is on 'meta' on rank 0",
    "mesh": "rank {last}: the plan is for 1 hosts x ",
    "rule": "the update rule of the tables is RowwiseAdagrad on rank 0 and SGD on rank {last}",
    "rate": "lr of the tables' update rule is 0.1 on rank 0 and 0.2 on rank {last}",
    "dense": "the optimiser of the layers is SGD on rank 0 and Adam on rank {last}",
    "dense rate": "lr of param group 0 is 0.1 on rank 0 and 0.3 on rank {last}",
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", SENTENCES)
def test_ranks_that_disagree_all_say_what_differs_and_where(how: str, world: int) -> None:
    found = run_on_ranks(world, complaint, how)
    assert len(set(found)) == 1, found
    assert SENTENCES[how].format(last=world - 1) in found[0]
    assert found[0].startswith("PlanError" if how else "")


class Values(nn.Module):
    """As `Model`, its tables with values as other libraries make them: of the global generator."""

    def __init__(self, *, seed: int | None) -> None:
        super().__init__()
        model = Model(device="cpu" if seed is not None else "meta")
        self.tables, self.out = model.tables, model.out
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for table in self.tables.embedding_bags.values():
                nn.init.normal_(table.weight, generator=generator)


def values_of(mesh: Mesh, seeds: list[int | None], split: str) -> Any:
    """Tables of a model whose ranks have other values; all copies that this rank holds."""
    model = Values(seed=seeds[mesh.rank])
    before = {name: t.weight.detach().clone() for name, t in model.tables.embedding_bags.items()}
    plan = plan_for(mesh, model, "row_wise" if split == "hot" else split)
    if split == "hot":
        plan = with_hot(plan, [0, 3, 59], mesh.world)
    mesh.ledger.reset()
    rm.shard(model, plan, mesh)
    sent = mesh.ledger.by_edge().get("checkpoint", {})
    copies = [stack.copies for stack in sharded_engines(model)[0].stacks]
    return before, rm.full_state_dict(model), copies, sum(sent.values())


@pytest.mark.parametrize("split", ["data_parallel", "row_wise", "column_wise", "hot"])
@pytest.mark.parametrize("seeds", [[3, 3], [3, 4], [3, None]])
def test_values_are_rank_0s_and_travel_only_if_ranks_have_others(
    seeds: list[int | None], split: str
) -> None:
    found = run_on_ranks(2, values_of, seeds, split)
    for name, values in found[0][0].items():
        assert torch.equal(found[0][1][f"tables.embedding_bags.{name}.weight"], values)
    for here, there in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(here, there)
    assert (found[0][3] > 0) == (seeds[1] != 3)


def unequal(mesh: Mesh, how: str) -> list[str]:
    """Two steps, of which the last rank makes the second in another way."""
    model = Model()
    rm.shard(model, plan_for(mesh, model), mesh)
    optimizer = rm.Optimizer(model, dense=SGD, sparse=rm.SGD(lr=0.1))
    is_other, said = mesh.rank == mesh.world - 1, []
    for step in range(4):
        try:
            mesh.mean(model(features(mesh.rank, step))).backward()
        except rm.StepError as error:
            said.append(str(error))
            break
        if step == 1 and is_other and how.startswith("rate"):
            optimizer.param_groups[-1 if how == "rate of tables" else 0]["lr"] = 0.5
        if step == 1 and is_other and how == "zero_grad":
            optimizer.zero_grad()
        else:
            optimizer.step()
        optimizer.zero_grad()
    mesh.total(0)
    return [str(step), *said]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("", None),
        ("zero_grad", "rank {last} has made 1 fewer steps than rank 0, and dropped gradients"),
        ("rate of tables", "lr of param group sparse was 0.1 on rank 0 and 0.5 on rank {last}"),
        ("rate of layers", "lr of param group 0 was 0.1 on rank 0 and 0.5 on rank {last}"),
    ],
)
def test_a_step_that_ranks_make_otherwise_is_noticed_by_the_next_forward(
    how: str, sentence: str | None, world: int
) -> None:
    found = run_on_ranks(world, unequal, how)
    assert all(mine == found[0] for mine in found)
    assert found[0][0] == ("3" if sentence is None else "2")
    assert sentence is None or sentence.format(last=world - 1) in found[0][1]
