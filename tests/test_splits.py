"""Columns, hosts and grids around the central property: order of calls, clipping, bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from tests.cases import DENSE, RULES, Case, Collection, Model, Table, oracle_case
from tests.ranks import run_on_ranks
from tests.test_runtime import (
    clipped,
    forward_without_backward,
    from_values,
    skipped_step,
    start,
    tutorial_order,
)

TABLES = (
    Table(rows=20, dim=8, ranks=(2, 0), columns=2),
    Table(rows=20, dim=8, ranks=(1, 3, 0), columns=3, exchange="pooled", mean=True),  # 2, 3, 3
    Table(rows=20, dim=4, ranks=(3, 2), by_host=True, exchange="pooled"),
    Table(rows=20, dim=8, ranks=(0, 1, 3, 2), columns=2, by_host=True, exchange="pooled"),
)


def make_case(*, steps: int = 4, kind: str = "bags", **changes: Any) -> Case:
    def ids(rank: int, step: int) -> list[list[int]]:
        return [[(7 * i + 5 * rank + step) % 20 for i in range(b)] for b in (2, 0, 3)]

    drawn = [[[ids(rank, step) for _ in TABLES] for rank in range(4)] for step in range(steps)]
    tables = TABLES
    if kind == "sequence":
        tables = tuple(replace(t, exchange="rows", mean=False) for t in TABLES)
    collection = Collection(tables=tables, kind=kind)
    return Case(world=4, hosts=2, collections=(collection,), ids=drawn, **changes)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[n], expected[n]) for n in found
    )


@pytest.mark.parametrize("body", [forward_without_backward, tutorial_order, skipped_step])
@pytest.mark.parametrize("tree", ["flat", "host-first"])
def test_order_of_calls(body: Any, tree: str) -> None:
    """Gradients of dropped steps and of forwards without a backward go no further."""
    num_steps = {"tutorial_order": 4}.get(body.__name__, 1)
    found = run_on_ranks(4, body, make_case(tree=tree, has_unused=False), hosts=2)[0]
    assert same(found, oracle_case(make_case(steps=num_steps, tree=tree, has_unused=False)).weights)


def test_clipping_counts_every_column_once() -> None:
    case = make_case(rule="sgd", dense="sgd")
    found = run_on_ranks(4, clipped, case, 1e-2, hosts=2)
    oracle = rm.Oracle(Model(case), dense=DENSE["sgd"], sparse=RULES["sgd"])
    for step in range(4):
        oracle.step([case.batch(step, rank) for rank in range(4)], clip=1e-2)
    for name, value in oracle.model.state_dict().items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-6, atol=1e-6)


def test_a_materialised_model_is_sliced_by_columns() -> None:
    case = make_case()
    found, _ = run_on_ranks(4, from_values, case, hosts=2)[0]
    oracle = rm.Oracle(Model(case), dense=DENSE["sgd"], sparse=RULES["sgd"])
    expected = oracle.model.state_dict()
    assert same(found, {name: 1.5 * value for name, value in expected.items()})


def sequences(mesh: Mesh, case: Case) -> Any:
    model, optimizer, batches = start(mesh, case)
    mesh.mean(model(batches[0])).backward()
    optimizer.step()
    return rm.full_state_dict(model)


def test_columns_of_sequences_are_joined() -> None:
    case = make_case(kind="sequence", steps=1)
    assert same(run_on_ranks(4, sequences, case, hosts=2)[0], oracle_case(case).weights)


def crossing(mesh: Mesh, case: Case) -> int:
    model, optimizer, batches = start(mesh, case)
    mesh.ledger.reset()
    mesh.mean(model(batches[0])).backward()
    optimizer.step()
    edges = mesh.ledger.by_edge()
    return sum(edges.get(e, {}).get("cross", 0) for e in ("pooled", "rows", "backward"))


def test_across_hosts_a_relayed_bag_costs_one_vector_each_way() -> None:
    """Rows over two ranks of a host: two partial sums a bag cross, relayed one."""
    bags = [[[list(range(8))] * 3]] * 4  # of every rank: one feature, three samples
    relayed = Table(rows=20, dim=4, ranks=(0, 1), by_host=True, exchange="pooled")
    case = Case(world=4, hosts=2, collections=(Collection(tables=(relayed,)),), ids=[bags])
    found = sum(run_on_ranks(4, crossing, case, hosts=2))
    direct = replace(relayed, by_host=False)
    partial = sum(
        run_on_ranks(
            4, crossing, replace(case, collections=(Collection(tables=(direct,)),)), hosts=2
        )
    )
    asked_across = 2 * 3  # bags of the two ranks on the other host
    assert found == asked_across * 2 * 4 * 4
    assert partial == 2 * found
