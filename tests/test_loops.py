"""Training loops of every kind: bits do not depend on how many batches are begun ahead."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime import following
from rowmesh.runtime.embeddings import sharded_engines
from tests.cases import Case
from tests.ranks import run_on_ranks
from tests.test_following import make_case as make_merged
from tests.test_pipeline import ROWS, build, make_case, train


def loops(mesh: Mesh, case: Case, name: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Number of samples of every step, and the state, after one of the loops below."""
    model, opt = build(mesh, case)
    steps: list[int] = []

    def step(batch: Any) -> None:
        steps.extend(len(losses) for losses in train(mesh, model, opt, [batch]))

    globals()[name](mesh, model, step, case.batches_of(mesh.rank))
    ahead = sharded_engines(model)[0].look_ahead
    assert len(ahead.begun) + len(ahead.again) == 0
    return steps, rm.full_state_dict(model)


def nested_in_a_loop_of_the_mesh(mesh: Mesh, model: Any, step: Any, batches: Any) -> None:
    for _ in mesh.batches([0, 1, 2]):
        for batch in rm.Pipeline(model).batches(batches[:3]):
            step(batch)


def nested_in_another_pipeline(mesh: Mesh, model: Any, step: Any, batches: Any) -> None:
    for number, batch in enumerate(rm.Pipeline(model).batches(batches)):
        step(batch)
        if number in (1, 2):
            for inner in rm.Pipeline(model).batches(batches[2:5]):
                step(inner)


def evaluation_inside(mesh: Mesh, model: Any, step: Any, batches: Any) -> None:
    for batch in rm.Pipeline(model).batches(batches):
        step(batch)
        with torch.no_grad():
            for other in rm.Pipeline(model).batches(batches[:3]):
                model(other)


def one_rank_has_run_out_and_a_batch_is_left_out(
    mesh: Mesh, model: Any, step: Any, batches: Any
) -> None:
    mine = batches if mesh.rank else batches[:2]
    for number, batch in enumerate(rm.Pipeline(model).batches(mine)):
        if number != 4:
            step(batch)


def one_object_again_and_again(mesh: Mesh, model: Any, step: Any, batches: Any) -> None:
    mine = batches if mesh.rank else batches[:1] * len(batches)
    for number, batch in enumerate(rm.Pipeline(model).batches(mine)):
        if number != 2:
            step(batch)


def taken_two_at_a_time(mesh: Mesh, model: Any, step: Any, batches: Any) -> None:
    source = iter(rm.Pipeline(model).batches(batches))
    for pair in zip(source, source, strict=False):
        for batch in pair:
            step(batch)


def an_older_loop_is_closed(mesh: Mesh, model: Any, step: Any, batches: Any) -> None:
    older = iter(rm.Pipeline(model).batches(batches))
    step(next(older))
    for number, batch in enumerate(rm.Pipeline(model).batches(batches)):
        if number == 2:
            older.close()
        step(batch)


def most_are_left_out(mesh: Mesh, model: Any, step: Any, batches: Any) -> None:
    for number, batch in enumerate(rm.Pipeline(model).batches(batches * 10)):
        with torch.no_grad():
            model(batch)
        assert len(sharded_engines(model)[0].look_ahead.begun) <= 16 + 3
        if number > 56:
            step(batch)


@pytest.mark.parametrize(
    "name",
    [
        "nested_in_a_loop_of_the_mesh",
        "nested_in_another_pipeline",
        "evaluation_inside",
        "one_rank_has_run_out_and_a_batch_is_left_out",
        "one_object_again_and_again",
        "taken_two_at_a_time",
        "an_older_loop_is_closed",
        "most_are_left_out",
    ],
)
def test_whatever_the_loop_bits_do_not_depend_on_the_depth(name: str) -> None:
    expected = run_on_ranks(2, loops, make_case(depth=1), name)
    for depth in (2, 3):
        found = run_on_ranks(2, loops, make_case(depth=depth), name)
        assert [steps for steps, _ in found] == [steps for steps, _ in expected]
        for table, rows in expected[0][1].items():
            assert torch.equal(found[0][1][table], rows)


def stepped(mesh: Mesh, case: Case, how: str) -> list[int]:
    """Numbers of the batches that were stepped; the third is wrong on one rank."""
    model, opt = build(mesh, case)
    batches, found = case.batches_of(mesh.rank), []
    if mesh.rank == 1:
        batches[2]["features"].values()[:] = ROWS
    for number, batch in enumerate(rm.Pipeline(model).batches(batches)):
        if how == "left out" and number == 2:
            continue
        try:
            mesh.mean(model(batch)).backward()
        except rm.InputError:
            continue
        opt.step()
        opt.zero_grad()
        found.append(number)
    return found


@pytest.mark.parametrize("how", ["left out", "caught"])
@pytest.mark.parametrize("num_collections", [1, 2])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_wrong_batch_that_no_forward_takes_harms_no_other(
    how: str, num_collections: int, depth: int
) -> None:
    """With two collections the second's is not taken: the first has raised."""
    case = make_merged(depth=depth)
    ids = [[[*rank, *rank][:num_collections] for rank in step] for step in case.ids]
    case = replace(case, collections=case.collections * num_collections, ids=ids)
    assert run_on_ranks(4, stepped, case, how, hosts=2) == [[0, 1, 3, 4, 5]] * 4


def marked_twice(mesh: Mesh, case: Case) -> dict[str, torch.Tensor]:
    """Two batches are begun while a forward that was not begun ahead is open, and the ids of
    the second arrive after its step."""
    model, opt = build(mesh, case)
    (engine,), has_stepped = sharded_engines(model), threading.Event()
    ahead = engine.look_ahead
    finish, hear_asked = ahead.finish, engine.fetches.hear_asked
    source: Iterator[Any] = iter(rm.Pipeline(model).batches(case.batches_of(mesh.rank)))
    first = next(source)
    rm.load_pretrained(model, "c0_t0", torch.ones(ROWS, 4))  # drops what was begun
    losses = model(first)

    def note(number: int) -> None:
        finish(number)
        has_stepped.set()

    def late(*args: Any) -> None:
        assert has_stepped.wait(10)
        hear_asked(*args)

    with (
        mock.patch.object(ahead, "finish", note),
        mock.patch.object(engine.fetches, "hear_asked", late),
    ):
        second = next(source)  # begins two
        mesh.mean(losses).backward()
        opt.step()
        opt.zero_grad()
        for fetch in list(ahead.begun):
            fetch.wait()
    train(mesh, model, opt, [second])
    train(mesh, model, opt, source)
    return rm.full_state_dict(model)


def plainly(mesh: Mesh, case: Case) -> dict[str, torch.Tensor]:
    """The same steps, nothing ahead."""
    model, opt = build(mesh, case)
    rm.load_pretrained(model, "c0_t0", torch.ones(ROWS, 4))
    train(mesh, model, opt, case.batches_of(mesh.rank))
    return rm.full_state_dict(model)


def test_batches_begun_together_know_of_each_others_steps() -> None:
    one, two = (make_case(depth=depth) for depth in (1, 2))
    expected, found = run_on_ranks(2, plainly, one)[0], run_on_ranks(2, marked_twice, two)[0]
    assert all(torch.equal(found[name], rows) for name, rows in expected.items())


def impatient(mesh: Mesh, case: Case, name: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Gradients that follow go only when told: who waits for them without telling is stuck."""
    with mock.patch.object(following, "_PATIENCE_S", 600.0):
        return loops(mesh, case, name)


@pytest.mark.parametrize(
    "name",
    [
        "nested_in_another_pipeline",
        "evaluation_inside",
        "one_rank_has_run_out_and_a_batch_is_left_out",
        "taken_two_at_a_time",
    ],
)
@pytest.mark.parametrize("depth", [2, 3])
def test_whoever_waits_for_gradients_that_follow_tells_them_to_go(name: str, depth: int) -> None:
    expected = run_on_ranks(4, loops, make_merged(depth=1), name, hosts=2)
    found = run_on_ranks(4, impatient, make_merged(depth=depth), name, hosts=2)
    assert [steps for steps, _ in found] == [steps for steps, _ in expected]
    assert all(torch.equal(found[0][1][t], rows) for t, rows in expected[0][1].items())


def one_rank_without_grad(mesh: Mesh, case: Case) -> str:
    model, opt = build(mesh, case)
    source = iter(rm.Pipeline(model).batches(case.batches_of(mesh.rank)))
    train(mesh, model, opt, [next(source)])
    with torch.set_grad_enabled(mesh.rank != 0):
        second = next(source)  # begins the third
    train(mesh, model, opt, [second])
    third = next(source)
    with torch.set_grad_enabled(mesh.rank != 0), pytest.raises(rm.StepError) as raised:
        model(third)
    return str(raised.value)


def test_ranks_that_disagree_about_gradients_of_a_batch_begun_ahead_are_all_told() -> None:
    found = run_on_ranks(4, one_rank_without_grad, make_merged(), hosts=2)
    assert all("torch.no_grad() must be on for all ranks or for none" in text for text in found)
