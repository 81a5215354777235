"""Training loops of every kind: bits do not depend on how many batches are begun ahead."""

from typing import Any

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime.embeddings import sharded_engines
from tests.cases import Case
from tests.ranks import run_on_ranks
from tests.test_pipeline import build, make_case, train


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
