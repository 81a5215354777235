"""Expected bytes and seconds, and the statistics they come from."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowmesh.cost import (
    Load,
    Rates,
    RowCost,
    expect_dense,
    expect_plan,
    expect_table,
    predict,
    step_seconds,
)
from rowmesh.cost.load import no_load
from rowmesh.cost.seconds import latency_seconds, rank_seconds
from rowmesh.errors import InputError, PlanError
from rowmesh.features import JaggedTensor, KeyedJaggedTensor
from rowmesh.placement import (
    Copies,
    Exchange,
    MeshShape,
    Plan,
    Split,
    TablePlan,
    Tier,
)
from rowmesh.placement.columns import num_blocks
from rowmesh.placement.memory import RULE_STATES
from rowmesh.stats import Accesses, Stats, distinct
from rowmesh.tables import EmbeddingBagConfig, PoolingType
from rowmesh.topology import Topology

LAW = settings(derandomize=True, deadline=None, max_examples=50)
SQUARE = Topology(hosts=2, local=2)
ROW_WISE = Split(kind="boxes", rows="all")


def bag(name: str, rows: int = 1_000_000, dim: int = 16, **more: Any) -> EmbeddingBagConfig:
    fields = {"feature_names": [f"f_{name}"]} | more
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, **fields)


def uses(pooling: float, distinct: float, batch_size: int = 1000) -> Accesses:
    requests = batch_size * pooling
    return Accesses(requests=requests, bags=float(batch_size), growth=(distinct,))


def table_plan(world: int, **changes: Any) -> TablePlan:
    fields: dict[str, Any] = {
        "collection": "",
        "num_embeddings": 6,
        "embedding_dim": 2,
        "data_type": "fp32",
        "pooling": PoolingType.SUM,
        "feature_names": ("f",),
        "virtual_shards": 6,
        "tiers": (Tier(ranks=tuple(range(world)), split=ROW_WISE),),
    }
    return TablePlan(name="t", **fields | changes)


def mean_sent(load: Load) -> float:
    return float((load.sent_host + load.sent_cross).mean())


def mean_gradients(load: Load) -> float:
    return float((load.values[4] + load.values[6]).mean())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("trainable", [False, True])
def test_expected_bytes_are_the_mean_over_all_batches(
    world: int, whole: bool, dtype: str, trainable: bool
) -> None:
    """Every batch of two bags of two ids, every rank: rows with and without dedup, pooled."""
    table = table_plan(world, data_type=dtype, trainable=trainable)
    if whole:
        table = replace(table, tiers=(Tier(ranks=(0,)),))
    row, gradient = (8 if dtype == "fp32" else 4), 8
    draws = list(itertools.product(range(6), repeat=4))
    distinct = float(np.mean([len(set(ids)) for ids in draws]))
    accesses = Accesses(requests=4.0, bags=2.0, growth=(distinct,))
    forward = {"dedup": 0.0, "all": 0.0, "pooled": 0.0}
    vectors = dict(forward)
    for ids, rank in itertools.product(draws, range(world)):
        homes = [0 if whole else r % world for r in ids]
        away = [i for i in range(4) if homes[i] != rank]
        rows = {ids[i] for i in away}
        sums = {(i // 2, homes[i]) for i in away}
        for name, num_ids, num, size in (
            ("dedup", len(rows), len(rows), row),
            ("all", len(away), len(away), row),
            ("pooled", len(away), len(sums), gradient),
        ):
            forward[name] += (4 * num_ids + size * num) / len(draws) / world
            vectors[name] += num / len(draws) / world
    for name in forward:
        exchange = Exchange.POOLED if name == "pooled" else Exchange.ROWS
        setting = replace(table, exchange=exchange, dedup=name == "dedup")
        found = expect_table(setting, accesses, topology=Topology(local=world))
        backward = mean_gradients(found)
        assert mean_sent(found) - backward == pytest.approx(forward[name])
        assert backward == pytest.approx(vectors[name] * gradient * trainable)


def copied(world: int, **changes: Any) -> TablePlan:
    tiers = (Tier(ranks=tuple(range(world)), copies=Copies.WORLD),)
    return table_plan(world, tiers=tiers, num_embeddings=6400, virtual_shards=64, **changes)


def one_table_plan(table: TablePlan, topology: Topology) -> Plan:
    mesh = MeshShape(hosts=topology.hosts, local=topology.local, group=topology.world)
    return Plan(mesh=mesh, tables=(table,)).validate()


def sent(plan: Plan, batches: list[KeyedJaggedTensor]) -> NDArray[np.float64]:
    """``[2, W]``: bytes each rank sends inside its host and across, but for status and counts."""
    found = np.zeros((2, len(batches)))
    for rank, edges in enumerate(predict(plan, batches)):
        for edge, links in edges.items():
            if edge not in ("status", "counts"):
                found[:, rank] += links.get("host", 0), links.get("cross", 0)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("trainable", [False, True])
def test_expected_bytes_of_copies(world: int, trainable: bool) -> None:
    """Ranks that touch different rows: the union is W d; ids travel as lists."""
    table, topology = copied(world, trainable=trainable), Topology(hosts=world)
    batches = [
        KeyedJaggedTensor.from_dense({"f": torch.arange(8 * r, 8 * r + 8)}) for r in range(world)
    ]
    found = expect_table(table, uses(1, 8.0, 8), topology=topology)
    measured = sent(one_table_plan(table, topology), batches).sum(0).mean()
    assert mean_sent(found) == pytest.approx(measured)
    assert mean_gradients(found) == pytest.approx(measured)  # all of it may be hidden
    if trainable and world > 1:  # the union is the table, and which rows are meant is a bitmap
        full = expect_table(table, uses(1, 6400.0, 6400), topology=topology)
        away = (world - 1) / world
        assert mean_sent(full) == pytest.approx(away * (6400 * (8 + 8) + 2 * 4 * 200))


@pytest.mark.parametrize(("hosts", "local"), [(1, 1), (1, 4), (4, 1), (2, 2)])
def test_expected_bytes_of_dense_buckets(hosts: int, local: int) -> None:
    topology, world = Topology(hosts=hosts, local=local), hosts * local
    mesh = MeshShape(hosts=hosts, local=local, group=world)
    plan = Plan(mesh=mesh, tables=(), dense=(8, 1000))
    batch = KeyedJaggedTensor.from_dense({"f": torch.zeros(1, dtype=torch.int64)})
    found = expect_dense(1008, topology=topology)
    assert np.array([found.sent_host, found.sent_cross]) == pytest.approx(
        sent(plan, [batch] * world)
    )
    assert (found.values[:4] == found.values[4:8]).all()


def test_expected_bytes_of_dense_buckets_summed_host_first() -> None:
    """Every chunk goes to its owner in the host, on to the hosts, back, and to all in the host."""
    hosts, local, elements = 3, 4, 240
    load = expect_dense(elements, topology=Topology(hosts=hosts, local=local), tree="host-first")
    chunk = 4 * elements // local
    assert (load.sent_host == 2 * chunk * (local - 1)).all()
    assert (load.sent_cross == 2 * chunk // hosts * (hosts - 1)).all()
    assert (load.received_host == load.sent_host).all()
    assert (load.received_cross == load.sent_cross).all()
    assert expect_dense(0, topology=SQUARE).kinds == frozenset()


def jagged_batch(rng: np.random.Generator, size: int, mean: float) -> KeyedJaggedTensor:
    lengths = torch.from_numpy(rng.poisson(mean, size))
    ids = torch.from_numpy((rng.random(int(lengths.sum())) ** 1.5 * 6400).astype(np.int64))
    weights = torch.ones(len(ids))
    return KeyedJaggedTensor(["f"], ids, weights, lengths=lengths)


def boxes(*ranks: int, columns: int = 1, rows: str = "all") -> dict[str, Any]:
    split = Split(kind="boxes", columns=columns, rows=rows)  # type: ignore[arg-type]
    return {"tiers": (Tier(ranks=ranks, split=split),)}


POOLED = {"exchange": Exchange.POOLED}
OLD: dict[str, dict[str, Any]] = {
    "rows": {},
    "no-dedup": {"dedup": False},
    "fp16": {"data_type": "fp16"},
    "frozen": {"trainable": False},
    "pooled": POOLED,
    "pooled-weighted": {**POOLED, "weighted": True, "embedding_dim": 1},
    "row-wise-on-three": boxes(3, 0, 1),
    "table-wise": {"tiers": (Tier(ranks=(2,)),)},
    "table-wise-pooled": {**POOLED, "tiers": (Tier(ranks=(2,)),)},
    "copies": {"tiers": (Tier(ranks=(0, 1, 2, 3), copies=Copies.WORLD),)},
}
NEW: dict[str, dict[str, Any]] = {
    "column-wise": boxes(3, 0, columns=2, rows="none"),
    "column-wise-pooled": {**POOLED, **boxes(0, 1, columns=2, rows="none")},
    "column-wise-frozen": {**POOLED, "trainable": False, **boxes(0, 3, columns=2, rows="none")},
    "column-wise-of-uneven-pieces": {
        **POOLED,
        "embedding_dim": 6,
        **boxes(0, 3, 1, 2, columns=4, rows="none"),
    },
    "table-row-wise": boxes(2, 3, rows="host"),
    "table-row-wise-pooled": {**POOLED, **boxes(2, 3, rows="host")},
    "table-row-wise-pooled-weighted": {**POOLED, "weighted": True, **boxes(0, 1, rows="host")},
    "table-row-wise-on-one": {**POOLED, **boxes(2, rows="host")},
    "grid": boxes(2, 3, 0, 1, columns=2, rows="host"),
    "grid-pooled": {**POOLED, **boxes(0, 1, 2, 3, columns=2, rows="host")},
    "boxes": boxes(0, 2, 1, 3, columns=2, rows="all"),
}


def draw(changes: dict[str, Any], mean: float) -> tuple[TablePlan, list[list[KeyedJaggedTensor]]]:
    """A table under a setting, and 20 steps of four ranks."""
    rng = np.random.default_rng(0)
    fields: dict[str, Any] = {"num_embeddings": 6400, "virtual_shards": 64, "embedding_dim": 8}
    table = table_plan(4, **fields | changes)
    return table, [[jagged_batch(rng, 256, mean) for _ in range(4)] for _ in range(20)]


def expect(table: TablePlan, steps: list[list[KeyedJaggedTensor]]) -> Load:
    config = bag("t", 6400, feature_names=["f"])
    stats = Stats.from_batches([config], [b for step in steps for b in step])
    return expect_table(table, stats.tables["t"], topology=SQUARE)


@pytest.mark.parametrize("mean", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("name", [*OLD, *NEW])
def test_expected_bytes_are_within_a_tenth_of_predict(name: str, mean: float) -> None:
    """Per rank and link, over the mean of 20 batches."""
    table, steps = draw((OLD | NEW)[name], mean)
    plan = one_table_plan(table, SQUARE)
    measured = np.mean([sent(plan, step) for step in steps], axis=0)
    found = expect(table, steps)
    expected = np.array([found.sent_host, found.sent_cross])
    assert expected == pytest.approx(measured, rel=0.1, abs=1.0)


def messages(table: TablePlan, batches: list[KeyedJaggedTensor]) -> NDArray[np.float64]:
    """``[source, target]``: bytes of one step under a split of owners, message by message."""
    tier, bytes_of = table.rest, np.zeros((4, 4))
    owners = len(tier.ranks) // tier.split.columns
    touched = [b["f"].values().numpy() for b in batches]
    union = np.unique(np.concatenate(touched))
    trained = int(table.trainable)
    block = table.embedding_dim // num_blocks(table.embedding_dim)
    for piece, (first, last) in enumerate(table.columns()):
        ranks = tier.ranks[piece * owners : (piece + 1) * owners]
        gradient, row = 4 * (last - first), table.row_bytes * (last - first) // table.embedding_dim
        for source, batch in enumerate(batches):
            lengths = batch["f"].lengths().numpy()
            ids, bags = touched[source], np.repeat(np.arange(len(lengths)), lengths)
            asking = source
            pooled = table.exchange is Exchange.POOLED
            if pooled and tier.split.rows == "host" and owners > 1:
                asking = ranks[0] // 2 * 2 + source % 2
                vectors = gradient * len(np.unique(bags))
                asked = len(ids) * (8 if table.weighted else 4)
                bytes_of[source, asking] += asked + trained * vectors
                bytes_of[asking, source] += vectors
                pooled = False
            wanted = ids if pooled or not table.dedup else np.unique(ids)
            home = table.homes().owners(wanted)
            for owner, rank in enumerate(ranks):
                mine = home == owner
                num_vectors = len(np.unique(bags[mine])) if pooled else int(mine.sum())
                size = 8 if pooled and table.weighted else 4
                bytes_of[asking, rank] += size * mine.sum() + trained * gradient * num_vectors
                bytes_of[rank, asking] += (gradient if pooled else row) * num_vectors
        for owner, rank in enumerate(ranks):
            num_rows = int((table.homes().owners(union) == owner).sum())
            for other in range(tier.split.columns):
                target = tier.ranks[other * owners + owner]
                if other != piece:
                    bytes_of[rank, target] += trained * 4 * (last - first) // block * num_rows
    return bytes_of


@pytest.mark.parametrize("mean", [0.5, 8.0])
@pytest.mark.parametrize("name", [name for name in OLD if name != "copies"] + list(NEW))
def test_expected_bytes_are_within_a_tenth_of_the_messages(name: str, mean: float) -> None:
    """Sent and received, per rank and link: every message of every split written out."""
    table, steps = draw((OLD | NEW)[name], mean)
    one_table_plan(table, SQUARE)
    measured = np.mean([messages(table, step) for step in steps], axis=0)
    inside = np.array([[a // 2 == b // 2 and a != b for b in range(4)] for a in range(4)])
    across = np.array([[a // 2 != b // 2 for b in range(4)] for a in range(4)])
    lines = [(measured * m).sum(axis) for m in (inside, across) for axis in (1, 0)]
    assert expect(table, steps).values[:4] == pytest.approx(np.array(lines), rel=0.1, abs=1.0)


def test_squares_are_sent_for_row_wise_adagrad_alone() -> None:
    table, steps = draw(NEW["column-wise"], 1.0)
    config = bag("t", 6400, feature_names=["f"])
    accesses = Stats.from_batches([config], [b for s in steps for b in s]).tables["t"]
    found = {
        rule: expect_table(table, accesses, topology=SQUARE, state=state)
        for rule, state in RULE_STATES.items()
    }
    more = mean_sent(found["rowwise_adagrad"]) - mean_sent(found["sgd"])
    assert more == pytest.approx(2 * 4 * 4 * accesses.union(4) / 4)  # 2 pieces of 4 blocks
    assert "squares" in found["rowwise_adagrad"].kinds
    assert mean_sent(found["adam"]) == mean_sent(found["adagrad"]) == mean_sent(found["sgd"])


def test_what_cannot_be_expected_yet_is_said() -> None:
    table = table_plan(4, tiers=(Tier(ranks=(0,), copies=Copies.HOST),))
    with pytest.raises(PlanError, match=r"table .t.: the bytes of .* cannot be expected yet"):
        expect_table(table, uses(1, 3), topology=SQUARE)


def test_a_plans_load_is_the_sum_over_tables_and_dense_buckets() -> None:
    tables = tuple(replace(table_plan(4, **OLD[k]), name=k) for k in ("rows", "table-wise"))
    mesh = MeshShape(hosts=2, local=2, group=4)
    plan = Plan(mesh=mesh, tables=tables, dense=(3, 5), tree="host-first")
    accesses = {"rows": uses(1, 5.0), "table-wise": uses(2, 6.0)}
    parts = [expect_table(t, accesses[t.name], topology=SQUARE) for t in tables]
    parts.append(expect_dense(8, topology=SQUARE, tree="host-first"))
    found = expect_plan(plan, accesses)
    assert found.values == pytest.approx(sum(p.values for p in parts))
    assert found.kinds == {"rows", "dense"}


def test_seconds_follow_the_rates() -> None:
    """Cards are shared by a host; the larger direction counts; work is added."""
    rates = Rates(host_bytes_per_s=10.0, cross_bytes_per_s=5.0, cross_latency_s=100.0)
    values = no_load(4).values
    values[0], values[1] = [10, 0, 0, 0], [0, 20, 0, 0]  # inside hosts
    values[2], values[3] = [5, 10, 0, 0], [0, 0, 0, 20]  # across: 15 leave host 0, 20 reach host 1
    values[8] = [0, 0, 3, 0]
    seconds = rank_seconds(values, topology=SQUARE, rates=rates)
    assert seconds.tolist() == pytest.approx([1 + 3, 2 + 3, 4 + 3, 4])
    load = Load(values, frozenset({"rows", "copies"}))
    rounds = 1 + 3 + 2
    assert step_seconds(load, topology=SQUARE, rates=rates) == pytest.approx(7 + 100 * rounds)
    alone = Topology()
    assert latency_seconds(["rows"], topology=alone, rates=rates) == 0.0
    once, twice = (
        latency_seconds(k, topology=SQUARE, rates=rates) for k in (["rows"], ["rows"] * 2)
    )
    assert once == twice
    host = latency_seconds(["rows"], topology=Topology(local=2), rates=rates)
    assert host == pytest.approx(4 * rates.host_latency_s)


def test_the_messages_of_every_kind_that_wait_for_each_other() -> None:
    """One for the counts of all, then those of the kind."""
    rounds = {"rows": 3, "pooled": 3, "relayed": 6, "copies": 2, "squares": 1, "dense": 0}
    rates = Rates(cross_latency_s=1.0)
    found = {k: latency_seconds([k], topology=SQUARE, rates=rates) - 1.0 for k in rounds}
    assert found == rounds
    assert latency_seconds(rounds, topology=SQUARE, rates=rates) == 1 + 3 + 3 + 6 + 2 + 1


WORK_RATES = Rates(
    rows=(
        RowCost(dim=4, id_s=2.0, lookup_s=3.0, update_s=5.0, bag_id_s=7.0, bag_update_s=11.0),
        RowCost(dim=8, id_s=13.0, lookup_s=17.0, update_s=19.0, bag_id_s=23.0, bag_update_s=29.0),
    )
)
COPIES = {"tiers": (Tier(ranks=(0, 1, 2, 3), copies=Copies.WORLD),)}
COLUMNS = boxes(3, 0, columns=2, rows="none")
# Of each: what every rank does, then each rank's more, trained; both again, frozen. Each rank asks
# for 120 ids of 84 distinct rows, all four ranks together for 210 rows.
WORK: dict[str, tuple[dict[str, Any], int, list[int], int, list[int]]] = {
    "rows": ({}, 13 * 120, [(17 + 19) * 84] * 4, 13 * 120, [17 * 84] * 4),
    "rows-no-dedup": (
        {"dedup": False},
        13 * 120,
        [(17 + 19) * 120] * 4,
        13 * 120,
        [17 * 120] * 4,
    ),
    "rows-on-two": (
        boxes(3, 0),
        13 * 120,
        [(17 + 19) * 2 * 84, 0, 0, (17 + 19) * 2 * 84],
        13 * 120,
        [17 * 2 * 84, 0, 0, 17 * 2 * 84],
    ),
    "pooled": (
        {**POOLED, **boxes(0, 3)},
        0,
        [23 * 2 * 120 + 29 * 105, 0, 0, 23 * 2 * 120 + 29 * 105],
        0,
        [23 * 2 * 120, 0, 0, 23 * 2 * 120],
    ),
    "relayed": (
        {**POOLED, **boxes(2, 3, rows="host")},
        0,
        [0, 0, *[13 * 2 * 120 + (17 + 19) * 2 * 84] * 2],
        0,
        [0, 0, *[13 * 2 * 120 + 17 * 2 * 84] * 2],
    ),
    "copies": (COPIES, 13 * 120 + 17 * 84 + 19 * 210, [0] * 4, 13 * 120 + 17 * 84, [0] * 4),
    "columns": (
        COLUMNS,
        2 * 2 * 120,  # every piece is asked for by itself
        [(3 + 5) * 4 * 84, 0, 0, (3 + 5) * 4 * 84],
        2 * 2 * 120,
        [3 * 4 * 84, 0, 0, 3 * 4 * 84],
    ),
    "columns-pooled": (
        {**POOLED, **COLUMNS},
        0,
        [7 * 4 * 120 + 11 * 210, 0, 0, 7 * 4 * 120 + 11 * 210],
        0,
        [7 * 4 * 120, 0, 0, 7 * 4 * 120],
    ),
    "grid-relayed": (
        {**POOLED, **boxes(0, 1, 2, 3, columns=2, rows="host")},
        2 * 2 * 120,  # every rank is a relay of one piece
        [(3 + 5) * 2 * 84] * 4,
        2 * 2 * 120,
        [3 * 2 * 84] * 4,
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_the_work_of_every_rank_under_every_exchange(name: str) -> None:
    """Written out from the ids and rows that a rank of 2 x 2 handles, trained and frozen."""
    changes, base, more, frozen_base, frozen_more = WORK[name]
    fields: dict[str, Any] = {"num_embeddings": 6400, "virtual_shards": 64, "embedding_dim": 8}
    accesses = Accesses(requests=120.0, bags=40.0, growth=(84.0, 140.0, 210.0))
    table = table_plan(4, **fields | changes)
    found = expect_table(table, accesses, topology=SQUARE, rates=WORK_RATES)
    assert found.work == pytest.approx(np.array(more) + base)
    frozen = replace(table, trainable=False)
    found = expect_table(frozen, accesses, topology=SQUARE, rates=WORK_RATES)
    assert found.work == pytest.approx(np.array(frozen_more) + frozen_base)


FEATURE = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=3, max_size=3)


@LAW
@given(st.lists(st.tuples(FEATURE, FEATURE), min_size=1, max_size=7))
def test_stats_count_what_batches_ask(drawn: list[tuple[list[list[int]], ...]]) -> None:
    def jagged(samples: list[list[int]]) -> JaggedTensor:
        return JaggedTensor.from_dense([torch.tensor(s, dtype=torch.int64) for s in samples])

    batches = [KeyedJaggedTensor.from_dict({"x": jagged(x), "y": jagged(y)}) for x, y in drawn]
    tables = [bag("one", 6, feature_names=["y"]), bag("both", 6, feature_names=["x", "y"])]
    found = Stats.from_batches(iter(tables), iter(batches))
    assert found.batch_size == 3
    for name, members in (("one", (1,)), ("both", (0, 1))):
        asked = [[bag_ for k in members for bag_ in sample[k]] for sample in drawn]
        counted = found.tables[name]
        assert counted.requests == pytest.approx(np.mean([sum(map(len, a)) for a in asked]))
        assert counted.bags == pytest.approx(np.mean([sum(map(bool, a)) for a in asked]))
        sets = [{i for ids in a for i in ids} for a in asked]
        assert counted.distinct == counted.growth[0]
        assert len(counted.growth) == len(drawn).bit_length()
        for k, known in enumerate(counted.growth):
            starts = range(0, len(sets) - 2**k + 1, 2**k)
            runs = [len(set().union(*sets[i : i + 2**k])) for i in starts]
            assert known == pytest.approx(np.mean(runs))


@LAW
@given(st.lists(st.integers(-9, 9)))
def test_distinct_ids_come_once_and_in_order(ids: list[int]) -> None:
    found = distinct(np.array(ids, dtype=np.int64))
    assert (found.dtype, found.tolist()) == (np.int64, sorted(set(ids)))


def test_stats_of_batches_of_different_sizes() -> None:
    batches = [KeyedJaggedTensor.from_dense({"f": torch.arange(n)}) for n in (2, 5, 6)]
    found = Stats.from_batches([bag("t", 9, feature_names=["f"])], batches)
    assert found.batch_size == 4
    assert found.tables["t"] == Accesses(requests=13 / 3, bags=13 / 3, growth=(13 / 3, 5.0))


def test_stats_of_no_batches_are_refused() -> None:
    with pytest.raises(InputError, match="at least one batch"):
        Stats.from_batches([bag("t")], [])


@LAW
@given(st.lists(st.floats(1.0, 2.0), max_size=4), st.integers(1, 200))
def test_a_union_lies_on_lines_through_the_known_points(factors: list[float], num: int) -> None:
    growth = [3.0]
    for factor in factors:
        growth.append(growth[-1] * factor)
    known = Accesses(requests=9.0, bags=3.0, growth=tuple(growth))
    for k, value in enumerate(growth):
        assert known.union(2**k) == pytest.approx(value)
    if len(growth) == 1:
        assert known.union(num) == num * 3.0  # as if batches shared no row
        return
    points = np.arange(len(growth) + 8)
    slope = np.log2(growth[-1] / growth[-2])  # the last line goes on
    logs = [*np.log2(growth), *(np.log2(growth[-1]) + slope * np.arange(1, 9))]
    assert np.log2(known.union(num)) == pytest.approx(np.interp(np.log2(num), points, logs))
    assert known.union(num) <= known.union(num + 1) + 1e-9


def test_the_union_of_batches_without_ids_is_empty() -> None:
    assert Accesses(requests=0.0, bags=0.0, growth=(0.0, 0.0)).union(8) == 0.0


@pytest.mark.parametrize("alpha", [0.0, 1.05, 2.0])
@pytest.mark.parametrize(("rows", "pooling"), [(1, 3.0), (50, 1.0), (2000, 4.0)])
def test_assumed_distinct_rows_equal_drawn_ones(alpha: float, rows: int, pooling: float) -> None:
    rng = np.random.default_rng(0)
    weights = np.arange(1, rows + 1) ** -alpha
    requests = int(100 * pooling)
    drawn = rng.choice(rows, size=(400, requests), p=weights / weights.sum())
    mean = np.mean([len(np.unique(ids)) for ids in drawn])
    found = Stats.assume(
        [bag("t", rows)], batch_size=100, pooling_factors={"t": pooling}, alpha=alpha
    )
    assert found.batch_size == 100
    assert found.tables["t"].requests == requests
    assert found.tables["t"].distinct == pytest.approx(mean, rel=0.01)
    four = np.mean([len(np.unique(ids)) for ids in drawn.reshape(100, 4 * requests)])
    assert found.tables["t"].union(4) == pytest.approx(four, rel=0.02)


@pytest.mark.parametrize("rows", [10_000, 10_001, 10_500, 300_000])
@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.05, 1.5])
def test_binned_ranks_change_little(rows: int, alpha: float) -> None:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -alpha
    p = weights / weights.sum()
    for size in (10, 2048, 500_000):
        found = Stats.assume([bag("t", rows)], batch_size=size, alpha=alpha).tables["t"]
        assert found.distinct == pytest.approx((1 - (1 - p) ** size).sum(), rel=1e-4)


def test_assumed_accesses_follow_features_and_pooling() -> None:
    tables = [bag("one"), bag("two", feature_names=["x", "y"]), bag("rare")]
    factors = {"two": 3.0, "rare": 0.25}
    found = Stats.assume(tables, batch_size=8, pooling_factors=factors).tables
    assert (found["one"].requests, found["one"].bags) == (8.0, 8.0)
    assert (found["two"].requests, found["two"].bags) == (48.0, 16.0)
    assert (found["rare"].requests, found["rare"].bags) == (2.0, 2.0)
    idle = Stats.assume(tables, batch_size=0).tables["one"]
    assert (idle.requests, idle.bags, idle.distinct, idle.union(8)) == (0.0, 0.0, 0.0, 0.0)
    assert all(t.distinct <= t.requests for t in found.values())


def test_assumed_bags_are_no_more_than_requests() -> None:
    # Defect: the pooling of all features together is compared with one bag: 20 bags, 10 ids.
    shared = bag("t", feature_names=["x", "y"])
    found = Stats.assume([shared], batch_size=10, pooling_factors={"t": 0.5}).tables["t"]
    assert (found.requests, found.bags) == (10.0, 10.0)
