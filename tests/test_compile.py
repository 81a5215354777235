"""`torch.compile` of a model whose look-ups stay out of the graphs."""

import functools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.data import SyntheticClicks, SyntheticSequences
from rowmesh.features import empty_like
from rowmesh.models import DCN, DIN, DLRM
from rowmesh.runtime.embeddings import sharded_engines
from tests.ranks import run_on_ranks

CLICKS = SyntheticClicks(cardinalities=(30, 20, 9), batch_size=12, num_dense=3)
SEQUENCES = SyntheticSequences(num_items=30, mean_length=3.0, longest=5)
FEW, MANY = (6, 4, 0), (6, 6, 4, 0, 1, 5)  # samples of a step; rank 1 has one batch less
WAYS = ["wrapped", "in place", "before"]
FAST, ALL = ("eager", FEW), ("aot_eager", MANY)


def build(kind: str = "dlrm") -> nn.Module:
    torch.manual_seed(0)
    if kind == "din":
        sequences = rm.EmbeddingCollection(SEQUENCES.tables(4), device="meta", seed=3)
        model: Any = DIN(sequences, SEQUENCES.num_dense, (6, 1), (6, 1))
    else:
        tables = rm.EmbeddingBagCollection(CLICKS.tables(4), device="meta", seed=3)
        model = DLRM(tables, 3, (8, 4), (6, 1))
        if kind == "dcn":
            model = DCN(tables, 3, (8, 4), over_arch_layer_sizes=(6, 1), dcn_num_layers=2)
    return model


def batches(rank: int, sizes: Sequence[int] = FEW, kind: str = "dlrm") -> list[rm.Batch]:
    found = []
    for step, size in enumerate(sizes[: len(sizes) - rank]):
        source: Any = replace(SEQUENCES if kind == "din" else CLICKS, batch_size=max(size, 1))
        batch = next(source.batches(rank=rank, world=2, start=step))
        found.append(batch if size else empty_like(batch))
    return found


def start(mesh: Mesh, model: nn.Module, depth: int = 1) -> tuple[nn.Module, rm.Optimizer]:
    plan = rm.make_plan(model, mesh.topology, split="row_wise" if mesh.world > 1 else "auto")
    model = rm.shard(model, replace(plan, depth=depth), mesh)
    optimizer = rm.Optimizer(
        model, dense=functools.partial(torch.optim.SGD, lr=0.05), sparse=rm.SGD(lr=0.05)
    )
    return model, optimizer


def train(
    mesh: Mesh, way: str, depth: int, options: dict[str, Any], kind: str, sizes: Sequence[int]
) -> tuple[list[Tensor], dict[str, Tensor], list[bool]]:
    """Losses of every step and of an evaluation, weights, and which gradients left early."""
    torch._dynamo.reset()
    model: Any = build(kind)
    if way == "before":
        model = torch.compile(model, **options)
    model, optimizer = start(mesh, model, depth)
    if way == "wrapped":
        model = torch.compile(model, **options)
    elif way == "in place":
        model.compile(**options)
    losses, early = [], []
    for batch in rm.Pipeline(model).batches(batches(mesh.rank, sizes, kind)):
        found = model(batch)
        mesh.mean(found).backward()
        early += [bucket.is_launched for bucket in model._rowmesh_dense._buckets]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.detach())
    with torch.no_grad():
        losses.append(model(batches(mesh.rank, sizes, kind)[0]))
    return losses, rm.full_state_dict(model), early


@functools.cache
def eager(world: int, depth: int, kind: str, sizes: Sequence[int]) -> Any:
    return run_on_ranks(world, train, "not at all", depth, {}, kind, sizes)


def check(
    way: str,
    backend: str,
    sizes: Sequence[int],
    *,
    world: int = 1,
    depth: int = 1,
    kind: str = "dlrm",
    **options: Any,
) -> None:
    """A compiled run is within 1e-5 of the eager one, and gradients leave as early."""
    options["backend"] = backend
    compiled = run_on_ranks(world, train, way, depth, options, kind, sizes)
    for ours, theirs in zip(compiled, eager(world, depth, kind, sizes), strict=True):
        (losses, weights, early), (expected, wanted, as_early) = ours, theirs
        assert [len(a) for a in losses] == [len(a) for a in expected]
        for a, b in zip(losses, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert list(weights) == list(wanted)
        for key, value in weights.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-5, atol=1e-5)
        assert early == as_early
        assert all(early), "every bucket leaves with the backward"


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_trains_and_evaluates_as_an_eager_one(way: str) -> None:
    check(way, *FAST)


def test_so_it_does_on_two_ranks_with_batches_begun_ahead() -> None:
    check("in place", "aot_eager", FEW, world=2, depth=2)


@pytest.mark.parametrize("kind", ["dcn", "din"])
def test_so_do_the_other_models(kind: str) -> None:
    check("in place", *FAST, kind=kind)


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "depth"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["dlrm", "dcn", "din"])
def test_all_sizes_of_batches(kind: str, world: int, depth: int) -> None:
    check("in place", *ALL, world=world, depth=depth, kind=kind)


@pytest.mark.nightly
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_and_shapes(way: str, dynamic: bool | None) -> None:
    check(way, *ALL, world=2, dynamic=dynamic)


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)


@needs_compiler
def test_inductor() -> None:
    check("wrapped", "inductor", (6, 6), mode="default")


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["dlrm", "dcn", "din"])
@pytest.mark.parametrize("world", [1, 2])
def test_inductor_on_all_sizes(world: int, kind: str) -> None:
    check("wrapped", "inductor", MANY, world=world, depth=world, kind=kind)


def count_breaks(mesh: Mesh, kind: str) -> Any:
    torch._dynamo.reset()
    model, _ = start(mesh, build(kind))
    found = torch._dynamo.explain(model)(batches(mesh.rank, FEW, kind)[0])
    return found.graph_count, [reason.reason for reason in found.break_reasons]


@pytest.mark.parametrize(
    ("kind", "graphs", "names"),
    [
        ("dlrm", 3, ["EmbeddingBagCollection.forward"]),
        ("dcn", 3, ["EmbeddingBagCollection.forward"]),
        ("din", 5, ["EmbeddingCollection.forward", "_only", "_for_each", "_padded"]),
    ],
)
def test_only_what_follows_from_ids_breaks_the_graph(
    kind: str, graphs: int, names: list[str]
) -> None:
    count, reasons = run_on_ranks(1, count_breaks, kind)[0]
    assert count <= graphs
    assert all(any(f"`{name}`" in reason for name in names) for reason in reasons), reasons


def names_and_plans(mesh: Mesh) -> Any:
    plain, wrapped = build(), torch.compile(build(), backend="eager")
    plans = [rm.make_plan(model, mesh.topology) for model in (plain, wrapped)]
    model, _ = start(mesh, wrapped)
    twice = None
    try:
        rm.shard(model, plans[0], mesh)
    except rm.PlanError as error:
        twice = str(error)
    alone = rm.unshard(model)
    prefixed = {f"_orig_mod.{key}": value for key, value in alone.state_dict().items()}
    fit = rm.load_full_state_dict(model, prefixed, rename={"_orig_mod.": ""})
    return plans[0] == plans[1], list(alone.state_dict()), len(fit.loaded), type(alone), twice


def test_names_are_those_of_the_model_inside() -> None:
    same, names, loaded, kind, twice = run_on_ranks(1, names_and_plans)[0]
    assert same
    assert names == list(build().state_dict())
    assert loaded == len(names)
    assert kind is DLRM
    assert "sharded already" in twice


def checkpointed(mesh: Mesh, folder: str) -> list[bool]:
    model, optimizer = start(mesh, torch.compile(build(), backend="eager"))
    for batch in batches(mesh.rank)[:2]:
        mesh.mean(model(batch)).backward()
        optimizer.step()
    rm.Checkpoints(folder).save(2, model=model, optimizer=optimizer, mesh=mesh)
    other, its_optimizer = start(mesh, build())
    rm.Checkpoints(folder).load(model=other, optimizer=its_optimizer, mesh=mesh)
    found = [rm.full_state_dict(m) for m in (model, other)]
    return [torch.equal(found[0][key], found[1][key]) for key in found[0]]


def test_a_checkpoint_of_a_compiled_model_is_one_of_the_model(tmp_path: Path) -> None:
    assert all(run_on_ranks(1, checkpointed, str(tmp_path))[0])


def verified(mesh: Mesh) -> str:
    torch._dynamo.reset()
    plan = rm.make_plan(build(), mesh.topology)
    found = rm.verify(
        lambda: torch.compile(build(), backend="eager"),
        plan,
        mesh,
        batches(mesh.rank)[:1],
        dense=functools.partial(torch.optim.SGD, lr=0.05),
        sparse=rm.SGD(lr=0.05),
    )
    return str(found)


def test_verify_takes_a_compiled_model() -> None:
    assert run_on_ranks(2, verified)[0].startswith("verified")


def compiled_alone(mesh: Mesh) -> Any:
    """A collection that was compiled by itself is one collection, sharded once."""
    model = build()
    model.embedding_bag_collection = torch.compile(model.embedding_bag_collection, backend="eager")
    model, _ = start(mesh, model)
    return len(sharded_engines(model)), model(batches(mesh.rank)[0]).detach()


def test_a_collection_compiled_by_itself_is_found_once() -> None:
    count, losses = run_on_ranks(1, compiled_alone)[0]
    assert count == 1
    assert torch.equal(losses, eager(1, 1, "dlrm", FEW)[0][0][0])


def whole_graph(mesh: Mesh) -> str:
    torch._dynamo.reset()
    model: Any = start(mesh, build())[0]
    model.over_arch.compile(backend="eager", fullgraph=True)
    mesh.mean(model(batches(mesh.rank)[0])).backward()
    model.compile(backend="eager", fullgraph=True)
    try:
        model(batches(mesh.rank)[0])
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


def test_a_whole_graph_is_one_of_the_layers_alone() -> None:
    assert "EmbeddingBagCollection.forward" in run_on_ranks(1, whole_graph)[0]


def accumulated(mesh: Mesh, way: str) -> dict[str, Tensor]:
    """Two backwards a step, and a norm that is clipped; the second step is left out."""
    torch._dynamo.reset()
    model, optimizer = start(mesh, build())
    if way != "eager":
        model.compile(backend="aot_eager")
    for step in range(3):
        with optimizer.accumulate():
            for batch in batches(mesh.rank)[:2]:
                mesh.mean(model(batch)).backward()
        optimizer.clip_grad_norm_(0.1)
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    return rm.full_state_dict(model)


def test_accumulated_clipped_and_skipped_steps_are_the_same() -> None:
    eager_weights, weights = (run_on_ranks(2, accumulated, way)[0] for way in ("eager", "compiled"))
    for key, value in eager_weights.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-5)
