"""Gradients that follow their step: which do, that nobody reads their rows before, and mistakes.

That training with them equals the oracle, and their bytes `predict`, is tested with every merged
plan of tests/test_central_property.py and tests/test_merges.py.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime import look_ahead, merged_sums
from rowmesh.runtime.embeddings import ShardedEngine, sharded_engines
from rowmesh.runtime.fetch import Fetch
from rowmesh.runtime.following import Following, Rest
from tests.cases import DENSE, RULES, Case, Collection, Model, Run, Table, train_case
from tests.ranks import run_on_ranks
from tests.test_central_property import differences

ROWS = 64


def make_case(steps: int = 6, **changes: Any) -> Case:
    """Ids 0 to 3 in every batch, and some of the batch before; others in one batch only."""
    table = Table(rows=ROWS, dim=4, ranks=(2, 0, 3, 1), merged=True)

    def ids(rank: int, step: int) -> list[list[list[int]]]:
        own = [4 + (16 * step + 5 * rank + k) % (ROWS - 4) for k in range(5)]
        old = 4 + (16 * (step - 1) + 5 * rank) % (ROWS - 4)
        return [[[0, 1, 2, 3], own[:3], [*own[3:], old]]]

    given = [[ids(rank, step) for rank in range(4)] for step in range(steps)]
    settings = {"tree": "host-first", "depth": 2, "hosts": 2, **changes}
    return Case(world=4, collections=(Collection(tables=(table,)),), ids=given, **settings)


def build(mesh: Mesh, case: Case) -> tuple[Any, rm.Optimizer, ShardedEngine]:
    model = rm.shard(Model(case), case.plan(), mesh)
    opt = rm.Optimizer(model, dense=DENSE["sgd"], sparse=RULES["rowwise"])
    return model, opt, sharded_engines(model)[0]


def loop(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case) -> Iterator[int]:
    """Train, and stop after every step."""
    for number, batch in enumerate(rm.Pipeline(model).batches(case.batches_of(mesh.rank))):
        mesh.mean(model(batch)).backward()
        opt.step()
        yield number
        opt.zero_grad()


def ids_of(case: Case, step: int) -> set[int]:
    return {row for rank in case.ids[step] for bag in rank[0] for row in bag}


def count_moved(mesh: Mesh, case: Case) -> list[tuple[int, int]]:
    """After every step, home rows that have moved by then, and when what follows has arrived."""
    model, opt, engine = build(mesh, case)
    home, counts, go = engine.stacks[0].home, [], threading.Event()
    before = home.clone()
    original = merged_sums.MergedSums.follow

    def follow(self: Any, *args: Any) -> Any:
        assert go.wait(20)
        return original(self, *args)

    with mock.patch.object(merged_sums.MergedSums, "follow", follow):
        for _ in loop(mesh, model, opt, case):
            now = int((home != before).any(1).sum())
            go.set()
            engine.rest.finish()
            go.clear()
            counts.append((now, int((home != before).any(1).sum())))
            before = home.clone()
    return counts


@pytest.mark.parametrize("depth", [2, 3])
def test_rows_that_the_next_batch_asks_for_are_stepped_and_the_others_follow(depth: int) -> None:
    case = make_case(depth=depth)
    by_rank = run_on_ranks(4, count_moved, case, hosts=2)
    for step in range(6):
        asked = ids_of(case, step)
        following = asked - ids_of(case, step + 1) if step < 5 else set()
        now, all_of_them = (sum(ranks[step][k] for ranks in by_rank) for k in (0, 1))
        assert (now, all_of_them) == (len(asked) - len(following), len(asked))
        assert step == 5 or len(following) > len(asked) / 4


def told_to_go(mesh: Mesh, case: Case) -> list[bool]:
    model, opt, engine = build(mesh, case)
    steps, found = loop(mesh, model, opt, case), []
    next(steps)
    following = engine.rest.following
    assert following is not None
    found.append(following._may_go.is_set())
    arrive = engine.fetches.arrive

    def note(fetch: Fetch) -> None:
        arrive(fetch)
        found.append(following._may_go.is_set())

    with mock.patch.object(engine.fetches, "arrive", note):
        next(steps)
    found.append(following._may_go.is_set())
    return found


def test_gradients_follow_when_the_vectors_of_the_next_forward_have_arrived() -> None:
    """Before that the link is for these; a backward later nothing would be left to hide under."""
    case = make_case()
    assert run_on_ranks(4, told_to_go, case, hosts=2) == [[False, False, True]] * 4


def nothing_follows(mesh: Mesh, case: Case) -> bool:
    model, opt, engine = build(mesh, case)
    return all(engine.rest.following is None for _ in loop(mesh, model, opt, case))


def test_at_depth_1_nothing_follows() -> None:
    assert all(run_on_ranks(4, nothing_follows, make_case(depth=1), hosts=2))


def read_state(mesh: Mesh, opt: rm.Optimizer) -> int:
    """Of rank 0 alone: the others wait for it."""
    found = len(opt.state_dict()["sparse"]) if mesh.rank == 0 else 0
    mesh.total(1.0)
    return found


def in_a_loop(mesh: Mesh, case: Case) -> list[int]:
    model, opt, _ = build(mesh, case)
    return [read_state(mesh, opt) for _ in loop(mesh, model, opt, case)]


def after_a_loop_that_was_left(mesh: Mesh, case: Case) -> list[int]:
    model, opt, _ = build(mesh, case)
    for number in loop(mesh, model, opt, case):
        if number == 3:
            break
    return [read_state(mesh, opt)]


def beside_a_loop_that_is_not_ended(mesh: Mesh, case: Case) -> list[int]:
    model, opt, _ = build(mesh, case)
    steps = loop(mesh, model, opt, case)
    next(steps), next(steps)
    return [read_state(mesh, opt)]


def after_a_step_outside_the_loop(mesh: Mesh, case: Case) -> list[int]:
    model, opt, _ = build(mesh, case)
    for number, batch in enumerate(rm.Pipeline(model).batches(case.batches_of(mesh.rank))):
        mesh.mean(model(batch)).backward()
        if number == 3:
            break
        opt.step()
        opt.zero_grad()
    opt.step()
    return [read_state(mesh, opt)]


def in_a_loop_inside_a_loop(mesh: Mesh, case: Case) -> list[int]:
    """Several batches are begun again while what an earlier step left is done on one rank only."""
    model, opt, _ = build(mesh, case)
    found = []
    for number in loop(mesh, model, opt, case):
        inner = loop(mesh, model, opt, case) if number == 1 else iter(())
        found += [len(opt.state_dict()["sparse"]) for k in inner if mesh.rank == 0 and k == 0]
    return found if mesh.rank == 0 else [0]


ALONE: list[Callable[[Mesh, Case], list[int]]] = [
    in_a_loop,
    after_a_loop_that_was_left,
    beside_a_loop_that_is_not_ended,
    after_a_step_outside_the_loop,
    in_a_loop_inside_a_loop,
]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("where", ALONE)
def test_a_rank_can_read_its_state_alone(
    where: Callable[[Mesh, Case], list[int]], depth: int
) -> None:
    found = run_on_ranks(4, where, make_case(depth=depth), hosts=2)
    assert [set(ranks) for ranks in found] == [{1}, {0}, {0}, {0}]


def evaluate(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case, number: int) -> Any:
    with torch.no_grad():
        return model(case.batches_of(mesh.rank)[number])


def export(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case, number: int) -> Any:
    return [*rm.full_state_dict(model).values()]


def take_state(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case, number: int) -> Any:
    return [t.clone() for part in opt.state_dict()["sparse"] for t in part["home"].values()]


def set_rows(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case, number: int) -> Any:
    if number == 2:
        rm.load_pretrained(model, "c0_t0", torch.ones(ROWS, 4))


def change_lr(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case, number: int) -> Any:
    """As a scheduler does, after the step and before what follows it."""
    opt.param_groups[-1]["lr"] *= 0.5


def change_lr_in_place(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case, number: int) -> Any:
    """As a scheduler does with a rate that is a tensor."""
    group = opt.param_groups[-1]
    group["lr"] = torch.as_tensor(group["lr"])
    group["lr"].mul_(0.5)


def step_again(mesh: Mesh, model: Any, opt: rm.Optimizer, case: Case, number: int) -> Any:
    """A step without a forward; and what a loop of its own changes in between."""
    opt.step()
    if number == 3:
        for batch in rm.Pipeline(model).batches(case.batches_of(mesh.rank)[:3]):
            opt.zero_grad()
            mesh.mean(model(batch)).backward()
            opt.step()


BETWEEN: list[Callable[..., Any]] = [
    evaluate,
    export,
    take_state,
    set_rows,
    change_lr,
    change_lr_in_place,
    step_again,
]


def train_between(mesh: Mesh, case: Case, which: int) -> Any:
    model, opt, _ = build(mesh, case)
    found = [BETWEEN[which](mesh, model, opt, case, n) for n in loop(mesh, model, opt, case)]
    return found, rm.full_state_dict(model)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a is b is None or (len(a) == len(b) and all(map(equal, a, b)))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("between", BETWEEN)
def test_between_steps_nobody_sees_that_gradients_follow(
    between: Callable[..., Any], depth: int
) -> None:
    case, which = make_case(depth=depth), BETWEEN.index(between)
    found = run_on_ranks(4, train_between, case, which, hosts=2)
    expected = run_on_ranks(4, train_between, replace(case, depth=1), which, hosts=2)
    for (ours, weights), (theirs, others) in zip(found, expected, strict=True):
        assert equal(ours, theirs)
        assert equal([*weights.values()], [*others.values()])


def clip(mesh: Mesh, case: Case) -> Any:
    """Every second step; a step that is given up; a loop that is left."""
    model, opt, _ = build(mesh, case)
    norms = []
    for number, batch in enumerate(rm.Pipeline(model).batches(case.batches_of(mesh.rank))):
        if number == 5:
            break
        mesh.mean(model(batch)).backward()
        if number % 2:
            norms.append(opt.clip_grad_norm_(0.01))
        if number != 2:
            opt.step()
        opt.zero_grad()
    for _ in loop(mesh, model, opt, case):
        pass
    return norms, [*rm.full_state_dict(model).values()]


@pytest.mark.parametrize("depth", [2, 3])
def test_clipping_sees_all_gradients_and_dropped_ones_follow_no_step(depth: int) -> None:
    found = run_on_ranks(4, clip, make_case(depth=depth), hosts=2)
    expected = run_on_ranks(4, clip, make_case(depth=1), hosts=2)
    for ours, theirs in zip(found, expected, strict=True):
        assert equal(ours, theirs)


Patch = contextlib.AbstractContextManager[Any]


def rows_asked_for_follow_too(mesh: Mesh) -> Patch:
    original = look_ahead.LookAhead._tell_followers

    def tell(self: Any, fetch: Any) -> None:
        original(self, fetch)
        fetch.follows = {i: [mask | True for mask in part] for i, part in fetch.follows.items()}

    return mock.patch.object(look_ahead.LookAhead, "_tell_followers", tell)


def followers_of_one_rank_are_lost(mesh: Mesh) -> Patch:
    original = merged_sums.MergedSums.follow

    def follow(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        return {i: (r, g * (mesh.rank != 2)) for i, (r, g) in found.items()}

    return mock.patch.object(merged_sums.MergedSums, "follow", follow)


def slowly() -> Patch:
    """What follows takes longer than a step."""
    original = merged_sums.MergedSums.follow

    def follow(self: Any, *args: Any) -> Any:
        time.sleep(0.2)
        return original(self, *args)

    return mock.patch.object(merged_sums.MergedSums, "follow", follow)


@contextlib.contextmanager
def steps_do_not_wait(mesh: Mesh) -> Iterator[None]:
    with slowly(), mock.patch.object(Following, "wait", return_value=None):
        yield


@contextlib.contextmanager
def rows_are_called_clean_before(mesh: Mesh) -> Iterator[None]:
    """By owners, to the batch after next."""
    begin, end_step = look_ahead.LookAhead.begin, ShardedEngine.end_step

    def hasty_begin(self: Any, fetch: Any, *args: Any) -> None:
        fetch.needs = None
        begin(self, fetch, *args)

    def hasty_end(self: Any) -> None:
        end_step(self)
        if self.rest.following is not None:
            self.look_ahead.finish(self.rest.following.reader - 1)

    with (
        slowly(),
        mock.patch.object(look_ahead.LookAhead, "begin", hasty_begin),
        mock.patch.object(ShardedEngine, "end_step", hasty_end),
    ):
        yield


def reader_is_anyone(mesh: Mesh) -> Patch:
    """Steps still wait; forwards that were not begun ahead do not."""
    original = Rest.finish

    def finish(self: Any, *, but_for: int | None = None) -> None:
        if but_for is None:
            original(self)

    return mock.patch.object(Rest, "finish", finish)


MUTATIONS: list[Callable[[Mesh], Patch]] = [
    rows_asked_for_follow_too,
    followers_of_one_rank_are_lost,
    steps_do_not_wait,
    rows_are_called_clean_before,
]


def train_mutated(mesh: Mesh, case: Case, number: int) -> Run:
    with MUTATIONS[number](mesh):
        return train_case(mesh, case)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mutation_is_caught(mutation: Callable[[Mesh], Patch]) -> None:
    case, number = make_case(), MUTATIONS.index(mutation)
    runs = run_on_ranks(4, train_mutated, case, number, hosts=2)
    assert differences(case, runs, tolerance=0.0)


def train_slowly(mesh: Mesh, case: Case) -> Run:
    with slowly():
        return train_case(mesh, case)


@pytest.mark.parametrize("depth", [2, 3])
def test_gradients_may_arrive_as_late_as_they_like(depth: int) -> None:
    case = make_case(depth=depth)
    runs = run_on_ranks(4, train_slowly, case, hosts=2)
    assert not differences(case, runs, tolerance=0.0)


def evaluate_mutated(mesh: Mesh, case: Case) -> Any:
    with slowly(), reader_is_anyone(mesh):
        return train_between(mesh, case, BETWEEN.index(evaluate))


def test_an_evaluation_that_does_not_wait_is_noticed() -> None:
    case = make_case()
    found = run_on_ranks(4, evaluate_mutated, case, hosts=2)
    expected = run_on_ranks(4, train_between, case, BETWEEN.index(evaluate), hosts=2)
    assert not all(equal(f[0], e[0]) for f, e in zip(found, expected, strict=True))
