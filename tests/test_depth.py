"""How many batches are begun at a time: what travels ahead, and what the planner takes."""

from dataclasses import replace

import numpy as np
import pytest

import rowmesh as rm
from rowmesh.cost import DenseCost, plan_time
from rowmesh.cost.early import early_part, early_share, follow_share, late_share
from rowmesh.cost.totals import expect_each
from rowmesh.data import SyntheticClicks
from rowmesh.errors import PlanError
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.planners import make_plan, parse_depth
from rowmesh.stats import Accesses, Stats
from rowmesh.topology import Topology

CLICKS = SyntheticClicks(cap=2000, alpha=1.05, batch_size=256)
COST = DenseCost(
    flops=1.0, parameters=1.0, forward_s=0.05, backward_s=0.1, step_s=0.01, tail_s=0.02
)
SLOW = rm.Rates(cross_bytes_per_s=2.5e6)


def make_model() -> rm.models.DLRM:
    tables = rm.EmbeddingBagCollection(CLICKS.tables(16), device="meta")
    return rm.models.DLRM(
        tables,
        dense_in_features=13,
        dense_arch_layer_sizes=(32, 16),
        over_arch_layer_sizes=(32, 1),
    )


def make_stats(num_batches: int = 32) -> Stats:
    batches = [CLICKS.batch_at(0, i).sparse_features for i in range(num_batches)]
    return Stats.from_batches(CLICKS.tables(16), batches)


STATS = make_stats()


@pytest.mark.parametrize("num_batches", [2, 4])
def test_the_share_of_late_rows_is_that_of_other_batches(num_batches: int) -> None:
    expected = rows = late = 0.0
    for table in CLICKS.tables(16):
        accesses = STATS.tables[table.name]
        expected += late_share(accesses, num_batches) * accesses.distinct
        for first in range(40, 40 + 8 * (num_batches + 1), num_batches + 1):
            ids = [
                CLICKS.batch_at(0, first + i).sparse_features[table.feature_names[0]].values()
                for i in range(num_batches + 1)
            ]
            own = np.unique(ids[0].numpy())
            others = np.unique(np.concatenate([i.numpy() for i in ids[1:]]))
            rows += len(own) / 8
            late += len(np.intersect1d(own, others)) / 8
    assert expected == pytest.approx(late, rel=0.1)
    assert late < rows


def test_a_table_has_no_more_rows_to_be_late_than_it_has() -> None:
    """Of 20 rows many batches ask for all: then none of a batch's is new."""
    accesses = Accesses(requests=64.0, bags=64.0, growth=(10.0, 19.0))
    assert late_share(accesses, 64) < 0.8  # a table of any size: growth goes on
    assert late_share(accesses, 64, num_rows=20) == 1.0
    assert late_share(accesses, 1, num_rows=20) == late_share(accesses, 1)


def plan_at(depth: int | str, hosts: int = 2, **kwargs: object) -> rm.Plan:
    topology = Topology(hosts=hosts, local=1 if hosts > 1 else 2)
    arguments = {"stats": STATS, "rates": SLOW, "cost": COST, "exchange": "rows"} | kwargs
    return make_plan(make_model(), topology, depth=depth, **arguments)  # type: ignore[arg-type]


def test_what_travels_ahead_shortens_the_step_by_no_more_than_it_takes() -> None:
    one = plan_at(1)
    times = [plan_time(replace(one, depth=d), STATS.tables, rates=SLOW, cost=COST) for d in (1, 2)]
    assert times[1].forward_s < 0.8 * times[0].forward_s
    assert times[1].total_s < times[0].total_s
    two = replace(one, depth=2)
    early = early_part(two, expect_each(two, STATS.tables, rates=SLOW), STATS.tables)
    hidden = early.sent_cross.max() / SLOW.cross_bytes_per_s
    assert times[0].forward_s - times[1].forward_s == pytest.approx(hidden)
    latencies = times[0].latency_s - times[1].latency_s
    assert times[0].total_s - times[1].total_s <= hidden + latencies + 1e-12
    assert not early_part(one, expect_each(one, STATS.tables), STATS.tables).values.any()


def test_sums_of_bags_and_rows_of_groups_that_sync_are_not_early() -> None:
    two = plan_at(2)
    table = max(two.tables, key=lambda t: t.num_embeddings)
    cold = STATS.tables[table.name]
    assert 0.0 < early_share(two, table, cold) < 1.0
    assert early_share(two, replace(table, trainable=False), cold) == 1.0
    pooled = replace(table, exchange=type(table.exchange)("pooled"))
    assert early_share(two, pooled, cold) == 0.0
    apart = replace(two, mesh=replace(two.mesh, group=1))
    assert early_share(apart, table, cold) == 0.0
    weights = replace(apart, sync=rm.Sync(mode="weights", period=4))
    alone = 1.0 - late_share(cold, 1)
    assert early_share(weights, table, cold) == pytest.approx(0.75 * alone)


def test_gradients_of_rows_that_the_next_batch_does_not_ask_for_follow() -> None:
    arguments = {"stats": STATS, "rates": SLOW, "cost": COST, "exchange": "rows", "merge": "on"}
    plan = make_plan(make_model(), Topology(hosts=2, local=2), depth=2, **arguments)  # type: ignore[arg-type]
    expected = counted = 0.0
    for table in plan.tables:
        cold = STATS.tables[table.name]
        expected += follow_share(plan, table, cold) * cold.union(2)
        for step in range(40, 48):
            ids = [
                CLICKS.batch_at(rank, step + later).sparse_features[table.feature_names[0]].values()
                for later in (0, 1)
                for rank in range(4)
            ]
            asked = np.unique(np.concatenate([i.numpy() for i in ids[:2]]))  # by the first host
            again = np.unique(np.concatenate([i.numpy() for i in ids[4:]]))
            counted += len(np.setdiff1d(asked, again)) / 8
    assert expected == pytest.approx(counted, rel=0.1)
    at_once = replace(plan, depth=1)
    for table in plan.tables:
        cold = STATS.tables[table.name]
        assert follow_share(at_once, table, cold) == 0.0
        for change in ({"merged": False}, {"trainable": False}):
            assert follow_share(plan, replace(table, **change), cold) == 0.0  # type: ignore[arg-type]
    times = [plan_time(p, STATS.tables, rates=SLOW, cost=COST) for p in (at_once, plan)]
    loads = expect_each(plan, STATS.tables, rates=SLOW)
    early = early_part(plan, loads, STATS.tables).values
    returned = sum(load.values[6:8] for load in loads.values())
    assert (early[6:8] < 0.8 * returned).all()
    assert (early[6:8] > 0.2 * returned).all()
    hidden = early[6:8].reshape(2, 2, 2).sum(2).max() / SLOW.cross_bytes_per_s
    assert 0.0 < times[0].gradients_s - times[1].gradients_s <= hidden + 1e-12


def test_auto_takes_the_shortest_step() -> None:
    found = plan_at("auto")
    assert found.depth > 1
    times = [plan_time(plan_at(d), STATS.tables, rates=SLOW, cost=COST).total_s for d in (1, 2, 3)]
    chosen = plan_time(found, STATS.tables, rates=SLOW, cost=COST).total_s
    assert chosen <= min(times) / (1 - 0.025)
    fast = rm.Rates(cross_bytes_per_s=1e13, host_bytes_per_s=1e13, cross_latency_s=0.0)
    assert plan_at("auto", rates=fast).depth == 1


def test_auto_without_a_calibration_looks_ahead_across_hosts_only() -> None:
    assert plan_at("auto", cost=None).depth == 2
    assert plan_at("auto", hosts=1, cost=None).depth == 1


@pytest.mark.parametrize("cost", [COST, None])
def test_auto_looks_ahead_only_where_what_it_remembers_fits(cost: DenseCost | None) -> None:
    held = max(bytes_per_rank(plan_at(1, cost=cost, split="row_wise")))
    limits = rm.Constraints(max_bytes_per_rank=held)
    with pytest.raises(PlanError, match="needs at least"):
        plan_at(2, cost=cost, split="row_wise", constraints=limits)
    assert plan_at("auto", cost=cost, split="row_wise", constraints=limits).depth == 1
    assert plan_at("auto", cost=cost, split="row_wise").depth > 1


def test_hot_rows_are_chosen_for_the_depth() -> None:
    """Copies pay more where the rest can be fetched ahead: late rows are the hot ones."""
    cold = plan_at(2)
    hot = plan_at(2, tiers="hot:500")
    shares = []
    for plan in (cold, hot):
        loads = expect_each(plan, STATS.tables, rates=SLOW)
        early = early_part(plan, loads, STATS.tables).sent_cross.sum()
        forward = sum((v.values[2] - v.values[6]).sum() for v in loads.values())
        shares.append(early / forward)
    assert shares[1] > shares[0]


def test_what_a_depth_may_be() -> None:
    assert [parse_depth(d) for d in ("auto", "3", 1)] == [None, 3, 1]
    for wrong in ("deep", 0, 9, "-1", "１"):
        with pytest.raises(rm.InputError, match="say auto, or a number of batches from 1 to 8"):
            parse_depth(wrong)
