"""Ways to use a mesh that would train wrongly, or end in a raw traceback: a sentence instead."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from tests.processes import finish, start_ranks
from tests.ranks import run_on_ranks
from tests.test_alike import SGD, Model, features, plan_for

OPENING = Path(__file__).parent / "scripts" / "opening.py"
ODD: dict[str, Any] = {
    "alike": 1,
    "float": 1.0,
    "fp64": torch.tensor(1, dtype=torch.float64),
    "two": torch.tensor([1, 2]),
    "many": torch.arange(40),
    "none": torch.arange(0),
    "bool": torch.tensor(True),
}


def total_of(mesh: Mesh, how: str) -> Any:
    value = ODD[how] if mesh.rank == mesh.world - 1 else 1
    try:
        found: Any = mesh.total(value).item()
    except rm.InputError as error:
        found = str(error)
    return found, mesh.total(torch.arange(3.0)).tolist()


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("how", ODD)
def test_total_of_other_dtypes_or_sizes_is_refused_on_all_ranks(
    how: str, shared_memory: bool
) -> None:
    world = 3
    found = run_on_ranks(world, total_of, how, shared_memory=shared_memory, debug=False)
    assert all(each == found[0] for each in found)
    assert found[0][1] == [0.0, 3.0, 6.0], "the mesh can be used afterwards"
    if how in ("alike", "bool"):
        assert found[0][0] == world
    else:
        assert "rank 0 calls total of 1 x int64, rank 2 total of " in found[0][0]


def gather_beside_total(mesh: Mesh) -> str:
    try:
        if mesh.rank:
            mesh.gather_objects("x")
        else:
            mesh.total(torch.tensor([1, 2]))
    except rm.InputError as error:
        return str(error)
    return ""


def test_ranks_that_call_different_things_are_told() -> None:
    found = run_on_ranks(2, gather_beside_total)
    assert found[0] == found[1]
    assert "rank 0 calls total of 2 x int64, rank 1 gather_objects" in found[0]


def bytes_of_totals(mesh: Mesh) -> Any:
    sizes = []
    for value in (1, torch.zeros(5, dtype=torch.float64), torch.zeros(3, dtype=torch.float16)):
        mesh.ledger.reset()
        total = mesh.total(value)
        assert total.shape == torch.as_tensor(value).shape
        sizes.append(mesh.ledger.by_edge()["counts"]["host"])
    return sizes


def test_a_total_sends_16_bytes_and_what_is_beyond_8() -> None:
    assert run_on_ranks(3, bytes_of_totals) == [[2 * 16, 2 * (16 + 32), 2 * 16]] * 3


def scaled(mesh: Mesh, how: str) -> list[str]:
    """Three steps with a loss made as ``how`` says; what was warned of."""
    model = Model()
    rm.shard(model, plan_for(mesh, model), mesh)
    optimizer = rm.Optimizer(model, dense=SGD, sparse=rm.SGD(lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "ignored":
            warnings.filterwarnings("ignore", "backward without mesh.mean")
        for step in range(3):
            losses = model(features(mesh.rank, step))
            if how == "two forwards":  # the first one's mean comes after the second
                others = model(features(mesh.rank, step + 3))
                (mesh.mean(losses) + mesh.mean(others)).backward()
            elif how == "mean":
                mesh.mean(losses).backward()
            elif how == "count":
                mesh.mean(losses, count=100).backward()
            elif how == "mean before":  # that was of another batch
                mesh.mean(torch.ones(6)) if step == 0 else None
                model(features(mesh.rank)).mean().backward()
            else:
                if how == "only shown":
                    float(mesh.mean(losses.detach()) + mesh.mean(losses).detach())
                losses.mean().backward()
            optimizer.step()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("how", "world", "times"),
    [
        ("mean", 2, 0),
        ("two forwards", 2, 0),
        ("count", 2, 0),
        ("ignored", 2, 0),
        ("loss.mean()", 1, 0),
        ("loss.mean()", 2, 1),
        ("mean before", 2, 1),
        ("only shown", 2, 1),
    ],
)
def test_a_backward_without_mesh_mean_is_warned_of_once(how: str, world: int, times: int) -> None:
    for found in run_on_ranks(world, scaled, how):
        assert len(found) == times
        assert all(text.startswith("backward without mesh.mean: gradients are") for text in found)


def closed(mesh: Mesh) -> list[str]:
    model = Model()
    rm.shard(model, plan_for(mesh, model), mesh)
    optimizer = rm.Optimizer(model, dense=SGD, sparse=rm.SGD(lr=0.1))
    mesh.mean(model(features(mesh.rank))).backward()
    mesh.total(0)  # all is received
    mesh.wire.segment = None  # the next body's
    mesh.close()
    said = []
    for use in (
        lambda: model(features(mesh.rank)),
        optimizer.step,
        lambda: mesh.total(1),
        lambda: mesh.gather_objects("x"),
        lambda: rm.full_state_dict(model),
        lambda: rm.shard(Model(), plan_for(mesh, Model()), mesh),
        lambda: next(mesh.batches([])) if False else mesh.later("x", int, of=mesh),
        mesh.close,
    ):
        try:
            use()
            said.append("")
        except rm.RowmeshError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_closed_mesh_says_so_and_may_be_closed_again() -> None:
    for *uses, again in run_on_ranks(2, closed, shared_memory=False):
        assert all(text.startswith("StepError: the mesh is closed: ") for text in uses), uses
        assert again == ""


def forked(mesh: Mesh) -> Any:
    """A child that fails, closes and uses the mesh, and says what it heard."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mesh.fail(ValueError("of the child"))
            mesh.close()
            mesh.bulletin.publish("of the child")
            mesh.total(1)
        except rm.StepError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    return said, mesh.bulletin.published(), mesh.total(1).item()


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    for rank, (said, published, total) in enumerate(run_on_ranks(2, forked)):
        assert said.startswith(f"this process was forked from rank {rank}")
        assert published is None
        assert total == 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
@pytest.mark.parametrize(
    "how", [pytest.param("shared", marks=pytest.mark.nightly), "gloo", "given"]
)
def test_meshes_opened_and_closed_again_leave_no_descriptors_or_threads(
    how: str, tmp_path: Path
) -> None:
    ended = [finish(r) for r in start_ranks([str(OPENING), how, str(tmp_path)], ranks=2)]
    assert [code for code, _, _ in ended] == [0, 0], ended
    for rank in range(2):
        counts = json.loads((tmp_path / f"held-{rank}").read_text())
        assert all(last <= early for last, early in zip(counts[-1], counts[1], strict=True)), counts


def test_forked_children_end_without_a_word_to_other_ranks(tmp_path: Path) -> None:
    ended = [finish(r) for r in start_ranks([str(OPENING), "fork", str(tmp_path)], ranks=2)]
    assert [code for code, _, _ in ended] == [0, 0], ended
    codes, published = json.loads((tmp_path / "held-0").read_text())
    assert published is None
    assert codes == [1, 3, 1, -15]


def nothing(mesh: Mesh) -> tuple[int, ...]:
    return tuple(mesh.total(torch.zeros(0, 3)).shape)


def test_the_total_of_nothing_is_nothing() -> None:
    assert run_on_ranks(2, nothing) == [(0, 3)] * 2
