"""What users give to `shard`, `Optimizer`, `make_plan`, `verify` that is something else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from tests.ranks import run_on_ranks
from tests.test_alike import DIM, ROWS, SGD, Model, features, plan_for, with_hot

GIVEN: dict[str, Any] = {
    "a class": (SGD, torch.optim.Adagrad, "got the class torch.Adagrad; the rule of that name is"),
    "a rule's class": (SGD, rm.SGD, "got the class rowmesh.SGD; the rule of that name is rm.SGD"),
    "an optimiser": (
        SGD,
        "made",
        "sparse must be an update rule of rowmesh, .* got an object of type Adam",
    ),
    "a number": (SGD, 0.01, "sparse must be an update rule of rowmesh, .* got 0.01"),
    "nothing": (SGD, None, "sparse must be an update rule of rowmesh, .* got None"),
    "dense optimiser": (
        "made",
        rm.SGD(),
        "dense must make the optimiser .* got an object of type Adam",
    ),
    "dense None": (None, rm.SGD(), "dense must make the optimiser of the layers .* got None"),
    "dense rate": (0.1, rm.SGD(), "dense must make the optimiser of the layers .* got 0.1"),
    "makes none": (lambda parameters: None, rm.SGD(), "but what was given made None"),
    "makes a rule": (
        lambda parameters: rm.SGD(),
        rm.SGD(),
        "but what was given made an object of type SGD",
    ),
    "others": ("others", rm.SGD(), r"an optimiser of a parameter of shape \[3\] that is no"),
    "lbfgs": (torch.optim.LBFGS, rm.SGD(), "dense made an LBFGS"),
}


def single(width: int = 1) -> tuple[Mesh, Model]:
    mesh, model = rm.init_mesh(), Model(width=width)
    rm.shard(model, plan_for(mesh, model), mesh)
    return mesh, model


@pytest.mark.parametrize("how", GIVEN)
def test_what_is_no_optimiser_is_said_and_another_can_be_made(how: str) -> None:
    _, model = single()
    dense, sparse, sentence = GIVEN[how]
    made = torch.optim.Adam(model.parameters())
    other = nn.Parameter(torch.zeros(3))
    if dense == "others":
        dense = lambda parameters: torch.optim.SGD([*parameters, other])  # noqa: E731
    dense, sparse = (made if given == "made" else given for given in (dense, sparse))
    with pytest.raises(rm.InputError, match=sentence):
        rm.Optimizer(model, dense=dense, sparse=sparse)
    with pytest.raises(rm.InputError, match=sentence):
        rm.Oracle(Model(), dense=dense, sparse=sparse)
    optimizer = rm.Optimizer(model, dense=SGD, sparse=rm.SGD())
    model(features(0)).mean().backward()
    optimizer.step()


def test_a_frozen_layer_may_be_among_the_parameters_of_the_dense_optimiser() -> None:
    mesh, model = rm.init_mesh(), Model()
    model.out.bias.requires_grad_(False)
    rm.shard(model, plan_for(mesh, model), mesh)
    rm.Optimizer(model, dense=lambda _: SGD(model.parameters()), sparse=rm.SGD())


def test_a_model_without_trained_layers_needs_no_dense_optimiser() -> None:
    mesh, model = rm.init_mesh(), Model()
    model.out.requires_grad_(False)
    rm.shard(model, plan_for(mesh, model), mesh)
    assert rm.Optimizer(model, dense=None, sparse=rm.SGD()).dense is None  # type: ignore[arg-type]


def test_an_optimizer_takes_the_very_model_that_was_sharded_and_only_one() -> None:
    _, model = single()
    with pytest.raises(rm.InputError, match=r"takes the model that was sharded: give it .0"):
        rm.Optimizer(nn.Sequential(model), dense=SGD, sparse=rm.SGD())
    with pytest.raises(rm.InputError, match=r"takes a sharded model: call rm\.shard"):
        rm.Optimizer(Model(), dense=SGD, sparse=rm.SGD())
    rm.Optimizer(model, dense=SGD, sparse=rm.SGD())
    with pytest.raises(rm.InputError, match=r"has an rm\.Optimizer already"):
        rm.Optimizer(model, dense=SGD, sparse=rm.SGD())


def test_a_sharded_model_is_not_planned_sharded_or_verified_again() -> None:
    mesh, model = single()
    plan = plan_for(mesh, Model())
    for found, part in (
        (model, "this model"),
        (nn.Sequential(model), "'0' of this model"),
        (model.tables, "this model"),
        (nn.ModuleList([Model(), model.tables]), "'1' of this model"),
    ):
        with pytest.raises(rm.PlanError, match=rf"rm\.make_plan takes .*, but {part} is sharded"):
            rm.make_plan(found, mesh.topology)
        with pytest.raises(
            rm.PlanError, match=rf"rm\.shard takes .*, but {part} is sharded already"
        ):
            rm.shard(found, plan, mesh)
        with pytest.raises(rm.PlanError, match=rf"rm\.Oracle takes .*, but {part} is sharded"):
            rm.Oracle(found, dense=SGD, sparse=rm.SGD())
    settings: Any = {"dense": SGD, "sparse": rm.SGD()}
    with pytest.raises(rm.InputError, match=r"rm\.verify takes a function that builds the model"):
        rm.verify(model, plan, mesh, [], **settings)
    with pytest.raises(rm.PlanError, match=r"rm\.shard takes a model before rm.shard, but this"):
        rm.verify(lambda: model, plan, mesh, [], **settings)
    copy = rm.unshard(model)
    assert copy is not None
    rm.shard(copy, rm.make_plan(copy, mesh.topology), mesh)


def others_files(mesh: Mesh, folder: str, how: str) -> list[str]:
    """Loads a file of its own on each rank, which differ on the last rank if ``how`` says so."""
    model = Model()
    plan = with_hot(plan_for(mesh, model), [1], mesh.world)
    rm.shard(model, plan, mesh)
    optimizer = rm.Optimizer(model, dense=SGD, sparse=rm.SGD())
    is_other = mesh.rank == mesh.world - 1
    path = Path(folder) / f"{mesh.rank}.pt"
    value = 2.0 if is_other and how == "file" else 1.0
    torch.save({name: torch.full((ROWS, DIM), value) for name in ("user", "item")}, path)
    other = with_hot(plan_for(mesh, Model()), [2 + (is_other and how == "tiers")], mesh.world)
    said = []
    for use in (
        lambda: rm.load_full_state_dict(model, path, strict=False),
        lambda: rm.change_tiers(model, other, optimizer=optimizer),
        lambda: rm.change_tiers(Model(), other, optimizer=optimizer),
    ):
        try:
            use()
            said.append("")
        except rm.RowmeshError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("how", ["", "file", "tiers"])
def test_other_files_or_tiers_on_ranks_are_refused_on_all(how: str, tmp_path: Path) -> None:
    found = run_on_ranks(2, others_files, str(tmp_path), how)
    assert found[0] == found[1]
    loaded, changed, unsharded = found[0]
    assert bool(loaded) == (how == "file")
    assert not loaded or "must load the same file, but 'tables.embedding_bags." in loaded
    assert bool(changed) == (how == "tiers")
    assert not changed or "ranks disagree: table 'user': its hot rows is " in changed
    assert unsharded.startswith("change_tiers takes a sharded model")
