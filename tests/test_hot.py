"""Hot rows: their sidecar files, their rules, their layout, and the planner that chooses them."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import DenseCost, Rates, bucket_sizes, expect_plan, plan_time, predict
from rowmesh.errors import InputError, PlanError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn.bags import Reader
from rowmesh.placement import (
    Copies,
    Exchange,
    Groups,
    MeshShape,
    Plan,
    Split,
    TablePlan,
    Tier,
    load_plan,
    make_hot_set,
    save_plan,
)
from rowmesh.placement.memory import RULE_STATES, bytes_per_rank
from rowmesh.planners import HotRows, parse_tiers, plan_tables
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.stacks import lay_out
from rowmesh.stats import Accesses, Heat, Stats
from rowmesh.tables import PoolingType
from rowmesh.topology import Topology
from tests.cases import DENSE, RULES, Case, Collection, Model, Table, train_case
from tests.ranks import run_on_ranks
from tests.test_central_property import differences

LAW = settings(derandomize=True, deadline=None, max_examples=40)
ROW_WISE = Split(kind="boxes", rows="all")
SQUARE = Topology(hosts=2, local=2)
STATE = RULE_STATES["rowwise_adagrad"]


def table(name: str = "t", *, rows: int = 100, hot: Any = (), **changes: Any) -> TablePlan:
    world, sums = 4, changes.pop("sums", "sparse")
    rest = changes.pop("rest", Tier(ranks=tuple(range(world)), split=ROW_WISE))
    tiers: tuple[Tier, ...] = (rest,)
    if len(hot):
        ids = make_hot_set(name, np.asarray(hot))
        hot_tier = Tier(ranks=tuple(range(world)), copies=Copies.WORLD, rows=ids, sums=sums)
        tiers = (hot_tier, rest)
    fields: dict[str, Any] = {
        "collection": "",
        "num_embeddings": rows,
        "embedding_dim": 8,
        "data_type": "fp32",
        "pooling": PoolingType.SUM,
        "feature_names": (f"f_{name}",),
        "virtual_shards": 64,
        "tiers": tiers,
    }
    return TablePlan(name=name, **fields | changes)


def plan(*tables: TablePlan, **changes: Any) -> Plan:
    mesh = MeshShape(hosts=2, local=2, group=4)
    return Plan(mesh=mesh, tables=tables, tree="host-first", **changes)


def zipf_batches(
    rows: dict[str, int], *, count: int, requests: int, alpha: float = 1.2, seed: int = 3
) -> list[KeyedJaggedTensor]:
    """Batches of one id a sample and table; ids are popular in the order of a permutation."""
    rng = np.random.default_rng(seed)
    orders = {name: np.random.default_rng(7).permutation(n) for name, n in rows.items()}
    weights = {name: np.arange(1, n + 1) ** -alpha for name, n in rows.items()}
    found = []
    for _ in range(count):
        ids = [
            orders[name][rng.choice(n, size=requests, p=weights[name] / weights[name].sum())]
            for name, n in rows.items()
        ]
        lengths = torch.ones(requests * len(rows), dtype=torch.int32)
        values = torch.from_numpy(np.concatenate(ids))
        keys = [f"f_{name}" for name in rows]
        found.append(KeyedJaggedTensor(keys, values, lengths=lengths, stride=requests))
    return found


def stats_of(tables: tuple[TablePlan, ...], batches: list[KeyedJaggedTensor]) -> Stats:
    configs = [
        rm.EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.num_embeddings,
            embedding_dim=t.embedding_dim,
            feature_names=list(t.feature_names),
        )
        for t in tables
    ]
    return Stats.from_batches(configs, batches)


def test_a_plan_keeps_its_hot_rows_in_files_beside_it(tmp_path: Path) -> None:
    saved = plan(table("a/b", hot=[5, 3, 99]), table("c"), table("d", hot=[0], sums="bucket"))
    save_plan(saved, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == saved
    assert [rows.ids.tolist() for t in loaded.tables for _, rows in t.hot] == [[3, 5, 99], [0]]  # type: ignore[union-attr]
    assert loaded.tables[2].tiers[0].sums == "bucket"
    save_plan(loaded, tmp_path / "plan.json")  # the files are there already
    assert len(list(tmp_path.iterdir())) == 3


def test_hot_rows_that_are_lost_or_changed_are_told(tmp_path: Path) -> None:
    save_plan(plan(table(hot=[5, 3])), tmp_path / "plan.json")
    file = next(tmp_path.glob("hot_t_*.npy"))
    np.save(file, np.array([3, 6]))
    with pytest.raises(PlanError, match=r"does not hold the 2 hot rows that the plan was made"):
        load_plan(tmp_path / "plan.json")
    stream = io.BytesIO()
    header = {"descr": "<i8", "fortran_order": False, "shape": (2_000_000_000,)}
    np.lib.format.write_array_header_1_0(stream, header)  # asks for 14.9 GiB
    for damaged in (b"", b"PK\x03\x04garbage", b"\x93NUMPY", stream.getvalue()):
        file.write_bytes(damaged)
        with pytest.raises(PlanError, match=r"\.npy is damaged \(.*\): make the plan again"):
            load_plan(tmp_path / "plan.json")
    save_plan(plan(table(hot=[5, 3])), tmp_path / "plan.json")
    load_plan(tmp_path / "plan.json")
    file.unlink()
    with pytest.raises(PlanError, match=r"cannot read its hot rows .* No such file"):
        load_plan(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text().replace('"hot_t_', '"../hot_t_')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"must be in a file hot….npy beside the plan"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("ids", [[], [3, 3], [-1, 2]])
def test_hot_sets_are_of_distinct_rows(ids: list[int]) -> None:
    with pytest.raises(PlanError, match="distinct, from 0, and at least one"):
        make_hot_set("t", np.array(ids, dtype=np.int64))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (table(hot=[3], exchange=Exchange.POOLED), "its exchange must be 'rows'"),
        (table(hot=[100]), "hot row 100 is outside its 100 rows"),
        (
            table(hot=[1], rest=Tier(ranks=(0, 1, 2, 3), copies=Copies.WORLD)),
            "copied to every rank as it is",
        ),
        (
            replace(table(hot=[1, 2]), tiers=table(hot=[1, 2]).tiers[:1] * 2 + table().tiers),
            "a row is in two of its hot sets",
        ),
        (
            replace(table(), tiers=(replace(table().rest, sums="dense"),)),
            "dense sums are of copies on the whole world",
        ),
    ],
)
def test_rules_of_hot_rows(changed: TablePlan, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        plan(changed).validate()


def test_membership_grows_with_the_hot_rows_not_with_the_table() -> None:
    hot = np.random.default_rng(1).choice(10**9, size=1000, replace=False)
    placed = table(rows=10**9, hot=hot)
    readers = [Reader(feature="f_t", table=0, name="f_t")]
    for rank in range(4):
        (layout,) = lay_out(
            [placed],
            [Groups(world=4, size=4)],
            readers,
            topology=SQUARE,
            rank=rank,
            device=torch.device("cpu"),
        )
        sizes = [
            value.numel()
            for name in layout.__slots__
            if isinstance(value := getattr(layout, name), torch.Tensor)
        ]
        assert sum(sizes) < 10_000
        assert layout.num_copies == 1000


@pytest.mark.parametrize(("text", "k"), [("auto", None), ("off", 0), ("hot:0", 0), ("hot:77", 77)])
def test_tiers_are_parsed(text: str, k: int | None) -> None:
    assert parse_tiers(text) == k


@pytest.mark.parametrize("text", ["", "on", "hot", "hot:", "hot:-1", "hot:1.5", "cold:3"])
def test_other_words_for_tiers_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"say auto, off, or hot:K"):
        parse_tiers(text)


def test_heat_is_ordered_by_some_batches_and_measured_on_the_others() -> None:
    ids = [np.array(i) for i in ([1, 1, 2], [2, 2, 2, 9], [1, 3], [9, 2])]
    batches = [
        KeyedJaggedTensor(["f_t"], torch.from_numpy(i), lengths=torch.tensor([len(i)])) for i in ids
    ]
    heat = stats_of((table(),), batches).tables["t"].heat
    assert heat is not None
    assert heat.ids.tolist() == [1, 2, 3]
    assert heat.scores.tolist() == [1.0, 0.5, 0.5]
    assert heat.presence.tolist() == [0.0, 1.0, 0.0]
    assert heat.requests.tolist() == [0.0, 2.0, 0.0]


@LAW
@given(data=st.data())
def test_accesses_of_parts_add_up(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    presence = np.array(data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n)))
    heat = Heat(ids=np.arange(n), scores=presence, requests=3 * presence, presence=presence)
    growth = tuple(float((1 - (1 - presence) ** (1 << j)).sum()) + j for j in range(4))
    whole = Accesses(requests=float(3 * presence.sum()) + 5, bags=4.0, growth=growth, heat=heat)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, n + 3)))), dtype=np.int64)
    hot, cold = whole.part(chosen)
    mine = presence[np.isin(heat.ids, chosen)]
    assert hot.requests == pytest.approx(3 * mine.sum())
    assert hot.distinct == pytest.approx(mine.sum())
    assert hot.growth[2] == pytest.approx((1 - (1 - mine) ** 4).sum())
    assert hot.requests + cold.requests == pytest.approx(whole.requests)
    assert all(
        a + b == pytest.approx(c) for a, b, c in zip(hot.growth, cold.growth, growth, strict=True)
    )
    assert cold.heat is not None
    assert cold.heat.ids.tolist() == [i for i in range(n) if i not in chosen]
    with pytest.raises(InputError, match="do not know single rows"):
        hot.part(chosen)


@pytest.mark.parametrize("sums", ["sparse", "dense", "bucket"])
@pytest.mark.parametrize("dedup", [True, False])
def test_expected_bytes_are_near_the_mean_of_batches(sums: str, dedup: bool) -> None:
    """Invariant 4: within 10 % on the mean of 20 batches that the statistics have not seen."""
    rows = {"a": 3000, "b": 500}
    counted = zipf_batches(rows, count=40, requests=400, seed=1)
    bare = tuple(table(name, rows=n, dedup=dedup) for name, n in rows.items())
    stats = stats_of(bare, counted)
    hot = tuple(
        table(
            t.name, rows=t.num_embeddings, dedup=dedup, sums=sums, hot=heat_of(stats, t.name)[:150]
        )
        for t in bare
    )
    planned = plan(*hot, dense=(100,)).validate()
    check_expected(planned, stats, zipf_batches(rows, count=80, requests=400, seed=2))


def check_expected(planned: Plan, stats: Stats, fresh: list[KeyedJaggedTensor]) -> None:
    """Expected bytes are near the mean of 20 steps of four ranks."""
    load = expect_plan(planned, stats.tables)
    sent = {"host": 0.0, "cross": 0.0}
    for step in range(20):
        for ledger in predict(planned, fresh[4 * step : 4 * step + 4]):
            for edge, links in ledger.items():
                for link, num_bytes in links.items() if edge not in ("status", "counts") else ():
                    sent[link] += num_bytes / 80
    assert float(load.sent_host.mean()) == pytest.approx(sent["host"], rel=0.1)
    assert float(load.sent_cross.mean()) == pytest.approx(sent["cross"], rel=0.1)


def heat_of(stats: Stats, name: str) -> NDArray[np.int64]:
    heat = stats.tables[name].heat
    assert heat is not None
    return heat.ids


RATES = Rates(cross_bytes_per_s=2.5e7, host_bytes_per_s=1e9)
COST = DenseCost(flops=1e9, parameters=1e5, forward_s=0.002, backward_s=0.004, step_s=0.0)


def choose(tables: tuple[TablePlan, ...], stats: Stats, k: int | None = None, **more: Any) -> Plan:
    arguments: dict[str, Any] = {"rates": RATES, "cost": COST, "state": STATE} | more
    return HotRows([plan(*tables, dense=(1000,))], stats, **arguments).choose(k)


def time_of(planned: Plan, stats: Stats) -> float:
    return plan_time(planned, stats.tables, rates=RATES, cost=COST, state=STATE).total_s


@pytest.mark.parametrize("dedup", [True, False])
def test_the_chosen_number_is_as_good_as_any(dedup: bool) -> None:
    """Against every prefix and way to add up, not only those the planner tries."""
    rows = {"a": 120, "b": 30}
    tables = tuple(table(name, rows=n, dedup=dedup) for name, n in rows.items())
    stats = stats_of(tables, zipf_batches(rows, count=12, requests=80))
    chosen = choose(tables, stats)
    assert chosen.hot is not None
    assert chosen.hot.step_s == pytest.approx(time_of(chosen, stats))
    everything = sum(len(heat_of(stats, name)) for name in rows)
    each = [choose(tables, stats, k) for k in range(everything + 1)]
    times = [time_of(p, stats) for p in each]
    assert [p.hot.step_s for p in each if p.hot is not None] == pytest.approx(times)
    assert time_of(chosen, stats) <= min(times) * 1.03
    assert times[0] == pytest.approx(chosen.hot.step_s_cold)


def test_without_dedup_hot_rows_pay_and_a_fast_network_needs_none() -> None:
    rows = {"a": 2000}
    tables = (table("a", rows=2000, dedup=False),)
    stats = stats_of(tables, zipf_batches(rows, count=20, requests=2000))
    slow = choose(tables, stats)
    assert slow.hot is not None
    assert slow.hot.rows + slow.hot.host_rows > 0
    assert slow.hot.step_s < 0.7 * slow.hot.step_s_cold
    assert 0.3 < slow.hot.coverage <= 1.0
    assert str(slow.hot) in str(slow)
    free = replace(RATES, cross_bytes_per_s=1e15, host_bytes_per_s=1e15)
    none = choose((table("a", rows=2000),), stats, rates=free)
    assert none.hot is not None
    assert none.hot.rows == 0
    assert not any(t.hot for t in none.tables)
    assert "hot rows: none, which is best" in str(none)


def test_tables_that_cannot_have_hot_rows_are_named_as_the_reason() -> None:
    tables = (table("a", rows=50, exchange=Exchange.POOLED),)
    stats = stats_of(tables, zipf_batches({"a": 50}, count=4, requests=20))
    with pytest.raises(PlanError, match="no table can have any: those that owners pool"):
        choose(tables, stats, 3)


def test_where_nothing_is_asked_for_nothing_is_hot() -> None:
    tables = (table("a", rows=50),)
    nothing = KeyedJaggedTensor(
        ["f_a"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(4, dtype=torch.int32)
    )
    chosen = choose(tables, stats_of(tables, [nothing] * 16))
    assert chosen.hot is not None
    assert chosen.hot.rows == 0
    assert chosen.tables == tables


def test_rows_of_a_last_odd_batch_do_not_vanish() -> None:
    tables = (table("a", rows=50),)
    nothing = KeyedJaggedTensor(
        ["f_a"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(20, dtype=torch.int32)
    )
    batches = [nothing] * 16 + zipf_batches({"a": 50}, count=1, requests=20)
    accesses = stats_of(tables, batches).tables["a"]
    assert list(accesses.growth) == sorted(accesses.growth)
    assert accesses.union(4) >= accesses.distinct > 0


def test_hot_rows_stay_within_the_memory() -> None:
    rows = {"a": 2000}
    tables = (table("a", rows=2000, dedup=False),)
    stats = stats_of(tables, zipf_batches(rows, count=20, requests=2000))
    cold = max(bytes_per_rank(plan(*tables)))
    for room in (0, 36, 36 * 100 + 35, 10**6):
        chosen = choose(tables, stats, limit=cold + room)
        assert max(bytes_per_rank(chosen)) <= cold + room
        assert chosen.hot is not None
        assert chosen.hot.rows <= room // 36
    with pytest.raises(PlanError, match=r"101 hot rows are wanted, but only 100 were asked for"):
        choose(tables, stats, 101, limit=cold + 36 * 100)


def test_so_many_hot_rows_as_are_wanted_are_the_hottest() -> None:
    rows = {"a": 300, "b": 300}
    tables = tuple(table(name, rows=n) for name, n in rows.items())
    stats = stats_of(tables, zipf_batches(rows, count=12, requests=100))
    chosen = choose(tables, stats, 20)
    counts = {t.name: sum(rows.count for _, rows in t.hot) for t in chosen.tables}
    assert sum(counts.values()) == 20
    for name, count in counts.items():
        (hot,) = [rows.ids for _, rows in chosen.table(name).hot]
        assert hot is not None
        assert hot.tolist() == sorted(heat_of(stats, name)[:count].tolist())
    assert choose(tables, stats, 0).tables == tables


def test_plan_tables_adds_hot_rows_to_the_better_of_two_plans() -> None:
    rows = {"a": 3000, "b": 40}
    blank = [replace(table(name, rows=n), tiers=()) for name, n in rows.items()]
    stats = stats_of(
        tuple(table(n, rows=r) for n, r in rows.items()), zipf_batches(rows, count=16, requests=500)
    )
    arguments: dict[str, Any] = {"stats": stats, "dense": (1000,), "rates": RATES, "dedup": False}
    off = plan_tables(blank, SQUARE, **arguments)
    auto = plan_tables(blank, SQUARE, tiers="auto", cost=COST, **arguments)
    assert off.hot is None
    assert auto.hot is not None
    assert time_of(auto, stats) <= time_of(off, stats) * 1.0001
    some = plan_tables(blank, SQUARE, tiers="hot:10", **arguments)
    assert sum(rows.count for t in some.tables for _, rows in t.hot) == 10
    assert bucket_sizes(off) == (1000,)


@pytest.mark.parametrize("tiers", ["auto", "hot:7"])
def test_which_rows_are_hot_does_not_depend_on_the_order_of_tables(tiers: str) -> None:
    """Shares of a few batches are often equal, also of rows of two tables."""
    rows = {"a": 60, "b": 60, "c": 60}
    found = []
    for names in (list(rows), list(reversed(rows))):
        blank = [replace(table(name, rows=rows[name]), tiers=()) for name in names]
        batches = zipf_batches(rows, count=16, requests=60)
        stats = stats_of(tuple(table(name, rows=rows[name]) for name in names), batches)
        planned = plan_tables(
            blank,
            SQUARE,
            stats=stats,
            dense=(1000,),
            rates=RATES,
            cost=COST,
            split="row_wise",
            exchange="rows",
            tiers=tiers,
            dedup=False,
        )
        assert planned.hot is not None
        found.append(({name: planned.table(name) for name in rows}, planned.hot, planned.predicted))
    assert found[0] == found[1]
    assert any(t.hot for t in found[0][0].values())


@pytest.mark.parametrize("pin", [rm.Pin(ranks=(0,)), rm.Pin(host=0)])
@pytest.mark.parametrize("tiers", ["auto", "hot:5"])
def test_a_table_pinned_to_ranks_has_no_copies(pin: rm.Pin, tiers: str) -> None:
    rows = {"a": 2000, "b": 2000}
    blank = [replace(table(name, rows=n), tiers=()) for name, n in rows.items()]
    stats = stats_of(
        tuple(table(n, rows=r) for n, r in rows.items()), zipf_batches(rows, count=16, requests=500)
    )
    planned = plan_tables(
        blank,
        SQUARE,
        stats=stats,
        rates=RATES,
        cost=COST,
        dense=(1000,),
        dedup=False,
        exchange="rows",
        tiers=tiers,
        constraints=rm.Constraints(pin={"a": pin}),
    )
    assert not planned.table("a").hot
    assert planned.table("a").rest.copies is Copies.GROUP
    assert tiers == "auto" or planned.table("b").hot
    with pytest.raises(PlanError, match="or that are pinned to ranks or a host, cannot"):
        plan_tables(
            blank[:1],
            SQUARE,
            stats=stats,
            exchange="rows",
            tiers="hot:5",
            constraints=rm.Constraints(pin={"a": pin}),
        )


@pytest.mark.parametrize(
    ("split", "constraints"),
    [
        ("row_wise", rm.Constraints()),
        ("auto", rm.Constraints(pin={"a": rm.Pin(split="row_wise")})),
    ],
)
def test_what_is_said_of_splits_is_not_undone_by_copying_everything(
    split: str, constraints: rm.Constraints
) -> None:
    """Where each is free, all tables are copied: no dedup, few rows, a slow link."""
    rows = {"a": 40, "b": 40}
    blank = [replace(table(name, rows=n), tiers=()) for name, n in rows.items()]
    batches = zipf_batches(rows, count=16, requests=500)
    stats = stats_of(tuple(table(n, rows=r) for n, r in rows.items()), batches)
    arguments: dict[str, Any] = {
        "stats": stats,
        "rates": RATES,
        "cost": COST,
        "dense": (1000,),
        "dedup": False,
        "exchange": "rows",
        "tiers": "auto",
    }
    free = plan_tables(blank, SQUARE, **arguments)
    assert all(t.rest.copies is Copies.WORLD for t in free.tables)
    bound = plan_tables(blank, SQUARE, split=split, constraints=constraints, **arguments)
    assert bound.table("a").rest.copies is Copies.GROUP


def import_rows(mesh: Mesh) -> Any:
    """Train a step, set some rows, then set everything; what a rank holds of it after each."""
    hot = Table(rows=16, dim=4, ranks=(1, 0), hot=(0, 3, 8, 11))
    ids = [[[[[0, 3, 5, 8]]] for _ in range(2)]]
    case = Case(world=2, collections=(Collection(tables=(hot,)),), ids=ids)
    model = rm.shard(Model(case), case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE["sgd"], sparse=RULES["adam"])
    mesh.mean(model(case.batch(0, mesh.rank))).backward()
    optimizer.step()
    (stack,) = sharded_engines(model)[0].stacks
    trained = rm.full_state_dict(model)
    states = {name: state.clone() for name, state in stack.copies_state.items()}
    rows = [3, 5, 11]
    rm.load_pretrained(model, "c0_t0", torch.full((3, 4), 7.0), rows=rows)
    some, copies = rm.full_state_dict(model), stack.copies.clone()
    assert states
    assert all(torch.equal(stack.copies_state[n], s) for n, s in states.items())  # values only
    rm.load_full_state_dict(model, trained if mesh.rank == 0 else None)
    return trained, some, copies, rm.full_state_dict(model), stack.copies.clone()


def test_values_that_come_in_reach_homes_and_copies() -> None:
    (trained, some, copies, back, again), other = run_on_ranks(2, import_rows)
    key = next(name for name in trained if name.endswith("c0_t0.weight"))
    expected = trained[key].clone()
    expected[[3, 5, 11]] = 7.0
    assert torch.equal(some[key], expected)
    assert sorted(copies.tolist()) == sorted(expected[[0, 3, 8, 11]].tolist())
    assert torch.equal(back[key], trained[key])
    assert sorted(again.tolist()) == sorted(trained[key][[0, 3, 8, 11]].tolist())
    assert torch.equal(copies, other[2])
    assert torch.equal(again, other[4])


@pytest.mark.nightly
def test_a_run_at_ten_million_rows_equals_the_oracle() -> None:
    random = np.random.default_rng(2)
    hot = random.choice(10**7, size=500, replace=False)
    cold = random.integers(0, 10**7, size=500)

    def bag() -> list[int]:
        return [*random.choice(hot, size=3).tolist(), *random.choice(cold, size=2).tolist()]

    ids = [[[[bag() for _ in range(8)]] for _ in range(4)] for _ in range(2)]
    placed = Table(rows=10**7, dim=2, ranks=(0, 1, 2, 3), shards=256, hot=tuple(hot.tolist()))
    case = Case(world=4, hosts=2, collections=(Collection(tables=(placed,)),), ids=ids)
    runs = run_on_ranks(4, train_case, case, hosts=2)
    assert differences(case, runs, tolerance=0.0) == []
    assert {len(copies) for run in runs for copies in run.copies} == {500}
