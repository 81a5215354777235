"""`rm.Pipeline`: what it begins ahead, what it gives, and what goes wrong."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, StepError
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.pipeline import _features_of
from rowmesh.runtime.sets import pack_bits, unpack_bits
from tests.cases import DENSE, RULES, Case, Collection, Model, Table
from tests.ranks import RankError, run_on_ranks

ROWS = 64


def make_case(steps: int = 6, depth: int = 2, **kwargs: Any) -> Case:
    """Two row-wise tables, one with hot rows; ids 0 to 3 in every batch, others in one."""
    tables = (
        Table(rows=ROWS, dim=4, ranks=(0, 1)),
        Table(rows=ROWS, dim=4, ranks=(1, 0), hot=(0, 1, 2, 3)),
    )

    def ids(rank: int, step: int) -> list[list[list[int]]]:
        own = [4 + (10 * step + 5 * rank + k) % (ROWS - 4) for k in range(5)]
        return [[[0, 1], own[:3]], [[2, 3], own[3:]]]

    given = [[ids(rank, step) for rank in range(2)] for step in range(steps)]
    return Case(world=2, collections=(Collection(tables=tables),), ids=given, depth=depth, **kwargs)


def build(mesh: Mesh, case: Case) -> tuple[Any, rm.Optimizer]:
    model = rm.shard(Model(case), case.plan(), mesh)
    return model, rm.Optimizer(model, dense=DENSE["sgd"], sparse=RULES["rowwise"])


def train(mesh: Mesh, model: Any, opt: rm.Optimizer, batches: Any) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        found = model(batch)
        mesh.mean(found).backward()
        opt.step()
        opt.zero_grad()
        losses.append(found.detach())
    return losses


def leave(model: Any, source: Any) -> None:
    """End a loop, and wait for what it began: the ranks of the tests go on with others."""
    source.close()
    for engine in sharded_engines(model):
        engine.look_ahead.settle()


def count_late(mesh: Mesh, case: Case) -> tuple[int, int]:
    model, opt = build(mesh, case)
    ahead = sharded_engines(model)[0].look_ahead
    for batch in rm.Pipeline(model).batches(case.batches_of(mesh.rank)):
        mesh.mean(model(batch)).backward()
        for fetch in ahead.begun:  # before the step: rows of a step that is done are not late
            fetch.wait()
        opt.step()
        opt.zero_grad()
    return ahead.num_early, ahead.num_late


def test_rows_of_the_running_step_are_late_and_no_others() -> None:
    case = make_case()
    for early, late in run_on_ranks(2, count_late, case):
        # Ids 0 and 1 of the first table are in every batch but are late from the second on; those
        # of the second table are copied, and all other ids are new.
        assert late == 5
        assert early > 2 * late


def test_hot_rows_leave_few_late_ones() -> None:
    case = make_case()
    first, second = case.collections[0].tables
    hot = replace(case, collections=(Collection(tables=(replace(first, hot=(0, 1)), second)),))
    assert [late for _, late in run_on_ranks(2, count_late, hot)] == [0, 0]


def uneven(mesh: Mesh, case: Case, depth: int) -> list[int]:
    model, opt = build(mesh, case)
    batches = case.batches_of(mesh.rank)[: 5 if mesh.rank else 2]
    pipeline = rm.Pipeline(model, depth=depth)
    return [len(losses) for losses in train(mesh, model, opt, pipeline.batches(batches))]


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_ranks_with_loaders_of_different_length_end_after_the_same_step(depth: int) -> None:
    long, short = [2, 2, 2, 2, 2], [2, 2, 0, 0, 0]
    assert run_on_ranks(2, uneven, make_case(), depth) == [short, long]


def skipping(mesh: Mesh, case: Case) -> dict[str, torch.Tensor]:
    """Leave out the third batch; stop early and go on with another pipeline; evaluate between."""
    model, opt = build(mesh, case)
    batches = case.batches_of(mesh.rank)
    chosen = [batch for i, batch in enumerate(rm.Pipeline(model).batches(batches)) if i != 2]
    assert len(chosen) == len(batches) - 1
    for number, batch in enumerate(rm.Pipeline(model).batches(batches)):
        if number == 2:
            continue
        if number == 4:
            break
        train(mesh, model, opt, [batch])
        with torch.no_grad():
            model(batches[0])
    train(mesh, model, opt, rm.Pipeline(model).batches(batches[4:]))
    return rm.full_state_dict(model)


def test_batches_may_be_left_out_and_loops_left() -> None:
    found = run_on_ranks(2, skipping, make_case(depth=3))[0]
    expected = run_on_ranks(2, skipping, make_case(depth=1))[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def all_pooled(mesh: Mesh, case: Case) -> list[torch.Tensor]:
    model, opt = build(mesh, case)
    return train(mesh, model, opt, rm.Pipeline(model).batches(case.batches_of(mesh.rank)))


@pytest.mark.parametrize("hosts", [1, 2])
def test_tables_that_owners_pool_have_their_ids_ahead(hosts: int) -> None:
    """On two hosts of two ranks, sums are relayed."""
    ranks = (0, 1) if hosts == 1 else (2, 3)
    table = Table(rows=ROWS, dim=4, ranks=ranks[:hosts], by_host=hosts == 2, exchange="pooled")
    ids = [[[[[step, 9]]], [[[5], [step, 1, 1]]]] * hosts for step in range(5)]
    case = Case(
        world=2 * hosts, hosts=hosts, collections=(Collection(tables=(table,)),), ids=ids, depth=3
    )
    found = run_on_ranks(case.world, all_pooled, case, hosts=hosts)
    expected = run_on_ranks(case.world, all_pooled, replace(case, depth=1), hosts=hosts)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def begun_late(mesh: Mesh, case: Case) -> dict[str, torch.Tensor]:
    """A loop of its own whose step comes after another pipeline has begun."""
    model, opt = build(mesh, case)
    batches = case.batches_of(mesh.rank)
    found = model(batches[0])
    source = iter(rm.Pipeline(model).batches(batches))
    first = next(source)
    mesh.mean(found).backward()
    opt.step()
    train(mesh, model, opt, [first])
    train(mesh, model, opt, source)
    return rm.full_state_dict(model)


def test_rows_of_a_forward_that_was_not_begun_are_late_until_its_step() -> None:
    found = run_on_ranks(2, begun_late, make_case(depth=2))[0]
    expected = run_on_ranks(2, begun_late, make_case(depth=1))[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def set_rows(mesh: Mesh, case: Case) -> dict[str, torch.Tensor]:
    model, opt = build(mesh, case)
    batches = iter(rm.Pipeline(model).batches(case.batches_of(mesh.rank)))
    train(mesh, model, opt, [next(batches)])
    rm.load_pretrained(model, "c0_t0", torch.ones(ROWS, 4))
    train(mesh, model, opt, batches)
    return rm.full_state_dict(model)


def test_rows_that_are_set_between_steps_are_read_by_batches_begun_before() -> None:
    found = run_on_ranks(2, set_rows, make_case(depth=3))[0]
    expected = run_on_ranks(2, set_rows, make_case(depth=1))[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def sync_bytes(mesh: Mesh, case: Case) -> dict[str, Any]:
    """Gradients cleared before the forward, while a sync may be under way."""
    model, opt = build(mesh, case)
    mesh.ledger.reset()
    for batch in rm.Pipeline(model).batches(case.batches_of(mesh.rank)):
        opt.zero_grad()
        mesh.mean(model(batch)).backward()
        opt.step()
    opt.sync()
    found = mesh.ledger.by_edge()
    found.pop("look-ahead bits", None)
    return found


def test_every_batch_is_sent_once_also_around_a_sync() -> None:
    case = make_case(steps=8, sync=("weights", 3, "sparse"))
    tables = [replace(t, group=1, ranks=(0,), hot=()) for t in case.collections[0].tables]
    case = replace(case, collections=(Collection(tables=tuple(tables)),))
    expected = run_on_ranks(2, sync_bytes, replace(case, depth=1))
    for depth in (2, 3):
        assert run_on_ranks(2, sync_bytes, replace(case, depth=depth)) == expected


def changes_ids(mesh: Mesh, case: Case) -> str:
    model, _ = build(mesh, case)
    source = iter(rm.Pipeline(model).batches(case.batches_of(mesh.rank)))
    batch = next(source)
    batch["features"].values().fill_(7)
    with pytest.raises(StepError) as error:
        model(batch)
    leave(model, source)
    return str(error.value)


def test_ids_that_are_changed_after_they_were_sent_are_an_error() -> None:
    for sentence in run_on_ranks(2, changes_ids, make_case()):
        assert "were changed after their batch was begun ahead" in sentence


def wrong_path(mesh: Mesh, case: Case) -> str:
    model, _ = build(mesh, case)
    pipeline = rm.Pipeline(model, features=lambda batch: {"x": batch["features"]})
    with pytest.raises(InputError) as error:
        next(iter(pipeline.batches(case.batches_of(mesh.rank))))
    return str(error.value)


def test_features_of_a_collection_that_is_not_there() -> None:
    for sentence in run_on_ranks(2, wrong_path, make_case()):
        assert "the model also has collections ['collections.0']" in sentence


def bad_input(mesh: Mesh, case: Case) -> list[str]:
    model, opt = build(mesh, case)
    batches, said = case.batches_of(mesh.rank), []
    if mesh.rank == 1:
        batches[3]["features"].values()[0] = ROWS
    source = rm.Pipeline(model).batches(batches)
    for number, batch in enumerate(source):
        try:
            train(mesh, model, opt, [batch])
        except InputError as error:
            said.append(f"{number}: {error}")
    return said


@pytest.mark.parametrize("depth", [2, 3])
def test_a_bad_batch_of_one_rank_raises_in_its_own_forward_on_all(depth: int) -> None:
    said = run_on_ranks(2, bad_input, make_case(depth=depth))
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert said[0][0].startswith("3: rank 1: feature 'f0', sample 0: id 64")


def other_features(mesh: Mesh, case: Case) -> str:
    model, _ = build(mesh, case)
    batches = case.batches_of(mesh.rank)
    source = iter(rm.Pipeline(model).batches(batches))
    next(source)
    with pytest.raises(StepError) as error:
        model(batches[4])
    leave(model, source)
    return str(error.value)


def test_a_forward_that_was_not_begun_says_how_to_name_its_features() -> None:
    for sentence in run_on_ranks(2, other_features, make_case()):
        assert "give rm.Pipeline features=" in sentence


def dies(mesh: Mesh, case: Case) -> None:
    model, opt = build(mesh, case)
    for number, batch in enumerate(rm.Pipeline(model).batches(case.batches_of(mesh.rank))):
        if number == 2 and mesh.rank == 1:
            raise ValueError("no such thing")
        train(mesh, model, opt, [batch])


@pytest.mark.nightly
def test_an_exception_in_the_loop_of_one_rank_reaches_the_other() -> None:
    with pytest.raises(RankError, match="no such thing"):
        run_on_ranks(2, dies, make_case(depth=3))


def test_the_features_of_a_batch_are_found() -> None:
    keyed = rm.KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    for batch in (
        keyed,
        {"x": 1, "features": keyed},
        (torch.zeros(1), keyed),
        SimpleNamespace(a=1, b=keyed),
        rm.Batch(dense_features=torch.zeros(1, 1), sparse_features=keyed, labels=torch.zeros(1)),
    ):
        assert _features_of(batch) is keyed
    for batch in ({"a": keyed, "b": keyed}, 3):
        with pytest.raises(InputError, match=r"give rm\.Pipeline features="):
            _features_of(batch)


def test_what_a_pipeline_refuses() -> None:
    with pytest.raises(InputError, match="takes a sharded model"):
        rm.Pipeline(torch.nn.Linear(1, 1))
    case = Case(
        world=1, collections=(Collection(tables=(Table(rows=4, dim=4, ranks=(0,)),)),), ids=[]
    )
    mesh = rm.init_mesh()
    model = rm.shard(Model(case), case.plan(), mesh)
    with pytest.raises(InputError, match="depth is 0, but must be from 1 to 8"):
        rm.Pipeline(model, depth=0)
    for depth in ("2", 2.0, True):
        with pytest.raises(InputError, match="must be a whole number from 1 to 8"):
            rm.Pipeline(model, depth=depth)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be a function of a batch, got 3"):
        rm.Pipeline(model, features=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"sync must be an rm\.Sync"):
        rm.make_plan(Model(case), mesh.topology, sync="weights")  # type: ignore[arg-type]
    with pytest.raises(rm.PlanError, match=r"sync period 1\.5 must be a whole number"):
        replace(case.plan(), sync=rm.Sync(period=1.5)).validate()  # type: ignore[arg-type]
    with pytest.raises(rm.PlanError, match="depth 9 must be from 1"):
        replace(case.plan(), depth=9).validate()


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.lists(st.booleans(), max_size=20), max_size=4))
def test_bits_come_back_as_they_were_packed(parts: list[list[bool]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.bool) for part in parts]
    words = pack_bits(tensors)
    assert len(words) == sum(-(-len(part) // 8) for part in parts)
    found = unpack_bits(words, [len(part) for part in parts])
    assert [part.tolist() for part in found] == parts
