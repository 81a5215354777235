"""Shard groups on real ranks: their laws, checkpoints between them, mistakes that are caught."""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.placement import Sync
from rowmesh.runtime import meeting, replicas, touched
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.replicas import Replicas
from tests.cases import DENSE, RULES, Case, Collection, Model, Run, Table, train_case
from tests.ranks import run_on_ranks
from tests.test_central_property import differences
from tests.test_checkpoint import different, start, state_of, train

SIZES = [[3, 0, 4, 1], [2, 2, 0, 0], [1, 4, 2, 3]]  # of every step and rank: groups are uneven


def bags(num_rows: int, num_samples: int, step: int, rank: int) -> list[list[int]]:
    """Repeated ids, rows that one group alone reads, rows that all read, empty bags."""
    some = [[0, (7 * step + 3 * rank) % num_rows], [rank % num_rows], [], [num_rows - 1, 0, 0]]
    return some[:num_samples]


def make_case(size: int | None, *, layout: str = "contiguous", **changes: Any) -> Case:
    """Three tables on 2 x 2 ranks in groups of so many; None for one group of all."""
    pair = {None: (0, 3), 1: (0,), 2: (0, 1) if layout == "contiguous" else (0, 2)}[size]
    tables = (
        Table(rows=9, dim=8, ranks=pair, shards=4, group=size),
        Table(rows=5, dim=4, ranks=(0,), hot=(0, 3), group=size),
        Table(rows=6, dim=8, ranks=pair, columns=len(pair), features=2, group=size),
    )
    features = [9, 5, 6, 6]
    ids = [
        [[bags(n, s, step, rank) for n in features] for rank, s in enumerate(sizes)]
        for step, sizes in enumerate(SIZES)
    ]
    fields: dict[str, Any] = {"rule": "rowwise", "dense": "sgd", "layout": layout} | changes
    return Case(world=4, hosts=2, collections=(Collection(tables=tables),), ids=ids, **fields)


def run(case: Case) -> list[Run]:
    return run_on_ranks(4, train_case, case, hosts=2)


@functools.cache
def full(rule: str) -> Run:
    """Without groups."""
    return run(make_case(None, rule=rule))[0]


def furthest(ours: Run, theirs: Run) -> float:
    """The largest difference of weights and state."""
    pairs = [(ours.weights[n], w) for n, w in theirs.weights.items()]
    pairs += [(ours.states[t][n], v) for t, s in theirs.states.items() for n, v in s.items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


GROUPS = [(1, "contiguous"), (2, "contiguous"), (2, "strided")]


@pytest.mark.parametrize(("size", "layout"), GROUPS)
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_sgd_that_syncs_every_step_is_full_model_parallelism(
    size: int, layout: str, form: str
) -> None:
    ours = run(make_case(size, layout=layout, rule="sgd", sync=("weights", 1, form)))[0]
    assert furthest(ours, full("sgd")) < 1e-6


@pytest.mark.parametrize(
    ("size", "layout", "rule"),
    [*((2, "strided", rule) for rule in sorted(RULES)), (1, "contiguous", "adam")],
)
def test_summed_gradients_are_full_model_parallelism(size: int, layout: str, rule: str) -> None:
    ours = run(make_case(size, layout=layout, rule=rule))[0]
    assert furthest(ours, full(rule)) < 1e-5


@pytest.mark.parametrize("sync", [("weights", 2, "sparse"), ("moments-first", 3, "dense")])
def test_groups_that_step_apart_are_another_trajectory(sync: tuple[str, int, str]) -> None:
    ours = run(make_case(2, sync=sync))[0]
    assert furthest(ours, full("rowwise")) > 1e-3  # else the tests above would show nothing


def clip(mesh: Mesh, case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    model, optimizer = start(mesh, case)
    for batch in case.batches_of(mesh.rank):
        mesh.mean(model(batch)).backward()
        norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
    return float(norm), rm.full_state_dict(model)


@pytest.mark.parametrize("sync", [("gradients", 1, "sparse"), ("weights", 1, "sparse")])
def test_a_clipped_norm_counts_every_row_once(sync: tuple[str, int, str]) -> None:
    case = make_case(2, sync=sync)
    oracle = rm.Oracle(Model(case), dense=DENSE["sgd"], sparse=RULES["rowwise"], plan=case.plan())
    for step in range(len(case.ids)):
        oracle.step([case.batch(step, rank) for rank in range(4)], clip=0.05)
    expected = oracle.model.state_dict()
    norm, found = run_on_ranks(4, clip, case, hosts=2)[0]
    assert norm > 0.05
    assert all(torch.allclose(found[n], w, atol=1e-6) for n, w in expected.items())


def moments_first_with_adam(mesh: Mesh) -> str:
    case = make_case(2, rule="adam", sync=("moments-first", 1, "sparse"))
    with pytest.raises(rm.InputError) as caught:
        start(mesh, case)
    return str(caught.value)


def test_moments_first_needs_a_rule_with_one_moment_a_row() -> None:
    (said,) = set(run_on_ranks(4, moments_first_with_adam, hosts=2))
    assert "it goes with row-wise AdaGrad or SGD, not with Adam" in said


def verify(mesh: Mesh, case: Case) -> str:
    return str(
        rm.verify(
            lambda: Model(case),
            case.plan(),
            mesh,
            case.batches_of(mesh.rank),
            dense=DENSE[case.dense],
            sparse=RULES[case.rule],
        )
    )


def test_verify_compares_groups_with_their_own_oracle() -> None:
    case = make_case(2, sync=("weights", 2, "sparse"))
    (said,) = set(run_on_ranks(4, verify, case, hosts=2))
    assert said.startswith("verified: 3 steps")
    assert said.endswith("bit-equal (E2)")


def save_between_syncs(mesh: Mesh, case: Case, folder: str) -> Any:
    """Two steps, a checkpoint while groups are apart, one more step."""
    model, optimizer = start(mesh, case)
    batches = case.batches_of(mesh.rank)
    train(mesh, model, optimizer, batches[:2])
    rm.Checkpoints(folder).save(2, model=model, optimizer=optimizer, mesh=mesh, extra={})
    saved = state_of(model, optimizer)
    losses = train(mesh, model, optimizer, batches[2:])
    return saved, losses, state_of(model, optimizer)


def load_and_go_on(mesh: Mesh, case: Case, folder: str) -> Any:
    model, optimizer = start(mesh, case)
    train(mesh, model, optimizer, case.batches_of(mesh.rank)[1:2])  # a load ends what it finds
    rm.Checkpoints(folder).load(model=model, optimizer=optimizer, mesh=mesh)
    loaded = state_of(model, optimizer)
    losses = train(mesh, model, optimizer, case.batches_of(mesh.rank)[2:])
    return loaded, losses, state_of(model, optimizer)


def test_checkpoints_are_taken_together_and_loaded_under_other_groups(tmp_path: Path) -> None:
    case = make_case(2, sync=("weights", 3, "sparse"))
    saved = run_on_ranks(4, save_between_syncs, case, str(tmp_path), hosts=2)
    same = run_on_ranks(4, load_and_go_on, case, str(tmp_path), hosts=2)
    for ours, theirs in zip(same, saved, strict=True):
        assert different(ours[0], theirs[0]) == []
        assert all(map(torch.equal, ours[1], theirs[1]))
        assert different(ours[2], theirs[2]) == []
    others = [
        make_case(None, rule="scaled"),  # its moments are those of row-wise AdaGrad
        make_case(1, sync=("weights", 2, "dense")),
        make_case(2, layout="strided"),
    ]
    for other in others:
        found = run_on_ranks(4, load_and_go_on, other, str(tmp_path), hosts=2)
        assert different(found[0][0], saved[0][0]) == []


def replicas_differ(mesh: Mesh, model: nn.Module) -> float:
    """The largest difference between what this rank and its first replica hold."""
    found = 0.0
    for stack in (s for e in sharded_engines(model) for s in e.stacks):
        first = stack.layout.groups.replicas(mesh.rank)[0]
        for tensor in (stack.home, *stack.home_state.values()):
            everyone = mesh.gather_objects(tensor)
            found = max([found, *(everyone[first] - tensor).abs().flatten().tolist()])
    return found


def state_dicts_between_syncs(mesh: Mesh, case: Case) -> list[float]:
    model, optimizer = start(mesh, case)
    batches = case.batches_of(mesh.rank)
    found = []
    train(mesh, model, optimizer, batches[:1])
    saved = copy.deepcopy(optimizer.state_dict())
    found.append(replicas_differ(mesh, model))  # they came together for it
    train(mesh, model, optimizer, batches[1:2])
    found.append(replicas_differ(mesh, model))
    optimizer.load_state_dict(saved)
    found.append(replicas_differ(mesh, model))
    train(mesh, model, optimizer, batches[2:])
    optimizer.sync()
    found.append(replicas_differ(mesh, model))
    return found


def test_state_dicts_are_of_groups_together() -> None:
    case = make_case(2, sync=("weights", 50, "sparse"))
    together, apart, loaded, synced = zip(
        *run_on_ranks(4, state_dicts_between_syncs, case, hosts=2), strict=True
    )
    assert max(apart) > 0.0
    assert max(*together, *loaded, *synced) == 0.0


def steps_without_a_forward(mesh: Mesh, case: Case) -> list[bool]:
    """Whether the sync before was over whenever a step began another."""
    model, optimizer = start(mesh, case)
    train(mesh, model, optimizer, case.batches_of(mesh.rank)[:1])
    found = []
    for _ in range(4):
        before = [engine.replicas._under_way for engine in sharded_engines(model)]
        optimizer.step()
        found += [future is not None and future.done() for future in before]
    return found


def test_one_sync_at_a_time_is_under_way() -> None:
    case = make_case(1, sync=("weights", 1, "sparse"))
    assert all(map(all, run_on_ranks(4, steps_without_a_forward, case, hosts=2)))


Patch = AbstractContextManager[Any]


def unchanged(mesh: Mesh) -> Patch:
    return mock.patch.object(mesh, "rank", mesh.rank)


def mean_over_those_that_touched(mesh: Mesh) -> Patch:
    def before(self: Any, slots: torch.Tensor) -> Any:
        return [t.index_select(0, slots) for t in self._tensors]

    return mock.patch.object(touched.Touched, "_before", before)


def group_gradients_not_scaled(mesh: Mesh) -> Patch:
    original = Replicas.add_gradients

    def add(self: Any, parts: Any) -> None:
        kept = [part.grad.clone() for part in parts]
        original(self, parts)
        for part, grad in zip(parts, kept, strict=True):
            part.grad = grad

    return mock.patch.object(Replicas, "add_gradients", add)


def moments_not_averaged(mesh: Mesh) -> Patch:
    def tensors(self: Any, number: int) -> Any:
        return [self._engine.stacks[number].home]

    return mock.patch.object(Replicas, "_tensors", tensors)


def hot_rows_stepped_by_groups(mesh: Mesh) -> Patch:
    def num_apart(self: Any, part: Any) -> int:
        return int(self._engine.stacks[part.stack].layout.groups.count)

    return mock.patch.object(Replicas, "num_apart", num_apart)


def one_sync_left_out(mesh: Mesh) -> Patch:
    return mock.patch.object(Replicas, "bring_together", Replicas.finish)


def a_replica_that_keeps_its_own(mesh: Mesh) -> Patch:
    original = meeting.mean_of_groups

    def mean(values: Any) -> Any:
        return values[0] if mesh.rank == 0 else original(values)

    return mock.patch.object(touched, "mean_of_groups", mean)


def groups_added_in_reverse(mesh: Mesh) -> Patch:
    original = replicas._add
    return mock.patch.object(replicas, "_add", lambda brought: original(brought[::-1]))


def gradients_of_one_group_only(mesh: Mesh) -> Patch:
    original = replicas._add

    def add(brought: Any) -> Any:
        for rows in brought[1:]:
            rows.values[0].zero_()
        return original(brought)

    return mock.patch.object(replicas, "_add", add)


AVERAGED = make_case(2, rule="scaled", sync=("weights", 2, "sparse"))
SUMMED = make_case(1, sync=("gradients", 1, "sparse"))
MUTATIONS: list[tuple[Callable[[Mesh], Patch], Case]] = [
    (mean_over_those_that_touched, AVERAGED),
    (group_gradients_not_scaled, AVERAGED),
    (moments_not_averaged, AVERAGED),
    (hot_rows_stepped_by_groups, AVERAGED),
    (one_sync_left_out, AVERAGED),
    (a_replica_that_keeps_its_own, AVERAGED),
    (groups_added_in_reverse, SUMMED),
    (gradients_of_one_group_only, SUMMED),
]


def train_mutated(mesh: Mesh, name: str, case: Case) -> Run:
    with globals()[name](mesh):
        return train_case(mesh, case)


@pytest.mark.parametrize("case", [AVERAGED, SUMMED], ids=["averaged", "summed"])
def test_without_a_mutation_nothing_differs(case: Case) -> None:
    runs = run_on_ranks(4, train_mutated, "unchanged", case, hosts=2)
    assert differences(case, runs, tolerance=0.0) == []


@pytest.mark.parametrize(("mutation", "case"), MUTATIONS, ids=lambda m: getattr(m, "__name__", ""))
def test_every_mutation_is_caught(mutation: Callable[[Mesh], Patch], case: Case) -> None:
    runs = run_on_ranks(4, train_mutated, mutation.__name__, case, hosts=2)
    assert differences(case, runs, tolerance=0.0)


def test_sync_says_what_it_needs() -> None:
    plan = make_case(2).plan()
    with pytest.raises(rm.PlanError, match="gradients are synced every step"):
        replace(plan, sync=Sync(period=2)).validate()
