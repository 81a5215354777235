"""Shard groups in plans: which are tried, which is best, pins, memory, hot rows, why this N."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.cost import (
    DenseCost,
    Rates,
    expect_plan,
    expect_sync,
    expect_tables,
    imbalance,
    plan_time,
    predict,
)
from rowmesh.errors import InputError, PlanError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, MeshShape, Plan, Sync, TablePlan, plan_from_json
from rowmesh.placement.document import plan_to_json
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.planners import Constraints, Pin, blank_table, choose_tiers, plan_tables
from rowmesh.planners.groups import list_meshes, parse_groups, parse_layout, parse_sync
from rowmesh.planners.per_host import has_peers
from rowmesh.stats import Stats
from rowmesh.tables import EmbeddingBagConfig
from rowmesh.topology import Topology
from rowmesh.train.planning import PlanConfig, check_plan

LAW = settings(derandomize=True, deadline=None, max_examples=15)
EIGHT = Topology(hosts=2, local=4)
FAST = Rates(cross_bytes_per_s=1e8)  # slow across, so that groups are worth it
TOPOLOGY = st.sampled_from([(2, 2), (1, 4), (4, 1), (2, 4), (3, 2)]).map(
    lambda shape: Topology(hosts=shape[0], local=shape[1])
)
SHAPES = st.lists(
    st.tuples(st.integers(1, 200_000), st.sampled_from([4, 16, 64]), st.sampled_from([1.0, 8.0])),
    min_size=1,
    max_size=5,
)
SYNC = st.sampled_from(
    [Sync(), Sync(mode="weights", period=64), Sync(mode="moments-first", period=4)]
)


def blanks(shapes: list[tuple[int, int, float]]) -> tuple[list[TablePlan], Stats]:
    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=r, embedding_dim=d, feature_names=[f"f{i}"])
        for i, (r, d, _) in enumerate(shapes)
    ]
    factors = {f"t{i}": pooling for i, (_, _, pooling) in enumerate(shapes)}
    stats = Stats.assume(configs, batch_size=256, pooling_factors=factors)
    return [blank_table(config) for config in configs], stats


def meshes_of(topology: Topology) -> list[tuple[int, str]]:
    return [(m.group, m.layout) for m in list_meshes(topology, groups="auto", layout="auto")]


def test_every_size_that_the_rules_allow_is_tried() -> None:
    assert meshes_of(EIGHT) == [
        (8, "contiguous"),
        (4, "contiguous"),
        (4, "strided"),
        (2, "contiguous"),
        (2, "strided"),
        (1, "contiguous"),
    ]
    for hosts, local in itertools.product(range(1, 7), range(1, 7)):
        topology = Topology(hosts=hosts, local=local)
        tried = {size for size, _ in meshes_of(topology)}
        for size in range(1, topology.world + 1):
            mesh = MeshShape(hosts=hosts, local=local, group=size)
            try:
                Plan(mesh=mesh, tables=()).validate()
            except PlanError:
                assert size not in tried
            else:
                assert size in tried
    one = list_meshes(EIGHT, groups="auto", layout="strided")
    assert [(m.group, m.layout) for m in one if m.group == 4] == [(4, "strided")]
    assert [m.group for m in list_meshes(EIGHT, groups="off", layout="auto")] == [8]
    assert [m.group for m in list_meshes(EIGHT, groups="2", layout="auto")] == [2, 2]


@LAW
@given(SHAPES, TOPOLOGY, SYNC, st.booleans())
def test_the_best_of_all_groups_is_chosen(
    shapes: list[Any], topology: Topology, sync: Sync, has_cost: bool
) -> None:
    """Every size and layout planned by itself; ties go to larger groups, then contiguous."""
    tables, stats = blanks(shapes)
    cost = DenseCost(flops=1.0, parameters=1.0, forward_s=1e-3, backward_s=2e-3, step_s=1e-4)
    more: dict[str, Any] = {
        "cost": cost if has_cost else None,
        "sync": sync,
        "dense": (5000,),
        "merge": "off",
    }
    found = plan_tables(tables, topology, stats=stats, rates=FAST, groups="auto", **more)
    seconds, plans = {}, {}
    for size, layout in meshes_of(topology):
        plan = plan_tables(
            tables, topology, stats=stats, rates=FAST, groups=size, layout=layout, **more
        )
        seconds[size, layout] = plan.predicted.step_s
        if has_cost:
            seconds[size, layout] = plan_time(plan, stats.tables, rates=FAST, cost=cost).total_s
        plans[size, layout] = plan
    best = min(seconds, key=lambda key: (round(seconds[key], 12), -key[0], key[1]))
    assert found == plans[best]
    assert found.groups_choice is not None
    lines = {(c.size, c.layout): c for c in found.groups_choice.candidates}
    assert list(lines) == meshes_of(topology)
    assert [key for key, one in lines.items() if one.is_chosen] == [best]
    for key, one in lines.items():
        assert one.step_s == pytest.approx(seconds[key])
        load = expect_plan(plans[key], stats.tables, rates=FAST)
        assert one.cross_bytes + one.sync_cross_bytes == pytest.approx(load.sent_cross.mean())
        assert one.host_bytes + one.sync_host_bytes == pytest.approx(load.sent_host.mean())
        assert one.work_imbalance == pytest.approx(imbalance(load.work))
        assert one.bytes_imbalance == pytest.approx(imbalance(load.sent_host + load.sent_cross))
        assert one.memory_bytes == max(bytes_per_rank(plans[key]))


def test_one_group_is_the_plan_without_groups() -> None:
    tables, stats = blanks([(90_000, 16, 8.0), (300, 64, 1.0), (5000, 4, 1.0)])
    off = plan_tables(tables, EIGHT, stats=stats)
    assert off.groups_choice is None
    assert plan_tables(tables, EIGHT, stats=stats, groups=8) == off
    assert not off.has_replicas


@LAW
@given(SHAPES, TOPOLOGY, st.floats(0.9, 5.0), SYNC)
def test_the_limit_of_memory_is_never_broken(
    shapes: list[Any], topology: Topology, room: float, sync: Sync
) -> None:
    """Groups that do not fit are listed as such."""
    tables, stats = blanks(shapes)
    flat = plan_tables(tables, topology, stats=stats, split="row_wise")
    limit = int(max(bytes_per_rank(flat)) * room)
    limited = replace(topology, memory_bytes=limit)
    more: dict[str, Any] = {"stats": stats, "rates": FAST, "sync": sync, "groups": "auto"}
    try:
        plan = plan_tables(tables, limited, **more)
    except PlanError:
        assert room < 1.0
        return
    assert max(bytes_per_rank(plan)) <= limit
    assert plan.groups_choice is not None
    for one in plan.groups_choice.candidates:
        if not one.note:
            assert one.memory_bytes <= limit
        elif one.memory_bytes > limit:
            assert one.note.startswith("does not fit: needs ")
    total = sum(t.num_embeddings * (t.row_bytes + 4) for t in tables)
    if total > limit:  # every rank a group: all rows on one
        assert plan.groups_choice.candidates[-1].note


def test_groups_that_cannot_be_planned_say_why() -> None:
    tables, stats = blanks([(100_000, 16, 1.0)])
    with pytest.raises(PlanError, match="table 't0' needs at least 850,000 bytes on"):
        plan_tables(tables, replace(EIGHT, memory_bytes=10), stats=stats, groups="auto")
    with pytest.raises(PlanError, match="shard groups of 3 ranks do not divide 8 ranks"):
        plan_tables(tables, EIGHT, stats=stats, groups=3)
    with pytest.raises(PlanError, match=r"shard groups of 2 ranks .* multiple or a divisor of 3"):
        plan_tables(tables, Topology(hosts=2, local=3), stats=stats, groups=2)


@LAW
@given(st.data(), SHAPES, TOPOLOGY)
def test_the_order_of_tables_does_not_matter(
    data: st.DataObject, shapes: list[Any], topology: Topology
) -> None:
    tables, stats = blanks(shapes)
    first = plan_tables(tables, topology, stats=stats, groups="auto", rates=FAST)
    mixed = data.draw(st.permutations(tables))
    second = plan_tables(mixed, topology, stats=stats, groups="auto", rates=FAST)
    assert second.mesh == first.mesh
    assert {t.name: t for t in second.tables} == {t.name: t for t in first.tables}
    assert second.predicted == first.predicted
    assert second.groups_choice == first.groups_choice


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_holds_its_copies_of_hot_rows(size: int) -> None:
    """In groups, too: 16 bytes a row, and 4 of state."""
    tables, _ = blanks([(64, 4, 1.0)])
    uses = np.arange(64, 0, -1)
    batches = [
        KeyedJaggedTensor(["f0"], torch.from_numpy(uses % 32 + step), lengths=torch.ones(64).int())
        for step in range(2)
    ]
    config = EmbeddingBagConfig(name="t0", num_embeddings=64, embedding_dim=4, feature_names=["f0"])
    stats = Stats.from_batches([config], batches)
    given: Any = {"stats": stats, "split": "row_wise", "exchange": "rows", "groups": size}
    topology = Topology(hosts=2, local=2)
    cold = bytes_per_rank(plan_tables(tables, topology, **given))
    hot = bytes_per_rank(plan_tables(tables, topology, tiers="hot:8", **given))
    assert [h - c for h, c in zip(hot, cold, strict=True)] == [8 * 20] * 4


SKEWED = [(1_000_000, 64, 40.0), *[(100_000, 16, 4.0)] * 4, *[(20_000, 16, 1.0)] * 6]


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_load_is_more_even_the_smaller_groups_are(layout: str) -> None:
    """One large table among small ones, table-wise: work, bytes of the exchange, and of batches.

    Bytes of the sync are not among them: the owner of a large table sends most of them.
    """
    tables, stats = blanks(SKEWED)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(8):
        draws = {
            f"f{i}": rng.integers(0, rows, (32, int(p))) for i, (rows, _, p) in enumerate(SKEWED)
        }
        flat = torch.from_numpy(np.concatenate([d.ravel() for d in draws.values()]))
        lengths = torch.tensor([d.shape[1] for d in draws.values()]).repeat_interleave(32)
        batches.append(KeyedJaggedTensor(list(draws), flat, lengths=lengths))
    work, sent, counted = [], [], []
    for size in (8, 4, 2, 1):
        plan = plan_tables(
            tables,
            EIGHT,
            stats=stats,
            split="table_wise",
            groups=size,
            layout="contiguous" if size in (8, 1) else layout,
        )
        work.append(imbalance(expect_plan(plan, stats.tables).work))
        load = expect_tables(plan, stats.tables)
        sent.append(imbalance(load.sent_host + load.sent_cross))
        edges = ("ids", "rows", "pooled", "backward")
        ledgers = predict(plan, batches)
        totals = [sum(sum(led.get(edge, {}).values()) for edge in edges) for led in ledgers]
        counted.append(imbalance(totals))
    for found in (work, sent, counted):
        assert found == sorted(found, reverse=True)
        assert found[0] > 1.4
        assert found[-1] == pytest.approx(1.0)


def test_groups_lie_where_their_layout_says() -> None:
    """Contiguous groups of a host exchange inside it; strided ones sync inside it."""
    tables, stats = blanks([(200_000, 64, 8.0)])
    near, far = (
        plan_tables(
            tables, EIGHT, stats=stats, rates=FAST, split="row_wise", groups=4, layout=layout
        )
        for layout in ("contiguous", "strided")
    )
    assert near.tables[0].rest.ranks == (0, 1, 2, 3)
    assert far.tables[0].rest.ranks == (0, 2, 4, 6)
    assert near.groups_choice is None  # one mesh was asked for: there was no choice
    assert near.predicted.host_bytes > far.predicted.host_bytes
    exchange = [expect_tables(plan, stats.tables) for plan in (near, far)]
    sync = [expect_sync(plan, stats.tables) for plan in (near, far)]
    assert not exchange[0].sent_cross.any()
    assert exchange[1].sent_cross.all()
    assert not sync[0].sent_host.any()
    assert not sync[1].sent_cross.any()


def test_virtual_shards_do_not_change_with_the_groups() -> None:
    tables, stats = blanks([(200_000, 64, 8.0)])
    world = Topology(hosts=8, local=4)
    found = {
        plan_tables(tables, world, stats=stats, groups=n).tables[0].virtual_shards
        for n in (32, 8, 1)
    }
    assert found == {512}


def test_tables_may_be_pinned_to_groups_and_to_places_in_them() -> None:
    tables, stats = blanks([(200_000, 16, 4.0)] * 4)
    pins = {
        "t0": Pin(group=2),
        "t1": Pin(ranks=(1, 3), split="row_wise"),
        "t2": Pin(host=0, split="table_wise"),
    }
    plan = plan_tables(
        tables,
        EIGHT,
        stats=stats,
        groups=4,
        layout="contiguous",
        constraints=Constraints(pin=pins),
    )
    assert [t.group for t in plan.tables] == [2, None, None, None]
    assert set(plan.table("t0").rest.ranks) <= {0, 1}
    assert plan.table("t1").rest.ranks == (1, 3)
    assert set(plan.table("t2").rest.ranks) <= {0, 1, 2, 3}
    assert "tables in groups of their own: t0 of 2" in str(plan)
    off = plan_tables(tables, EIGHT, stats=stats, constraints=Constraints(pin={"t0": Pin(group=2)}))
    assert (off.mesh.group, off.table("t0").group, off.has_replicas) == (8, 2, True)
    kept = Constraints(pin={"t0": Pin(group=2)}, together=(("t3", "t0"),))
    both = plan_tables(tables, EIGHT, stats=stats, constraints=kept)
    assert both.table("t3").group == both.table("t0").group == 2
    assert both.table("t3").rest.ranks == both.table("t0").rest.ranks


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (
            Constraints(pin={"t0": Pin(ranks=(5,))}),
            r"'t0' is pinned to ranks \[5\], but the first shard group has \[0, 1, 2, 3\]",
        ),
        (Constraints(pin={"t0": Pin(host=1)}), r"pinned to ranks \[4, 5, 6, 7\], but the first"),
        (Constraints(pin={"t0": Pin(group=3)}), "'t0': shard groups of 3 ranks do not divide 8"),
        (
            Constraints(pin={"t0": Pin(group=2), "t1": Pin(group=4)}, together=(("t0", "t1"),)),
            "tables 't0', 't1', kept together, are pinned to shard groups of 2 and 4 ranks",
        ),
        (Constraints(pin={"t9": Pin(group=2)}), "constraints name table 't9'"),
    ],
)
def test_pins_that_no_group_can_obey(constraints: Constraints, message: str) -> None:
    tables, stats = blanks([(200_000, 16, 4.0)] * 2)
    with pytest.raises((PlanError, InputError), match=message):
        plan_tables(
            tables, EIGHT, stats=stats, groups=4, layout="contiguous", constraints=constraints
        )


def test_auto_leaves_out_what_pins_forbid() -> None:
    tables, stats = blanks([(200_000, 16, 4.0)] * 2)
    pinned = Constraints(pin={"t0": Pin(ranks=(5,))})
    plan = plan_tables(tables, EIGHT, stats=stats, groups="auto", constraints=pinned)
    assert plan.mesh.group == 8
    assert plan.groups_choice is not None
    notes = [one.note for one in plan.groups_choice.candidates]
    assert notes[0] == ""
    assert all(note.startswith("no plan: table 't0' is pinned") for note in notes[1:])


@pytest.mark.parametrize("group", [0, "2", 1.5, True])
def test_a_pinned_group_is_a_number_of_ranks(group: Any) -> None:
    with pytest.raises(InputError, match=r"group is .*, but must be a"):
        Pin(group=group)
    with pytest.raises(InputError, match=r"constraints.pin.a.*group"):
        rm.planners.parse_constraints({"pin": {"a": {"group": group}}})


@pytest.fixture(scope="module")
def counted() -> tuple[list[TablePlan], Stats]:
    """Two tables whose ids are Zipf, counted over 32 batches."""
    rng, rows = np.random.default_rng(0), 20_000
    weights = np.arange(1, rows + 1) ** -1.05
    configs = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=32, feature_names=[f"f_{n}"])
        for n in ("a", "b")
    ]
    batches = [
        KeyedJaggedTensor.from_dense(
            {
                f"f_{n}": torch.from_numpy(rng.choice(rows, 512, p=weights / weights.sum()))
                for n in ("a", "b")
            }
        )
        for _ in range(32)
    ]
    return [blank_table(config) for config in configs], Stats.from_batches(configs, batches)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("tiers", ["hot:100", "auto"])
def test_hot_rows_are_chosen_in_every_group(
    tiers: str, layout: str, counted: tuple[list[TablePlan], Stats]
) -> None:
    """Of the world always; per host only in contiguous groups of several whole hosts."""
    tables, stats = counted
    topology = Topology(hosts=4, local=2)
    for size in (8, 4, 2, 1):
        plan = plan_tables(
            tables,
            topology,
            stats=stats,
            rates=FAST,
            tiers=tiers,
            groups=size,
            layout=layout,
            dense=(4000,),
        )
        assert plan.mesh.group == size
        assert plan.hot is not None
        copies = {tier.copies for t in plan.tables for tier, _ in t.hot}
        if size <= 2 or (layout == "strided" and size == 4):
            assert Copies.HOST not in copies
        if tiers == "hot:100":
            assert sum(rows.count for t in plan.tables for _, rows in t.hot) == 100
        assert all(t.why is not None for t in plan.tables)
        # What the search adds up from counts is what the plan's own tiers give.
        whole = plan_time(plan, stats.tables, rates=FAST, cost=rm.planners.tiers.NO_DENSE)
        assert plan.hot.step_s == pytest.approx(whole.total_s, rel=0.05)
        again = choose_tiers(plan, stats, tiers=tiers, rates=FAST)
        assert again.mesh == plan.mesh


def test_copies_per_host_need_groups_of_several_whole_hosts() -> None:
    tables, stats = blanks([(200_000, 16, 4.0)])
    for hosts, local, size, layout, expected in (
        (4, 2, 8, "contiguous", True),
        (4, 2, 4, "contiguous", True),
        (4, 2, 4, "strided", False),
        (4, 2, 2, "contiguous", False),
        (4, 1, 2, "contiguous", False),
        (1, 4, 4, "contiguous", False),
    ):
        topology = Topology(hosts=hosts, local=local)
        plan = plan_tables(tables, topology, stats=stats, groups=size, layout=layout)
        assert has_peers(plan, plan.tables[0]) is expected


def test_many_tables_are_tried_in_fewer_groups() -> None:
    tables, stats = blanks([(2000 + i, 16, 1.0) for i in range(130)])
    topology, shares = Topology(hosts=4, local=4), list[float]()
    plan = plan_tables(
        tables, topology, stats=stats, groups="auto", on_progress=shares.append, rates=FAST
    )
    assert plan.groups_choice is not None
    tried = [one.size for one in plan.groups_choice.candidates]
    assert {16, 4, 1} <= set(tried)
    assert len(tried) <= 5
    assert len(meshes_of(topology)) > 5
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_why_this_n_is_printed_and_kept_in_the_file() -> None:
    tables, stats = blanks([(900_000_000, 64, 8.0), (300, 64, 1.0)])
    topology = replace(EIGHT, memory_bytes=80 << 30)
    sync = Sync(mode="weights", period=16)
    plan = plan_tables(
        tables, topology, stats=stats, groups="auto", rates=FAST, sync=sync, dense=(100,)
    )
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    first = next(i for i, line in enumerate(lines) if line.startswith("why this N"))
    rows = lines[first + 3 : first + 9]
    assert [int(row[1:].split()[0]) for row in rows] == [8, 4, 4, 2, 2, 1]
    assert [row[0] for row in rows].count("*") == 1
    assert "does not fit: needs 217.9296 GiB on a rank" in rows[-1]
    again = plan_from_json(plan_to_json(plan))
    assert again.groups_choice == plan.groups_choice
    assert replace(again, groups_choice=None) == plan
    without = plan_to_json(plan).replace('"groups_choice"', '"groups_choices"')
    with pytest.raises(PlanError, match="did you mean 'groups_choice'"):
        plan_from_json(without)
    two = plan_tables(tables, EIGHT, stats=stats, groups=4, layout="strided", sync=sync)
    assert "2 strided groups, replicas sync weights every 16 steps, sparse" in str(two)
    assert str(two).splitlines()[4].endswith("group")


@pytest.mark.parametrize(
    ("text", "sync"),
    [
        ("gradients", Sync()),
        ("gradients:1", Sync()),
        ("weights", Sync(mode="weights")),
        ("weights:4", Sync(mode="weights", period=4)),
        ("weights:4:dense", Sync(mode="weights", period=4, form="dense")),
        ("weights:4:sparse", Sync(mode="weights", period=4)),
        ("moments-first:4", Sync(mode="moments-first", period=4)),
    ],
)
def test_sync_as_text(text: str, sync: Sync) -> None:
    assert parse_sync(text) == sync


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight:4", "unknown sync 'weight': did you mean 'weights'"),
        ("weights:4:dens", "unknown form of a sync 'dens': did you mean 'dense'"),
        ("weights:0", "sync 'weights:0': say mode, mode:period"),
        ("weights:x", "sync 'weights:x': say mode, mode:period"),
        ("weights:1:2:3", "sync 'weights:1:2:3': say mode, mode:period"),
        ("gradients:2", "gradients are synced every step"),
        ("gradients:1:dense", "gradients are synced every step"),
        ("", "unknown sync ''"),
    ],
)
def test_sync_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_sync(text)


def test_words_of_groups() -> None:
    assert [parse_groups(g) for g in ("off", "auto", "4", 4)] == ["off", "auto", 4, 4]
    assert parse_layout("strided") == ("strided",)
    for wrong in ("some", "-1", True, "1.5", "0", 0, -2):
        with pytest.raises(InputError, match="say off, auto, or the number of ranks"):
            parse_groups(wrong)
    with pytest.raises(InputError, match="unknown layout 'stride': did you mean 'strided'"):
        parse_layout("stride")
    for field, value in (("groups", "some"), ("layout", "x"), ("sync", "weights:0")):
        with pytest.raises(InputError):
            PlanConfig(**{field: value})


def test_groups_are_checked_before_ranks_start_where_they_are_known() -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    model = rm.EmbeddingBagCollection(tables=[config], device="meta")
    settings = PlanConfig(groups=3, batches=0)
    check_plan(settings, model, Topology())  # under torchrun the number is not known yet
    with pytest.raises(PlanError, match="shard groups of 3 ranks do not divide 4"):
        check_plan(settings, model, Topology(local=4))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", "--hosts", "2", "--ranks-per-host", "2", *arguments])


def test_the_command_line_plans_groups() -> None:
    tables = ("--tables", "3", "--cap", "5000", "--dim", "8")
    found = run(*tables, "--groups", "auto", "--sync", "weights:4")
    assert found.exit_code == 0
    assert "why this N" in found.output
    found = run(*tables, "--groups", "2", "--layout", "strided", "--json")
    plan = plan_from_json(found.output)
    assert (plan.mesh.group, plan.mesh.layout, plan.sync) == (2, "strided", Sync())
    overrides = ("--set", "plan.groups=2", "--set", "plan.sync=weights:3:dense")
    found = run("demo", *overrides, "--layout", "contiguous", "--json")
    plan = plan_from_json(found.output)
    assert (plan.mesh.group, plan.sync) == (2, Sync(mode="weights", period=3, form="dense"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--groups", "3"), "shard groups of 3 ranks do not divide 4 ranks"),
        (("--groups", "many"), "say off, auto, or the number of ranks in a shard group"),
        (("--layout", "strides"), "unknown layout 'strides': did you mean 'strided'?"),
        (("--sync", "weights:-1"), "with a period from 1"),
    ],
)
def test_wrong_words_end_with_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    found = run("--tables", "2", *arguments)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
