"""`state_dict` and `load_state_dict` of a sharded model: whole on one rank, told on several."""

import io
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import RowmeshWarning
from tests.cases import DENSE, RULES, Case, Collection, Model, Table
from tests.ranks import run_on_ranks


class Both(nn.Module):
    """Collections of a case, one of them at a second path, and tied embeddings."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.kept = Model(case), nn.BatchNorm1d(2)
        self.again = self.case.collections[0]
        self.a, self.b = nn.Embedding(6, 4), nn.Embedding(6, 4)
        self.b.weight = self.a.weight

    def forward(self, batch: dict[str, Any]) -> Tensor:
        losses = self.case(batch)
        ids = torch.arange(len(losses)) % 6
        return losses + (self.a(ids) * self.b(ids + 0)).sum(1)


def make_case(world: int) -> Case:
    bags = (
        Table(rows=9, dim=4, ranks=tuple(range(world)), hot=(1, 3)),
        Table(rows=7, dim=8, ranks=(0,), dtype="bf16"),
    )
    ids = [[[[[1, 3], [2]]] * 3 for _ in range(world)] for _ in range(2)]
    sequence = (Table(rows=5, dim=4, ranks=(0,)),)
    return Case(
        world=world,
        collections=(Collection(tables=bags), Collection(tables=sequence, kind="sequence")),
        ids=ids,
    )


def make(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return rm.adopt(Both(case))


def shard(mesh: Mesh, case: Case) -> tuple[nn.Module, rm.Optimizer]:
    """Sharded by the case's plan, its hot rows among it; embeddings by the planner's."""
    model = make(case)
    plan = rm.make_plan(model, mesh.topology)
    mine = {t.name: replace(t, collection=f"case.{t.collection}") for t in case.plan().tables}
    plan = replace(plan, tables=tuple(mine.get(t.name, t) for t in plan.tables)).validate()
    rm.shard(model, plan, mesh)
    return model, rm.Optimizer(model, dense=DENSE["sgd"], sparse=RULES["adagrad"])


def train(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer, case: Case) -> None:
    for step in range(len(case.ids)):
        mesh.mean(model(case.batch(step, mesh.rank))).backward()
        optimizer.step()


def test_on_one_rank_they_are_the_unsharded_models() -> None:
    case, mesh = make_case(1), rm.init_mesh()
    model, optimizer = shard(mesh, case)
    train(mesh, model, optimizer, case)
    torch.save(model.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    state = torch.load(buffer)
    expected = rm.full_state_dict(model)
    assert state.keys() == expected.keys() == make(case).state_dict().keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    inner = model.case.collections[0].state_dict(prefix="x.")
    assert list(inner) == ["x.embedding_bags.c0_t0.weight", "x.embedding_bags.c0_t1.weight"]
    plain = rm.unshard(model)
    plain.load_state_dict(state)
    assert plain.state_dict().keys() == state.keys()

    other, _ = shard(mesh, case)
    before = rm.full_state_dict(other)
    assert not torch.equal(before["a.weight"], state["a.weight"])
    found = other.load_state_dict(state)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    batch = case.batch(0, 0)
    assert torch.equal(other(batch), model(batch)), "hot copies too"
    again, _ = shard(mesh, case)
    again.load_state_dict(rm.unshard(model).state_dict())
    assert torch.equal(again(batch), model(batch))


def test_on_one_rank_keys_and_shapes_are_checked_as_torch_does() -> None:
    case, mesh = make_case(1), rm.init_mesh()
    model, _ = shard(mesh, case)
    state = model.state_dict()
    key = "case.collections.0.embedding_bags.c0_t0.weight"
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{key}"'):
        model.load_state_dict({k: v for k, v in state.items() if k != key})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more.weight"'):
        model.load_state_dict(state | {"more.weight": state[key]})
    for wrong in (state[key][1:], "text"):
        with pytest.raises(RuntimeError, match=rf"{key} is .*table's shape is \[9, 4\]"):
            model.load_state_dict(state | {key: wrong})
    found = model.load_state_dict({key: state[key] + 1.0}, strict=False)
    assert found.unexpected_keys == []
    assert torch.equal(model.state_dict()[key], state[key] + 1.0)


def on_two(mesh: Mesh, folder: str) -> dict[str, Any]:
    case = make_case(2)
    model, optimizer = shard(mesh, case)
    train(mesh, model, optimizer, case)
    whole = rm.full_state_dict(model)  # warnings are errors: its own calls say nothing
    rm.export_safetensors(model, f"{folder}/exported")
    rm.Checkpoints(f"{folder}/checkpoints").save(1, model=model, optimizer=optimizer, mesh=mesh)
    rm.unshard(model)
    rm.load_full_state_dict(model, whole)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dense = model.state_dict()
        model.case.state_dict()
    refused, before = [], model.kept.weight.detach().clone()
    for strict in (True, False):
        given = {"a.weight": torch.zeros(6, 4), "kept.weight": before + 1.0}
        try:
            model.load_state_dict(given, strict=strict)
        except rm.InputError as error:
            refused.append(str(error))
    try:
        model.load_state_dict(dense)
    except RuntimeError as error:
        refused.append(str(error))
    same = torch.equal(model.kept.weight, before)
    missing = model.load_state_dict(dense, strict=False).missing_keys
    return {
        "told": [(w.category, str(w.message), w.filename) for w in told],
        "keys": set(dense),
        "refused": refused,
        "same": same,
        "missing": missing,
    }


def test_on_several_ranks_what_is_missing_is_said_once(tmp_path: Any) -> None:
    runs = run_on_ranks(2, on_two, str(tmp_path))
    tables = {key for key in make(make_case(2)).state_dict() if "embedding" in key}
    tables |= {"a.weight", "b.weight"}
    for run in runs:
        ((category, text, _),) = run["told"]
        assert category is RowmeshWarning
        assert "rm.full_state_dict(model)" in text
        assert "rm.Checkpoints" in text
        assert not run["keys"] & tables
        *refused, strict = run["refused"]
        words = "cannot set table 'a.weight', whose rows lie on 2 ranks: call rm.load_full_state"
        assert all(words in sentence for sentence in refused)
        assert "Missing key(s)" in strict
        assert (len(refused), run["same"]) == (2, True), "nothing has changed"
        assert set(run["missing"]) == tables
