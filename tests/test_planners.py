"""`make_plan`: options, constraints, memory, one answer, and how far from the best."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rowmesh.cost import Rates, expect_dense, expect_plan, expect_table, step_seconds
from rowmesh.cost.load import no_load
from rowmesh.cost.seconds import rank_seconds
from rowmesh.errors import InputError, PlanError
from rowmesh.nn import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.placement import Copies, Exchange, MeshShape, Plan, TablePlan, plan_from_json
from rowmesh.placement.dense import bucket_elements
from rowmesh.placement.document import plan_to_json
from rowmesh.placement.memory import RULE_STATES, bytes_per_rank
from rowmesh.placement.text import render_why
from rowmesh.planners import Constraints, Pin, make_plan, parse_constraints, plan_tables
from rowmesh.planners.constraints import SPLITS
from rowmesh.planners.drafts import draft
from rowmesh.planners.options import Option, Unit
from rowmesh.planners.tally import Placed, Tally
from rowmesh.stats import Accesses, Stats
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig, PoolingType, named_collections
from rowmesh.topology import Topology
from tests.foreign import ForeignBags, ForeignType, foreign

LAW = settings(derandomize=True, deadline=None, max_examples=50)
LARGE, SMALL = 1_000_000, 100
EIGHT = Topology(hosts=2, local=4)


def bag(name: str, rows: int = LARGE, dim: int = 16, **more: Any) -> EmbeddingBagConfig:
    fields = {"feature_names": [f"f_{name}"]} | more
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, **fields)


def bags(*tables: EmbeddingBagConfig, **more: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables, device="meta", **more)


def sequences(name: str, rows: int = LARGE) -> EmbeddingCollection:
    config = EmbeddingConfig(
        name=name, num_embeddings=rows, embedding_dim=16, feature_names=[f"f_{name}"]
    )
    return EmbeddingCollection([config], device="meta")


def uses(pooling: float, distinct: float, batch_size: int = 1000) -> Accesses:
    requests = batch_size * pooling
    return Accesses(requests=requests, bags=float(batch_size), growth=(distinct,))


def stats_of(**tables: Accesses) -> Stats:
    return Stats(batch_size=1000, tables=tables)


def words(plan: Plan) -> dict[str, tuple[str, str]]:
    return {t.name: (t.word, t.exchange.value) for t in plan.tables}


@pytest.mark.parametrize(
    ("split", "word"),
    [
        ("data_parallel", "data-parallel"),
        ("table_wise", "table-wise"),
        ("row_wise", "row-wise"),
        ("table_row_wise", "table-row-wise"),
        ("column_wise", "column-wise"),
        ("grid", "grid"),
    ],
)
@pytest.mark.parametrize("exchange", ["rows", "pooled"])
@pytest.mark.parametrize(("hosts", "local"), [(2, 4), (1, 4), (4, 1), (1, 1)])
def test_one_split_and_one_exchange_for_all_tables(
    split: str, word: str, exchange: str, hosts: int, local: int
) -> None:
    topology = Topology(hosts=hosts, local=local)
    if topology.world == 1 and split in ("column_wise", "grid"):
        word = "table-wise"  # there are no ranks for two pieces
    model = nn.ModuleList([bags(bag("a"), bag("b", SMALL)), sequences("s")])
    plan = make_plan(model, topology, split=split, exchange=exchange)
    assert words(plan) == {"a": (word, exchange), "b": (word, exchange), "s": (word, "rows")}
    assert plan.validate() is plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "rowwise"}, "unknown split 'rowwise': did you mean 'row_wise'"),
        ({"split": "xyz"}, "unknown split 'xyz': known are auto, column_wise, data_parallel, gri"),
        ({"sparse": "adagrab"}, "unknown update rule 'adagrab': did you mean 'adagrad'"),
        ({"exchange": "row"}, "unknown exchange 'row': did you mean 'rows'"),
        ({"exchange": "xyz"}, "unknown exchange 'xyz': known are auto, pooled, rows"),
        ({"stats": stats_of(b=uses(1, 1))}, "table 'a' has no statistics"),
    ],
)
def test_unknown_words_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_plan(bags(bag("a")), EIGHT, **arguments)


def test_a_plan_says_what_the_tables_are() -> None:
    model = nn.ModuleDict(
        {
            "one": bags(
                bag("a", feature_names=["x", "y"]),
                bag("b", 7, 3, pooling=PoolingType.MEAN, data_type=torch.bfloat16),
            ),
            "two": bags(bag("c"), is_weighted=True),
            "three": sequences("s"),
        }
    )
    model["one"].embedding_bags["b"].weight.requires_grad_(False)
    plan = make_plan(model, EIGHT, dedup=False)
    a, b, c, s = plan.tables
    assert [t.name for t in plan.tables] == ["a", "b", "c", "s"]
    assert [t.collection for t in plan.tables] == ["one", "one", "two", "three"]
    assert (b.num_embeddings, b.embedding_dim, b.data_type) == (7, 3, "bf16")
    assert [t.pooling.value for t in plan.tables] == ["sum", "mean", "sum", "none"]
    assert (a.feature_names, c.feature_names) == (("x", "y"), ("f_c",))
    assert [t.trainable for t in plan.tables] == [True, False, True, True]
    assert [t.weighted for t in plan.tables] == [False, False, True, False]
    assert not any(t.dedup for t in plan.tables)
    assert s.exchange is Exchange.ROWS
    assert plan.mesh == MeshShape(hosts=2, local=4, group=8)
    assert make_plan(bags(bag("a")), EIGHT).tables[0].collection == ""
    assert all(t.dedup for t in make_plan(model, EIGHT).tables)


@pytest.mark.parametrize(("hosts", "shards"), [(1, 256), (16, 256), (17, 272), (512, 8192)])
def test_virtual_shards_grow_with_the_world(hosts: int, shards: int) -> None:
    model = nn.ModuleList([bags(bag("a"), bag("b", SMALL)), sequences("s")])
    for split in ("auto", "row_wise", "table_wise"):
        plan = make_plan(model, Topology(hosts=hosts), split=split)
        assert {t.virtual_shards for t in plan.tables} == {shards}


def test_dense_parameters_are_bucketed() -> None:
    model = nn.Sequential(nn.Linear(300, 1000), bags(bag("a")), nn.Linear(1000, 2))
    model[0].bias.requires_grad_(False)
    plan = make_plan(model, EIGHT)
    assert plan.dense == bucket_elements([300_000, 2000, 2]) == (302_005,)
    tables = make_plan(bags(bag("a")), EIGHT).predicted
    dense = expect_dense(302_005, topology=EIGHT, tree="host-first")
    assert plan.tree == "host-first"
    sent_more = plan.predicted.cross_bytes - tables.cross_bytes
    assert sent_more == pytest.approx(dense.sent_cross.mean())
    assert make_plan(nn.Linear(2, 3), EIGHT).tables == ()


def test_foreign_collections_are_planned() -> None:
    model = ForeignBags(foreign("t", data_type=ForeignType.FP16), weighted=True)
    (table,) = make_plan(model, EIGHT).tables
    assert (table.name, table.data_type, table.weighted) == ("t", "fp16", True)


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match=r"more than once: \['a'\]"):
        make_plan(nn.ModuleList([bags(bag("a")), bags(bag("a"))]), EIGHT)


def test_small_tables_are_copied_and_one_rank_keeps_all() -> None:
    edge = (1 << 20) // 64  # rows of 16 fp32 columns in one MiB
    half = bag("half", 2 * edge, data_type=torch.float16)
    large = [bag(f"large_{i}") for i in range(20)]  # beside which the small ones cost little
    model = bags(bag("edge", edge), bag("above", edge + 1), half, *large)
    found = {name: word for name, (word, _) in words(make_plan(model, Topology(local=2))).items()}
    assert {name for name, word in found.items() if word == "data-parallel"} == {"edge", "half"}
    assert set(found.values()) == {"data-parallel", "row-wise"}
    alone = make_plan(model, Topology())
    assert all(t.rest.ranks == (0,) for t in alone.tables)
    assert (alone.predicted.host_bytes, alone.predicted.cross_bytes) == (0.0, 0.0)
    assert words(alone)["edge"][0] == "data-parallel"
    assert words(alone)["above"][0] == "row-wise"


def test_small_tables_are_not_copied_where_that_is_clearly_slower() -> None:
    """512 ranks touch all rows of a table of which one touches a few."""
    accesses = Accesses(requests=1000.0, bags=1000.0, growth=(50.0, 100.0, 200.0, 400.0))
    model, stats = bags(bag("a", 16_000)), stats_of(a=accesses)
    assert words(make_plan(model, Topology(hosts=64, local=8), stats=stats))["a"][0] == "row-wise"
    assert words(make_plan(model, Topology(local=2), stats=stats))["a"][0] == "data-parallel"


def is_exact(table: TablePlan) -> bool:
    """Owners that each pool a part of a bag, all over the world, add in another order."""
    split = table.rest.split.rows == "all" and table.homes().num_owners > 1
    return not (table.exchange is Exchange.POOLED and split)


@pytest.mark.parametrize(
    ("accesses", "exchange"),
    [
        (uses(1, 300), "rows"),  # skew: 1,000 requests, 300 rows
        (uses(1, 990), "rows"),
        (uses(20, 800), "rows"),  # skew wins over pooling
        (uses(20, 9000), "pooled"),
        (uses(20, 20_000), "pooled"),
    ],
)
def test_auto_takes_the_faster_exact_exchange(accesses: Accesses, exchange: str) -> None:
    names = [f"t{i}" for i in range(8)]
    stats = stats_of(**dict.fromkeys(names, accesses))
    model = bags(*map(bag, names))
    slow = Rates(cross_bytes_per_s=1e8)  # bytes count, not work
    plan = make_plan(model, EIGHT, stats=stats, rates=slow)
    assert {t.exchange.value for t in plan.tables} == {exchange}
    assert all(map(is_exact, plan.tables))
    forced = make_plan(model, EIGHT, stats=stats, split="row_wise", rates=slow)
    assert set(words(forced).values()) == {("row-wise", "rows")}  # pooled would not be bit-exact
    loose = make_plan(model, EIGHT, stats=stats, split="row_wise", allow_inexact=True, rates=slow)
    assert set(words(loose).values()) == {("row-wise", exchange)}
    one = make_plan(sequences("a"), EIGHT, stats=stats_of(a=accesses))
    assert words(one)["a"][1] == "rows"


def test_without_statistics_zipf_is_assumed() -> None:
    model = bags(bag("a"), bag("b", SMALL))
    configs = model.embedding_bag_configs()
    for size in (64, 2048):
        assumed = Stats.assume(configs, batch_size=size, alpha=1.05)
        found = make_plan(model, EIGHT, batch_size=size)
        assert found == make_plan(model, EIGHT, stats=assumed)
        assert found.predicted.cross_bytes > 0
    assert make_plan(model, EIGHT) == make_plan(model, EIGHT, batch_size=2048)


ACCESSES = st.builds(
    lambda pooling, share, growth: Accesses(
        requests=1000.0 * pooling,
        bags=1000.0 * min(1.0, pooling),
        growth=(1000 * pooling * share, 1000 * pooling * share * growth),
    ),
    pooling=st.sampled_from([0.3, 1.0, 5.0, 40.0]),
    share=st.floats(0.01, 1.0),
    growth=st.floats(1.0, 2.0),
)
SHAPE = st.tuples(
    st.sampled_from([1, 40, 5_000, 80_000, 2_000_000]),
    st.sampled_from([1, 6, 16, 64]),
    ACCESSES,
    st.booleans(),
    st.sampled_from(["sum", "mean", "none"]),
)
TOPOLOGY = st.builds(Topology, hosts=st.integers(1, 4), local=st.integers(1, 4))


def blanks(shapes: list[Any]) -> tuple[list[TablePlan], Stats]:
    """Tables not yet placed, with their accesses."""
    tables = [
        TablePlan(
            name=f"t{i}",
            collection="",
            num_embeddings=rows,
            embedding_dim=dim,
            data_type="fp32",
            pooling=PoolingType(pooling),
            feature_names=(f"f{i}",),
            virtual_shards=256,
            tiers=(),
            trainable=trainable,
        )
        for i, (rows, dim, _, trainable, pooling) in enumerate(shapes)
    ]
    return tables, stats_of(**{f"t{i}": shape[2] for i, shape in enumerate(shapes)})


@LAW
@given(st.lists(SHAPE, min_size=1, max_size=4), TOPOLOGY)
def test_auto_is_as_good_as_any_one_exact_split(shapes: list[Any], topology: Topology) -> None:
    """Up to a tenth: small tables may cost 5 %, and the search is local."""
    tables, stats = blanks(shapes)
    found = plan_tables(tables, topology, stats=stats, rates=Rates())
    assert all(map(is_exact, found.tables))
    for split in SPLITS:
        other = plan_tables(tables, topology, stats=stats, rates=Rates(), split=split)
        if split != "data_parallel" or all(
            t.num_embeddings * t.row_bytes <= 1 << 20 for t in tables
        ):
            assert found.predicted.step_s <= 1.1 * other.predicted.step_s, split


def placements(table: TablePlan, topology: Topology) -> Iterator[TablePlan]:
    """Every exact placement of a table that `auto` may choose, on any ranks."""
    world, local = topology.world, topology.local
    every = range(world)
    hosts = [tuple(range(h * local, (h + 1) * local)) for h in range(topology.hosts)]
    places: list[tuple[str, int, tuple[int, ...]]] = [("row_wise", 1, tuple(every))]
    if table.num_embeddings * table.row_bytes <= 1 << 20:
        places.append(("data_parallel", 1, tuple(every)))
    places += [("table_wise", 1, (rank,)) for rank in every]
    places += [("table_row_wise", 1, host) for host in hosts if local > 1]
    for k in (2, 4):
        if k <= table.embedding_dim:
            places += [("column_wise", k, c) for c in itertools.combinations(every, k)]
        if k <= min(table.embedding_dim, topology.hosts) and local > 1:
            for chosen in itertools.combinations(hosts, k):
                places.append(("grid", k, tuple(itertools.chain(*chosen))))
    for split, columns, ranks in places:
        for exchange in Exchange:
            placed = Option(split, columns, (exchange,)).place(table, 0, ranks)
            sequence = table.pooling is PoolingType.NONE and exchange is Exchange.POOLED
            if not sequence and is_exact(placed):
                yield placed


@settings(LAW, max_examples=30)
@given(
    st.data(),
    st.sampled_from([(1, 2, 3), (2, 1, 3), (1, 3, 2), (2, 2, 2)]),
    st.sampled_from([None, 0.6, 1.2]),
)
def test_no_plan_beats_brute_force_and_none_is_far_from_it(
    data: Any, shape: tuple[int, int, int], room: float | None
) -> None:
    """Within 1.2 of the best of all placements, under the same limit of memory."""
    hosts, local, num_tables = shape
    sizes = SHAPE.map(lambda s: (s[0], min(s[1], 4), *s[2:]))
    shapes = data.draw(st.lists(sizes, min_size=num_tables, max_size=num_tables))
    tables, stats = blanks(shapes)
    topology, rates = Topology(hosts=hosts, local=local), Rates()
    tables = [replace(t, virtual_shards=256) for t in tables]
    total = sum(t.num_embeddings * (t.row_bytes + 4) for t in tables)
    limit = None if room is None else int(total * room) + 16 * num_tables
    options = []
    for table in tables:
        made = []
        for placed in placements(table, topology):
            load = expect_table(placed, stats.tables[table.name], topology=topology)
            mesh = MeshShape(hosts=hosts, local=local, group=topology.world)
            held = np.array(bytes_per_rank(Plan(mesh=mesh, tables=(placed,))))
            made.append((load, held))
        options.append(made)
    best = np.inf
    for chosen in itertools.product(*options):
        if limit is None or sum(held for _, held in chosen).max() <= limit:
            load = sum((load for load, _ in chosen), no_load(topology.world))
            best = min(best, step_seconds(load, topology=topology, rates=rates))
    constraints = Constraints(max_bytes_per_rank=limit)
    try:
        plan = plan_tables(tables, topology, stats=stats, rates=rates, constraints=constraints)
    except PlanError:
        assert best == np.inf
        return
    found = step_seconds(expect_plan(plan, stats.tables), topology=topology, rates=rates)
    assert found == pytest.approx(plan.predicted.step_s)
    assert best * (1 - 1e-9) <= found <= 1.2 * best


@LAW
@given(
    st.lists(SHAPE, min_size=1, max_size=8),
    TOPOLOGY,
    st.floats(0.2, 3.0),
    st.sampled_from(["auto", *SPLITS]),
    st.sampled_from(sorted(RULE_STATES)),
    st.sampled_from([1, 2]),
)
def test_the_limit_of_memory_is_never_broken(
    shapes: list[Any], topology: Topology, room: float, split: str, sparse: str, depth: int
) -> None:
    """Where the rows fit row-wise, `auto` finds a plan."""
    tables, stats = blanks(shapes)
    state = RULE_STATES[sparse]
    sizes = {
        "state_bytes_per_row": state.row_bytes,
        "state_bytes_per_element": state.element_bytes,
    }
    wishes: dict[str, Any] = {"stats": stats, "sparse": sparse, "depth": depth}
    flat = plan_tables(tables, topology, split="row_wise", **wishes)
    needed = max(bytes_per_rank(flat, **sizes))
    limited = replace(topology, memory_bytes=max(1, int(needed * room)))
    try:
        plan = plan_tables(tables, limited, split=split, **wishes)
    except PlanError:
        assert split not in ("auto", "row_wise") or room < 1.0
        return
    assert max(bytes_per_rank(plan, **sizes)) <= (limited.memory_bytes or 0)
    capped = Constraints(max_bytes_per_rank=limited.memory_bytes)
    again = plan_tables(tables, topology, split=split, constraints=capped, **wishes)
    assert again == plan


@LAW
@given(st.data(), TOPOLOGY)
def test_constraints_are_obeyed(data: Any, topology: Topology) -> None:
    shapes = data.draw(st.lists(SHAPE, min_size=3, max_size=6))
    tables, stats = blanks(shapes)
    ranks = st.lists(st.integers(0, topology.world - 1), min_size=1, unique=True).map(tuple)
    pins = st.one_of(
        st.builds(Pin, ranks=ranks, split=st.none() | st.sampled_from(["row_wise", "table_wise"])),
        st.builds(Pin, host=st.integers(0, topology.hosts - 1), dedup=st.booleans()),
        st.builds(Pin, split=st.sampled_from([*SPLITS[:4]]), exchange=st.just("rows")),
    )
    pin = {t.name: data.draw(pins) for t in tables[2:] if data.draw(st.booleans())}
    constraints = Constraints(pin=pin, together=(("t1", "t0"),))
    plan = plan_tables(tables, topology, stats=stats, constraints=constraints)
    first, second = plan.table("t0"), plan.table("t1")
    assert first.rest == second.rest
    for name, wanted in pin.items():
        table = plan.table(name)
        local = topology.local
        if wanted.ranks is not None:
            assert set(table.rest.ranks) <= set(wanted.ranks)
            if wanted.split == "row_wise":
                assert table.rest.ranks == wanted.ranks
        if wanted.host is not None:
            assert {rank // local for rank in table.rest.ranks} == {wanted.host}
        if wanted.split is not None:
            assert table.word == wanted.split.replace("_", "-")
        if wanted.exchange is not None:
            assert table.exchange == wanted.exchange
        assert table.dedup is (wanted.dedup is not False)


@LAW
@given(st.lists(SHAPE, min_size=2, max_size=7), TOPOLOGY, st.booleans(), st.randoms())
def test_one_answer_whatever_the_order(
    shapes: list[Any], topology: Topology, limited: bool, random: Any
) -> None:
    tables, stats = blanks(shapes)
    if limited:
        total = sum(t.num_embeddings * (t.row_bytes + 4) for t in tables)
        topology = replace(topology, memory_bytes=total)
    pin = {"t0": Pin(split="row_wise"), "t1": Pin(ranks=(0,))}
    plan = plan_tables(tables, topology, stats=stats, constraints=Constraints(pin=pin))
    shuffled = random.sample(tables, len(tables))
    other = Stats(
        batch_size=1000, tables=dict(random.sample(sorted(stats.tables.items()), len(tables)))
    )
    backwards = Constraints(pin=dict(reversed(pin.items())))
    again = plan_tables(shuffled, topology, stats=other, constraints=backwards)
    assert [t.name for t in again.tables] == [t.name for t in shuffled]
    assert {t.name: (t, t.why) for t in again.tables} == {t.name: (t, t.why) for t in plan.tables}
    assert again.predicted == plan.predicted


@LAW
@given(st.data(), TOPOLOGY)
def test_a_tally_is_the_expected_plan_in_seconds(data: Any, topology: Topology) -> None:
    """The quick sums of the search equal the formulas, put in and taken out again."""
    rates, state = Rates(cross_bytes_per_s=1e9), RULE_STATES["rowwise_adagrad"]
    tables, stats = blanks(data.draw(st.lists(SHAPE, min_size=1, max_size=4)))
    fixed = expect_dense(1000, topology=topology)
    tally, total = Tally(topology, rates=rates, fixed=fixed), fixed
    for table in tables:
        accesses = stats.tables[table.name]
        placed = data.draw(st.sampled_from(list(placements(table, topology))))
        tier = placed.rest
        names = {"whole": "table_wise", "row-wise": "row_wise"}
        split = names.get(tier.split.word, tier.split.word.replace("-", "_"))
        if tier.copies is Copies.WORLD:
            split = "data_parallel"
        option = Option(split, tier.split.columns, (placed.exchange,))
        unit = Unit((table,), (accesses,), tuple(range(topology.world)), (option,))
        made = draft(
            unit,
            option,
            tier.ranks,
            topology=topology,
            rates=rates,
            state=state,
        )
        before = tally.seconds()
        with_it = tally.cost_with(Placed(made, tier.ranks))
        tally.put(Placed(made, tier.ranks))
        tally.take(Placed(made, tier.ranks))
        assert tally.seconds() == pytest.approx(before, abs=1e-15)
        tally.put(Placed(made, tier.ranks))
        assert tally.cost().busiest == pytest.approx(with_it.busiest)
        assert tally.cost().mean == pytest.approx(with_it.mean)
        total += expect_table(placed, accesses, topology=topology, rates=rates)
    expected = rank_seconds(total.values, topology=topology, rates=rates)
    assert tally.seconds() == pytest.approx(expected)
    assert tally.cost().busiest == pytest.approx(
        step_seconds(total, topology=topology, rates=rates)
    )


@LAW
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 6), st.randoms())
def test_whole_tables_are_balanced_whatever_the_order(
    sizes: list[int], world: int, random: Any
) -> None:
    tables = [bag(f"t{i}") for i in range(len(sizes))]
    accesses = {f"t{i}": uses(1, size) for i, size in enumerate(sizes)}
    topology = Topology(hosts=world)
    arguments = {"split": "table_wise", "exchange": "rows"}
    plan = make_plan(bags(*tables), topology, stats=stats_of(**accesses), **arguments)
    load = [0.0] * world
    for table, size in zip(plan.tables, sizes, strict=True):
        assert len(table.rest.ranks) == 1
        load[table.rest.ranks[0]] += size
    if world ** len(sizes) <= 1000:  # longest first is within 4/3 of the best, and never better
        choices = itertools.product(range(world), repeat=len(sizes))
        best = min(
            max(sum(s for s, r in zip(sizes, c, strict=True) if r == k) for k in range(world))
            for c in choices
        )
        assert best <= max(load) <= best * 4 / 3
    random.shuffle(tables)
    shuffled = dict(random.sample(sorted(accesses.items()), len(accesses)))
    again = make_plan(bags(*tables), topology, stats=stats_of(**shuffled), **arguments)
    assert {t.name: t for t in again.tables} == {t.name: t for t in plan.tables}


def test_equal_tables_go_round() -> None:
    plan = make_plan(bags(*(bag(f"t{i:02}") for i in range(16))), EIGHT, split="table_wise")
    ranks = [t.rest.ranks[0] for t in plan.tables]
    assert sorted(ranks) == sorted([0, 1, 2, 3, 4, 5, 6, 7] * 2)


def test_predicted_bytes_are_means_over_ranks_by_link() -> None:
    model, stats = bags(bag("a"), bag("b", SMALL)), stats_of(a=uses(1, 300), b=uses(2, 90))
    for topology in (EIGHT, Topology(hosts=8), Topology(local=8)):
        plan = make_plan(model, topology, stats=stats)
        load = expect_plan(plan, stats.tables)
        assert plan.predicted.host_bytes == pytest.approx(load.sent_host.mean())
        assert plan.predicted.cross_bytes == pytest.approx(load.sent_cross.mean())
        assert plan.predicted.step_s is None  # nobody said how fast the cluster is
        timed = make_plan(model, topology, stats=stats, rates=Rates())
        seconds = step_seconds(load, topology=topology, rates=Rates())
        assert timed.predicted.step_s == pytest.approx(seconds)


def test_plan_tables_needs_no_model() -> None:
    model, stats = bags(bag("a"), bag("b", SMALL)), stats_of(a=uses(1, 300), b=uses(2, 90))
    plan = make_plan(model, EIGHT, stats=stats)
    blank = [replace(t, tiers=()) for t in plan.tables]
    assert plan_tables(blank, EIGHT, stats=stats) == plan


def test_a_plan_for_512_ranks_and_1000_tables() -> None:
    model = bags(*(bag(f"t{i}", 1000 * (i + 1)) for i in range(1000)))
    stats = stats_of(**{f"t{i}": uses(1, 300) for i in range(1000)})
    plan = make_plan(model, Topology(hosts=64, local=8), stats=stats)
    assert len(plan.tables) == 1000
    totals = bytes_per_rank(plan)
    assert max(totals) < 1.2 * min(totals)


def test_tables_without_room_are_named() -> None:
    small = Topology(hosts=2, local=4, memory_bytes=1 << 20)
    message = (
        r"table 'a' needs at least 7.916 GiB on a rank \(row_wise rows\), but of 1,048,576 byte"
    )
    with pytest.raises(PlanError, match=message):
        make_plan(bags(bag("a", 10**9)), small)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pin": {"b": Pin(host=0)}}, "constraints name table 'b': known are a, s"),
        ({"together": (("a", "t"),)}, "constraints name table 't'"),
    ],
)
def test_constraints_name_known_tables(arguments: dict[str, Any], message: str) -> None:
    model = nn.ModuleList([bags(bag("a")), sequences("s")])
    with pytest.raises(InputError, match=message):
        make_plan(model, EIGHT, constraints=Constraints(**arguments))


@pytest.mark.parametrize(
    ("arguments", "split", "message"),
    [
        ({"pin": {"a": Pin(ranks=(3, 8))}}, "auto", "rank 8, but there are 8: use 0 to 7"),
        ({"pin": {"a": Pin(host=2)}}, "auto", "host 2, but there are 2: use 0 to 1"),
        ({"pin": {"a": Pin(host=-1)}}, "auto", "host -1, but there are 2"),
        ({"pin": {"s": Pin(exchange="pooled")}}, "auto", "'s' is pinned to pooled, but is a seq"),
        ({"pin": {"a": Pin(host=1)}}, "data_parallel", "data_parallel needs all 8: drop the pin"),
        (
            {"pin": {"a": Pin(split="column_wise", columns=9)}},
            "auto",
            "'a' cannot be column_wise in 9 pieces: its columns allow 8, and its ranks 8 on 2 hos",
        ),
        (
            {"pin": {"p": Pin(split="grid")}},
            "auto",
            "'p' cannot be grid in 2 pieces: its columns allow 1",
        ),
        (
            {"pin": {"a": Pin(split="column_wise", ranks=(5,))}},
            "auto",
            "and its ranks 1 on 1 hosts; pin fewer",
        ),
        (
            {"pin": {"a": Pin(ranks=(0,)), "p": Pin(ranks=(1,))}, "together": (("a", "p"),)},
            "auto",
            "tables 'a', 'p', kept together, are pinned to different ranks",
        ),
        (
            {
                "pin": {"a": Pin(split="row_wise"), "p": Pin(split="table_wise")},
                "together": (("p", "a"),),
            },
            "auto",
            "are pinned to row_wise and table_wise: pin one split",
        ),
    ],
)
def test_impossible_constraints_are_named(
    arguments: dict[str, Any], split: str, message: str
) -> None:
    model = nn.ModuleList([bags(bag("a"), bag("p", dim=11)), sequences("s")])
    with pytest.raises(PlanError, match=message):
        make_plan(model, EIGHT, split=split, constraints=Constraints(**arguments))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pin(split="rowwise"), "unknown split 'rowwise': did you mean 'row_wise'"),
        (lambda: Pin(exchange="row"), "unknown exchange 'row': did you mean 'rows'"),
        (lambda: Pin(ranks=()), "must be one or more, distinct, from 0"),
        (lambda: Pin(ranks=(1, 1)), r"ranks \[1, 1\] must be one or more, distinct"),
        (lambda: Pin(ranks=(-1,)), r"ranks \[-1\] must be"),
        (lambda: Pin(ranks=(1,), host=0), r"ranks \[1\] and host 0: say one"),
        (lambda: Pin(split="data_parallel", host=0), "pin its split or its ranks"),
        (lambda: Pin(columns=2), "columns is 2 with split None"),
        (lambda: Pin(split="grid", columns=0), "columns is 0 with split 'grid'"),
        (lambda: Constraints(together=(("a", "b"), ("c", "a"))), "more than once: a"),
        (lambda: Constraints(together=(("a",),)), "together with itself"),
        (lambda: Constraints(max_bytes_per_rank=0), "max_bytes_per_rank is 0, but must"),
    ],
)
def test_contradictions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_constraints_of_a_document() -> None:
    found = parse_constraints(
        {
            "pin": {
                "user": {"split": "grid", "columns": 2, "dedup": False},
                "item": {"ranks": [2, 0], "exchange": "rows"},
            },
            "together": [["a", "b"]],
            "max_bytes_per_rank": 10,
        }
    )
    pin = {
        "user": Pin(split="grid", columns=2, dedup=False),
        "item": Pin(ranks=(0, 2), exchange="rows"),
    }
    assert found == Constraints(pin=pin, together=(("a", "b"),), max_bytes_per_rank=10)
    assert parse_constraints({}) == Constraints()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], r"constraints must be a table of names, got \[\]"),
        ({"pins": {}}, "constraints: unknown field 'pins': did you mean 'pin'"),
        ({"pin": [1]}, r"constraints.pin must be a table of names, got \[1\]"),
        ({"pin": {"a": 3}}, "constraints.pin.a must be a table of names, got 3"),
        ({"pin": {"a": {"rank": 1}}}, "constraints.pin.a: unknown field 'rank': did you mean 'ra"),
        ({"pin": {"a": {"ranks": 1}}}, "constraints.pin.a.ranks must be a list of ranks, got 1"),
        ({"pin": {"a": {"ranks": [True]}}}, "constraints.pin.a.ranks must be a list of ranks"),
        ({"pin": {"a": {"host": "0"}}}, "constraints.pin.a.host must be int, got '0'"),
        ({"pin": {"a": {"host": True}}}, "constraints.pin.a.host must be int, got True"),
        ({"pin": {"a": {"dedup": 1}}}, "constraints.pin.a.dedup must be bool, got 1"),
        ({"pin": {"a": {"split": "x"}}}, "constraints.pin.a: unknown split 'x'"),
        ({"together": ["ab"]}, "constraints.together must be a list of lists"),
        ({"together": [[1]]}, "constraints.together must be a list of lists"),
        ({"max_bytes_per_rank": 1.5}, "constraints.max_bytes_per_rank must be int, got 1.5"),
    ],
)
def test_documents_that_are_no_constraints(document: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_constraints(document)


@pytest.mark.parametrize(
    ("pin", "may"),
    [
        (Pin(ranks=(1,)), False),
        (Pin(host=0), False),
        (Pin(split="row_wise"), False),
        (Pin(group=2), False),
        (Pin(exchange="pooled"), False),
        (Pin(exchange="rows"), True),
        (Pin(dedup=False), True),
    ],
)
def test_pins_say_whether_every_table_may_be_copied(pin: Pin, may: bool) -> None:
    found = Constraints(pin={"a": pin}, together=(("a", "b"), ("c", "d")))
    assert found.may_copy_all == may
    is_placed = pin.ranks is not None or pin.host is not None
    assert found.placed == (("a", "b") if is_placed else ())


def test_a_pinned_exchange_may_be_inexact() -> None:
    pin = {"a": Pin(split="row_wise", exchange="pooled")}
    plan = make_plan(bags(bag("a"), bag("b")), EIGHT, constraints=Constraints(pin=pin))
    assert words(plan)["a"] == ("row-wise", "pooled")
    assert is_exact(plan.table("b"))


def test_tables_that_cannot_be_cut_by_columns_stay_whole() -> None:
    model = bags(bag("a"), bag("p", dim=11))
    found = words(make_plan(model, EIGHT, split="column_wise"))
    assert {name: word for name, (word, _) in found.items()} == {
        "a": "column-wise",
        "p": "table-wise",
    }


def test_a_plan_says_why() -> None:
    """The runner-up is worse by what is said, all other tables as planned."""
    names = [f"t{i}" for i in range(6)]
    stats = stats_of(**{n: uses(20, 1500.0 * (i + 1)) for i, n in enumerate(names)})
    model = bags(*map(bag, names))
    plan = make_plan(model, EIGHT, stats=stats, rates=Rates())
    for table in plan.tables:
        why = table.why
        assert why is not None
        assert why.chosen.replace("_", "-").startswith(table.word.replace("_", "-"))
        assert why.runner_up not in (None, why.chosen)
        assert why.seconds_saved >= -1e-9
        assert f"{why.chosen:<22} {why.runner_up:<22}" in render_why(plan)
    assert all(len(line) <= 100 for line in render_why(plan).splitlines())
    again = plan_from_json(plan_to_json(plan))
    assert [t.why for t in again.tables] == [t.why for t in plan.tables]
    assert again == replace(plan, tables=tuple(replace(t, why=None) for t in plan.tables))


def test_the_runner_up_of_one_table_costs_what_is_said() -> None:
    stats, rates = stats_of(a=uses(20, 9000)), Rates()
    plan = make_plan(bags(bag("a")), EIGHT, stats=stats, rates=rates)
    why = plan.tables[0].why
    assert why is not None
    split, exchange = (why.runner_up or "").split()
    name, _, columns = split.rstrip(")").partition("(")
    pin = {"a": Pin(split=name, columns=int(columns) if columns else None, exchange=exchange)}
    other = make_plan(
        bags(bag("a")), EIGHT, stats=stats, rates=rates, constraints=Constraints(pin=pin)
    )
    before, after = (p.predicted for p in (plan, other))
    assert before.step_s is not None
    assert after.step_s == pytest.approx(before.step_s + why.seconds_saved)
    saved = after.host_bytes + after.cross_bytes - before.host_bytes - before.cross_bytes
    assert why.bytes_saved == pytest.approx(saved)


def test_progress_goes_from_zero_to_one() -> None:
    shares: list[float] = []
    make_plan(bags(*(bag(f"t{i}") for i in range(5))), EIGHT, on_progress=shares.append)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_make_plan_reads_the_configurations_only() -> None:
    model = nn.ModuleList([bags(bag("a")), sequences("s")])
    before = [configs for _, _, configs in named_collections(model)]
    make_plan(model, EIGHT)
    assert [configs for _, _, configs in named_collections(model)] == before
    assert all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "row_wise", "ranks": (0.0, 1.0)}, r"ranks \[0.0, 1.0\] must be whole numbers"),
        ({"split": "column_wise", "columns": "2"}, "columns is '2', but must be a whole number"),
        ({"host": True}, "host is True, but must be a whole number"),
        ({"split": "data_parallel", "exchange": "pooled"}, "leave out exchange 'pooled'"),
    ],
)
def test_a_pin_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pin(**fields)
