"""Merged requests: what crosses hosts, the rules, the planner, and mistakes that must be noticed.

That training with them equals the oracle is tested in tests/test_central_property.py.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import DenseCost, expect_plan, plan_time
from rowmesh.data import SyntheticClicks
from rowmesh.errors import InputError, PlanError
from rowmesh.placement import Exchange, Plan, plan_from_json, plan_to_json
from rowmesh.planners.merging import merge_all
from rowmesh.runtime import gradients, merged_sums, merges
from rowmesh.stats import Stats
from rowmesh.topology import Topology
from tests.cases import Case, Collection, Run, Table, train_case
from tests.ranks import RankError, run_on_ranks
from tests.test_central_property import check_ledgers, differences

CLICKS = SyntheticClicks(cap=20_000, alpha=1.05, batch_size=256)
TABLES = CLICKS.tables(16)
STATS = Stats.from_batches(TABLES, [CLICKS.batch_at(0, i).sparse_features for i in range(24)])
COST = DenseCost(flops=1.0, parameters=1.0, forward_s=0.02, backward_s=0.04, step_s=0.001)
SLOW = rm.Rates(cross_bytes_per_s=2.5e6)


def make_plan(
    topology: Topology = Topology(hosts=2, local=4),  # noqa: B008
    **wishes: Any,
) -> Plan:
    tables = rm.EmbeddingBagCollection(TABLES, device="meta")
    model = rm.models.DLRM(tables, 13, (32, 16), (32, 1))
    given: dict[str, Any] = {"split": "row_wise", "exchange": "rows", "rates": SLOW, "cost": COST}
    return rm.make_plan(model, topology, stats=STATS, **given | wishes)


@functools.cache
def batches(world: int, step: int) -> list[rm.KeyedJaggedTensor]:
    return [CLICKS.batch_at(rank, step).sparse_features for rank in range(world)]


def sent(plan: Plan, link: str, edge: str, step: int = 0) -> int:
    found = rm.predict(plan, batches(plan.mesh.topology.world, step))
    return sum(edges.get(edge, {}).get(link, 0) for edges in found)


def test_a_row_crosses_once_for_a_host_and_its_gradient_once() -> None:
    plan = make_plan(merge="on")
    assert all(table.merged for table in plan.tables)
    mesh, features = plan.mesh, batches(8, 0)
    crossing = 0
    for table in plan.tables:
        for host in range(mesh.hosts):
            mine = features[host * mesh.local : (host + 1) * mesh.local]
            ids = np.unique(np.concatenate([b[table.feature_names[0]].values() for b in mine]))
            owners = np.array(table.rest.ranks)[table.homes().owners(ids)]
            crossing += int((owners // mesh.local != host).sum())
    assert sent(plan, "cross", "rows") == sent(plan, "cross", "backward") == crossing * 16 * 4
    assert sent(plan, "cross", "ids") == crossing * 4
    flat = make_plan(merge="off")
    assert sent(flat, "cross", "rows") > 1.3 * crossing * 16 * 4
    assert sent(plan, "host", "rows") > sent(flat, "host", "rows")


@pytest.mark.parametrize("topology", [Topology(hosts=2, local=2), Topology(hosts=3, local=4)])
@pytest.mark.parametrize("codecs", ["fp32", "bf16"])
def test_expected_bytes_are_near_those_of_batches(topology: Topology, codecs: str) -> None:
    plan = make_plan(topology, merge="on", codecs=codecs)
    expected = expect_plan(plan, STATS.tables, rates=SLOW)
    steps = [rm.predict(plan, batches(topology.world, step)) for step in range(100, 120)]
    for link, load in (("host", expected.sent_host), ("cross", expected.sent_cross)):
        found = [
            sum(
                links.get(link, 0)
                for edges in step
                for edge, links in edges.items()
                if edge not in ("status", "counts")
            )
            for step in steps
        ]
        assert load.sum() == pytest.approx(float(np.mean(found)), rel=0.1)


def test_auto_merges_where_a_step_is_shorter() -> None:
    found = make_plan(merge="auto", depth=2)
    assert any(table.merged for table in found.tables)
    flat = make_plan(merge="off", depth=2)
    times = [plan_time(p, STATS.tables, rates=SLOW, cost=COST).total_s for p in (found, flat)]
    assert times[0] < 0.975 * times[1]
    fast = rm.Rates(cross_bytes_per_s=1e13)
    assert not any(table.merged for table in make_plan(merge="auto", rates=fast).tables)
    for topology in (Topology(local=4), Topology(hosts=4)):
        assert not any(table.merged for table in make_plan(topology, merge="auto").tables)


def test_hot_rows_are_chosen_for_what_merging_leaves() -> None:
    plan = make_plan(Topology(hosts=2, local=2), merge="on", tiers="auto", depth=2)
    times = [
        plan_time(
            make_plan(Topology(hosts=2, local=2), merge="on", tiers=tiers, depth=2),
            STATS.tables,
            rates=SLOW,
            cost=COST,
        ).total_s
        for tiers in ("off", "hot:100", "hot:1000")
    ]
    chosen = plan_time(plan, STATS.tables, rates=SLOW, cost=COST).total_s
    assert chosen <= min(times) / (1 - 0.025)


def test_merging_without_copied_rows_is_weighed_against_copied_rows_without_merging() -> None:
    # Merging the plan with its copies gains too little here, merging one without them enough.
    wishes: dict[str, Any] = {
        "rates": replace(SLOW, cross_bytes_per_s=1e6),
        "tiers": "auto",
        "depth": 2,
    }
    found, flat = (
        make_plan(Topology(hosts=2, local=2), merge=m, **wishes) for m in ("auto", "off")
    )
    candidates = (found, flat, merge_all(flat), merge_all(flat.without_hot_rows()))
    time, flat_s, merged_s, bare_s = (
        plan_time(p, STATS.tables, rates=wishes["rates"], cost=COST).total_s for p in candidates
    )
    assert any(table.hot for table in flat.tables)
    assert bare_s < 0.975 * flat_s < merged_s
    assert time < 0.975 * flat_s


def test_sums_are_flat_where_memory_is_slow_the_card_fast_and_nothing_needs_them_otherwise() -> (
    None
):
    """Flat sums go through a host's memory H times less, and across L times more."""
    square = Topology(hosts=4, local=2)
    tables = rm.EmbeddingBagCollection(TABLES, device="meta")
    model = rm.models.DLRM(tables, 13, (512, 16), (512, 512, 1))
    given: dict[str, Any] = {"stats": STATS, "split": "row_wise", "exchange": "rows", "cost": COST}
    slow = rm.Rates(host_bytes_per_s=1e8, cross_bytes_per_s=1e10)
    flat = rm.make_plan(model, square, rates=slow, merge="off", **given)
    assert flat.tree == "flat"
    steps = [
        plan_time(replace(flat, tree=tree), STATS.tables, rates=slow, cost=COST).total_s
        for tree in ("flat", "host-first")
    ]
    assert steps[0] < steps[1] * 0.975
    assert rm.make_plan(model, square, rates=slow, merge="on", **given).tree == "host-first"
    assert rm.make_plan(model, square, rates=SLOW, merge="off", **given).tree == "host-first"


def test_merging_that_is_asked_for_is_not_refused_where_copied_tables_would_be_faster() -> None:
    """Tiny tables and long latencies."""
    configs = [
        rm.EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=9, embedding_dim=4, feature_names=[f"f{i}"]
        )
        for i in range(3)
    ]
    model = rm.EmbeddingBagCollection(configs, device="meta")
    rates = rm.Rates(cross_latency_s=1e-2)
    for tiers in ("off", "auto"):
        given: dict[str, Any] = {"rates": rates, "cost": COST, "tiers": tiers}
        if tiers == "auto":
            ids = torch.arange(64) % 9
            lengths = torch.ones(3 * 64, dtype=torch.int64)
            batch = rm.KeyedJaggedTensor(["f0", "f1", "f2"], ids.repeat(3), lengths=lengths)
            given["stats"] = Stats.from_batches(configs, [batch] * 16)
        free = rm.make_plan(model, Topology(hosts=2, local=2), **given)
        assert not any(table.merged for table in free.tables)
        asked = rm.make_plan(model, Topology(hosts=2, local=2), merge="on", **given)
        assert any(table.merged for table in asked.tables)


def test_words_of_merge() -> None:
    with pytest.raises(InputError, match="unknown merge 'onn': did you mean 'on'"):
        make_plan(merge="onn")
    with pytest.raises(PlanError, match="hosts of several ranks \\(here 4 x 1\\)"):
        make_plan(Topology(hosts=4), merge="on")


def test_merged_is_written_and_shown() -> None:
    plan = make_plan(merge="on")
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "rows merged" in str(plan)
    other = replace(plan, tables=tuple(replace(t, merged=False) for t in plan.tables))
    assert merge_all(other) == plan


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"exchange": Exchange.POOLED}, "its exchange must be 'rows', with dedup"),
        ({"dedup": False}, "its exchange must be 'rows', with dedup"),
        ({"group": 4}, "several whole hosts"),
    ],
)
def test_what_cannot_be_merged(change: dict[str, Any], sentence: str) -> None:
    plan = make_plan(merge="on", split="table_wise")
    tables = [replace(table, **change) for table in plan.tables]
    with pytest.raises(PlanError, match=sentence):
        replace(plan, tables=tuple(tables)).validate()
    with pytest.raises(PlanError, match="tree must be 'host-first'"):
        replace(plan, tree="flat").validate()


def make_case(**changes: Any) -> Case:
    """Merged tables of every kind on 2 x 2 ranks, and one that is not."""
    everyone = (2, 0, 3, 1)
    tables = (
        Table(rows=16, dim=4, ranks=everyone, merged=True),
        Table(rows=16, dim=4, ranks=everyone, merged=True, hot=(0, 5), per_host=(1, 2, 9)),
        Table(rows=16, dim=8, ranks=(1, 2), columns=2, merged=True),
        Table(rows=8, dim=4, ranks=()),
        Table(rows=16, dim=4, ranks=everyone),
    )
    bags = [[0, 3, 3], [5, 1], [7, 3, 3, 2]]

    def ids(table: Table, rank: int, step: int) -> list[list[int]]:
        return [[(5 * i + 3 * rank + step) % table.rows for i in bag] for bag in bags]

    steps = [[[ids(t, rank, step) for t in tables] for rank in range(4)] for step in range(4)]
    given = {"tree": "host-first", "depth": 2, **changes}
    return Case(world=4, hosts=2, collections=(Collection(tables=tables),), ids=steps, **given)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"depth": 1}, {"depth": 3}])
def test_tables_of_every_kind(changes: dict[str, Any]) -> None:
    case = make_case(**changes)
    runs = run_on_ranks(4, train_case, case, hosts=2)
    assert not differences(case, runs, tolerance=0.0)
    if case.accumulate == 1:
        check_ledgers(case, runs)


@pytest.mark.parametrize("codecs", ["bf16", "int8"])
def test_codecs_are_for_what_crosses(codecs: str) -> None:
    case = make_case(codecs=codecs)
    runs = run_on_ranks(4, train_case, case, hosts=2)
    check_ledgers(case, runs)
    for other in (1, 3):
        deeper = run_on_ranks(4, train_case, replace(case, depth=other), hosts=2)
        assert all(
            (runs[0].weights[name] == weight).all() for name, weight in deeper[0].weights.items()
        )


Patch = contextlib.AbstractContextManager[Any]


def host_asked_wrongly(mesh: Mesh) -> Patch:
    original = merges.Peers.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        if mesh.rank == 1:
            self.bounds = [0, *(b + 1 for b in self.bounds[1:-1]), self.bounds[-1]]

    return mock.patch.object(merges.Peers, "__init__", init)


def rows_handed_to_the_wrong_ask(mesh: Mesh) -> Patch:
    original = merges.run_numbers
    return mock.patch.object(merges, "run_numbers", lambda *a: original(*a).flip(0))


def one_rank_of_the_host_left_out(mesh: Mesh) -> Patch:
    original = merged_sums.coalesce

    def coalesce(rows: Any, values: Any, *, index: Any, labels: Any) -> Any:
        doubled = values.clone()
        doubled[index[: len(index) // 2]] = 0.0
        return original(rows, doubled, index=index, labels=labels)

    return mock.patch.object(merged_sums, "coalesce", coalesce)


def late_rows_taken_for_early(mesh: Mesh) -> Patch:
    original = merges.Merges.send_early

    def send_early(self: Any, fetch: Any, late: Any) -> None:
        none = {i: [mask & False for mask in masks] for i, masks in late.items()}
        original(self, fetch, none)

    return mock.patch.object(merges.Merges, "send_early", send_early)


def hosts_added_in_the_wrong_place(mesh: Mesh) -> Patch:
    original = gradients.MergedSums.exchange

    def exchange(self: Any, *args: Any) -> Any:
        found, left = original(self, *args)
        return {i: (rows.flip(0), grads) for i, (rows, grads) in found.items()}, left

    return mock.patch.object(gradients.MergedSums, "exchange", exchange)


MUTATIONS = [
    host_asked_wrongly,
    rows_handed_to_the_wrong_ask,
    one_rank_of_the_host_left_out,
    late_rows_taken_for_early,
    hosts_added_in_the_wrong_place,
]


def train_mutated(mesh: Mesh, case: Case, number: int) -> Run:
    with MUTATIONS[number](mesh):
        return train_case(mesh, case)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mutation_is_caught(mutation: Callable[[Mesh], Patch]) -> None:
    case, number = make_case(), MUTATIONS.index(mutation)
    try:
        runs = run_on_ranks(4, train_mutated, case, number, hosts=2)
    except RankError:
        return
    assert differences(case, runs, tolerance=0.0)
