"""Expected bytes and seconds of shard groups and of their replicas' sync."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rowmesh.cost import (
    DenseCost,
    Rates,
    RowCost,
    expect_dense,
    expect_plan,
    expect_sync,
    expect_tables,
    imbalance,
    plan_time,
    predict,
    step_seconds,
)
from rowmesh.cost.seconds import latency_seconds
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import (
    Copies,
    Exchange,
    MeshShape,
    Plan,
    Split,
    Sync,
    TablePlan,
    Tier,
    make_hot_set,
)
from rowmesh.placement.memory import RULE_STATES
from rowmesh.stats import Accesses, Stats
from rowmesh.tables import EmbeddingBagConfig, PoolingType
from rowmesh.topology import Link

ROWS = 6400
MODES = {
    "gradients": Sync(),
    "weights": Sync(mode="weights", period=2),
    "dense": Sync(mode="weights", period=4, form="dense"),
    "moments-first": Sync(mode="moments-first", period=2),
}
HOSTS, LOCAL = 2, 4


def zipf(rng: np.random.Generator, size: int) -> KeyedJaggedTensor:
    """Bags of a mean of two ids, planted Zipf."""
    lengths = rng.poisson(2.0, size)
    weights = np.arange(1, ROWS + 1) ** -1.05
    ids = rng.choice(ROWS, size=int(lengths.sum()), p=weights / weights.sum())
    ids = (ids * 2797) % ROWS  # so that hot rows are not neighbours
    return KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=torch.from_numpy(lengths))


@pytest.fixture(scope="module")
def steps() -> list[list[KeyedJaggedTensor]]:
    rng = np.random.default_rng(0)
    return [[zipf(rng, 128) for _ in range(HOSTS * LOCAL)] for _ in range(20)]


@pytest.fixture(scope="module")
def stats(steps: list[list[KeyedJaggedTensor]]) -> Stats:
    config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])
    return Stats.from_batches([config], [batch for step in steps for batch in step])


def table(**changes: Any) -> TablePlan:
    fields: dict[str, Any] = {
        "collection": "",
        "num_embeddings": ROWS,
        "embedding_dim": 8,
        "data_type": "fp32",
        "pooling": PoolingType.SUM,
        "feature_names": ("f",),
        "virtual_shards": 64,
    }
    return TablePlan(name="t", **fields | changes)


def in_groups(size: int, layout: str, sync: Sync, kind: str, stats: Stats) -> Plan:
    """One table under a kind of placement, in groups of so many of eight ranks."""
    mesh = MeshShape(hosts=HOSTS, local=LOCAL, group=size, layout=layout)  # type: ignore[arg-type]
    empty = Plan(mesh=mesh, tables=(), tree="host-first", sync=sync)
    ranks = empty.groups(table(tiers=(Tier(ranks=(0,)),))).members(0)
    rest = Tier(ranks=ranks, split=Split(kind="boxes", rows="all"))
    more: dict[str, Any] = {}
    if kind == "whole-pooled":
        rest, more = Tier(ranks=ranks[-1:]), {"exchange": Exchange.POOLED}
    if kind == "columns":
        pieces = min(2, size)
        rest = Tier(ranks=ranks[:pieces], split=Split(kind="boxes", columns=pieces, rows="none"))
    tiers: tuple[Tier, ...] = (rest,)
    if kind.startswith("hot"):
        heat = stats.tables["t"].heat
        assert heat is not None
        rows = make_hot_set("t", heat.ids[:200])
        hot = Tier(ranks=tuple(range(8)), copies=Copies.WORLD, rows=rows)
        if kind == "hot-per-host":
            split = Split(kind="boxes", rows="host")
            hot = replace(hot, copies=Copies.HOST, split=split)
        tiers = (hot, rest)
    return replace(empty, tables=(table(tiers=tiers, **more),)).validate()


def measured(plan: Plan, steps: list[list[KeyedJaggedTensor]]) -> NDArray[np.float64]:
    """``[2, W]``: mean bytes each rank sends inside its host and across, but for counts."""
    period, found = plan.sync.period, np.zeros((2, HOSTS * LOCAL))
    for number, step in enumerate(steps):
        earlier = steps[number - number % period : number]
        for rank, edges in enumerate(predict(plan, step, earlier=earlier)):
            for edge, links in edges.items():
                if edge not in ("status", "counts"):
                    found[:, rank] += links.get("host", 0), links.get("cross", 0)
    return found / len(steps)


@pytest.mark.parametrize("kind", ["row-wise", "whole-pooled", "columns", "hot"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "layout"), [(4, "contiguous"), (4, "strided"), (2, "strided")])
def test_expected_bytes_of_groups_are_within_a_tenth_of_predict(
    size: int,
    layout: str,
    mode: str,
    kind: str,
    steps: list[list[KeyedJaggedTensor]],
    stats: Stats,
) -> None:
    """Per rank and link, over the mean of 20 batches: two replicas, and four."""
    plan = in_groups(size, layout, MODES[mode], kind, stats)
    found = expect_plan(plan, stats.tables)
    expected = np.array([found.sent_host, found.sent_cross])
    assert expected == pytest.approx(measured(plan, steps), rel=0.1, abs=1.0)
    assert found.sent_host.sum() == pytest.approx(found.received_host.sum())
    assert found.sent_cross.sum() == pytest.approx(found.received_cross.sum())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("size", "kind"), [(4, "hot-per-host"), (1, "row-wise"), (1, "hot"), (2, "row-wise")]
)
def test_expected_bytes_of_small_groups(
    size: int, kind: str, mode: str, steps: list[list[KeyedJaggedTensor]], stats: Stats
) -> None:
    """Groups inside a host, every rank a group, copies per host inside a group."""
    plan = in_groups(size, "contiguous", MODES[mode], kind, stats)
    found = expect_plan(plan, stats.tables)
    expected = np.array([found.sent_host, found.sent_cross])
    assert expected == pytest.approx(measured(plan, steps), rel=0.1, abs=1.0)


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_uneven_strided_groups_have_their_true_links(kind: str) -> None:
    """3 hosts x 4 ranks in 3 groups: 0, 3, 6, 9 are on hosts 0, 0, 1, 2; the others differ."""
    mesh = MeshShape(hosts=3, local=4, group=4, layout="strided")
    split = Split(kind="boxes", rows="all")
    if kind == "columns":
        split = Split(kind="boxes", columns=4, rows="none")
    one = table(tiers=(Tier(ranks=(0, 3, 6, 9), split=split),))
    plan = Plan(mesh=mesh, tables=(one,)).validate()
    ids = torch.arange(ROWS)  # everything by everyone: no luck in it
    batch = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([ROWS]))
    accesses = {"t": Accesses(requests=ROWS, bags=1.0, growth=(float(ROWS),) * 8)}
    found = expect_tables(plan, accesses)
    sent = np.zeros((2, 12))
    for rank, edges in enumerate(predict(plan, [batch] * 12)):
        for edge in ("ids", "rows", "backward", "column squares"):
            links = edges.get(edge, {})
            sent[:, rank] += links.get("host", 0), links.get("cross", 0)
    assert np.array([found.sent_host, found.sent_cross]) == pytest.approx(sent)
    assert found.sent_host.sum() == pytest.approx(found.received_host.sum())


ROUNDS = {"gradients": 2.0, "weights": 1.0, "dense": 0.5, "moments-first": 3.0}


@pytest.mark.parametrize("mode", MODES)
def test_the_sync_adds_rounds_seconds_and_work(mode: str, stats: Stats) -> None:
    """Two replicas: counts and rows; half as often with period 2. Four take twice as many."""
    rates = Rates(cross_latency_s=1.0)
    two, four = (in_groups(size, "contiguous", MODES[mode], "row-wise", stats) for size in (4, 2))
    sync = expect_sync(two, stats.tables)
    assert sync.rounds == ROUNDS[mode]
    assert expect_sync(four, stats.tables).rounds == (0.5 if mode == "dense" else 2 * ROUNDS[mode])
    both = replace(two, tables=(*two.tables, replace(two.tables[0], name="other")))
    again = expect_sync(both, stats.tables | {"other": stats.tables["t"]})
    assert again.rounds == sync.rounds  # all tables share the messages
    assert again.values == pytest.approx(2 * sync.values)
    assert (sync.work > 0.0).all()
    assert (sync.values[4:8] == 0.0).all()  # no backward hides it
    topology = two.mesh.topology
    late = latency_seconds(["rows"], topology=topology, rates=rates, rounds=sync.rounds)
    assert late == 1 + 3 + ROUNDS[mode]
    cost = DenseCost(flops=1.0, parameters=1.0, forward_s=1.0, backward_s=1.0, step_s=1.0)
    whole = plan_time(two, stats.tables, rates=rates, cost=cost)
    inside = sync.sent_host.max() / rates.host_bytes_per_s
    card = sync.sent_cross.reshape(HOSTS, LOCAL).sum(1).max() / rates.cross_bytes_per_s
    assert whole.sync_s == pytest.approx(inside + card)
    total = expect_plan(two, stats.tables, rates=rates)
    assert step_seconds(total, topology=topology, rates=rates) > step_seconds(
        expect_tables(two, stats.tables, rates=rates), topology=topology, rates=rates
    )


def test_work_of_the_sync() -> None:
    """M = 2, n = 10 rows each: read, and add what came. Four: n = 10, u = 40."""
    cost = RowCost(dim=8, id_s=0.0, lookup_s=1.0, update_s=100.0, bag_id_s=0.0, bag_update_s=0.0)
    rates, accesses = Rates(rows=(cost,)), Accesses(requests=10.0, bags=1.0, growth=(10.0,))
    one = table(tiers=(Tier(ranks=(0,)),))
    for local, work in ((2, 10 * 101), (4, 0.75 * 1010 + 40 * (0.25 + 75))):
        mesh = MeshShape(hosts=1, local=local, group=1)
        plan = Plan(mesh=mesh, tables=(one,))
        assert expect_sync(plan, {"t": accesses}, rates=rates).work == pytest.approx(work)
    apart = replace(plan, sync=Sync(mode="weights"))
    less = 0.75 * 1010 + 40 * (0.25 + 0.75)
    assert expect_sync(apart, {"t": accesses}, rates=rates).work == pytest.approx(less)
    dense = replace(plan, sync=Sync(mode="weights", form="dense"))
    assert expect_sync(dense, {"t": accesses}, rates=rates).work == pytest.approx(3 * ROWS)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam", "sgd"])
def test_the_rules_state_travels_with_weights(rule: str) -> None:
    state, accesses = RULE_STATES[rule], Accesses(requests=10.0, bags=1.0, growth=(10.0,))
    mesh = MeshShape(hosts=2, local=1, group=1)
    plan = Plan(mesh=mesh, tables=(table(tiers=(Tier(ranks=(0,)),)),), sync=Sync(mode="weights"))
    row = 32 + state.row_bytes + 8 * state.element_bytes
    assert expect_sync(plan, {"t": accesses}, state=state).sent_cross == pytest.approx(
        10 * (4 + row)
    )
    first = replace(plan, sync=Sync(mode="moments-first"))
    squares = 10 * 8 if state.adds_squares else 0
    found = expect_sync(first, {"t": accesses}, state=state)
    assert found.sent_cross == pytest.approx(10 * (4 + 32) + squares)


def test_nothing_is_synced_without_replicas_or_training() -> None:
    accesses = {"t": Accesses(requests=10.0, bags=1.0, growth=(10.0,))}
    mesh = MeshShape(hosts=2, local=1, group=1)
    frozen = table(tiers=(Tier(ranks=(0,)),), trainable=False)
    everywhere = table(tiers=(Tier(ranks=(0, 1), copies=Copies.WORLD),))
    for one in (frozen, everywhere):
        found = expect_sync(Plan(mesh=mesh, tables=(one,)), accesses)
        assert not found.values.any()
        assert found.rounds == 0.0


@pytest.mark.parametrize(("hosts", "local"), [(2, 4), (3, 4), (4, 2), (1, 8)])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_replicas_are_told_on_the_links_they_are_on(hosts: int, local: int, layout: str) -> None:
    """Of every rank, bytes to replicas of its host and to others are as their numbers."""
    accesses = {"t": Accesses(requests=10.0, bags=1.0, growth=(10.0,))}
    for size in (1, 2, 4):
        mesh = MeshShape(hosts=hosts, local=local, group=size, layout=layout)  # type: ignore[arg-type]
        empty = Plan(mesh=mesh, tables=())
        groups = empty.groups(table(tiers=(Tier(ranks=(0,)),)))
        rest = Tier(ranks=groups.members(0), split=Split(kind="boxes", rows="all"))
        plan = replace(empty, tables=(table(tiers=(rest,)),)).validate()
        found, topology = expect_sync(plan, accesses), mesh.topology
        for rank in range(topology.world):
            links = [topology.link(rank, r) for r in groups.replicas(rank) if r != rank]
            total = found.sent_host[rank] + found.sent_cross[rank]
            share = links.count(Link.HOST) / len(links)
            assert found.sent_host[rank] == pytest.approx(share * total)


def test_imbalance_is_the_largest_over_the_mean() -> None:
    assert imbalance([1.0, 3.0]) == 1.5
    assert imbalance([2, 2, 2]) == 1.0
    assert imbalance(np.zeros(4)) == 1.0
    load = expect_dense(8, topology=MeshShape(hosts=2, local=2, group=4).topology)
    assert imbalance(load.sent_host) == 1.0
