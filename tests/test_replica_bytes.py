"""Bytes of shard groups: small plans by hand, and every plan against sets of rows in Python."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.cost import predict
from rowmesh.errors import InputError
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
from rowmesh.tables import PoolingType

LAW = settings(derandomize=True, deadline=None, max_examples=60)
ROW_WISE = Split(kind="boxes", rows="all")
WEIGHTS = Sync(mode="weights", period=2)
MOMENTS = Sync(mode="moments-first", period=2)


def table(name: str = "t", *, rows: int = 8, dim: int = 2, **more: Any) -> TablePlan:
    fields: dict[str, Any] = {
        "collection": "",
        "data_type": "fp32",
        "pooling": PoolingType.SUM,
        "feature_names": ("f",),
        "virtual_shards": 8,
        "tiers": (Tier(ranks=(0,)),),
    }
    return TablePlan(name=name, num_embeddings=rows, embedding_dim=dim, **fields | more)


def plan_of(
    *tables: TablePlan, size: int, layout: str = "contiguous", sync: Sync | None = None, **more: Any
) -> Plan:
    mesh = MeshShape(hosts=2, local=2, group=size, layout=layout)  # type: ignore[arg-type]
    fields = {"mesh": mesh, "tree": "host-first", "sync": sync or Sync()} | more
    return Plan(tables=tables, **fields).validate()


def batches(*ids: list[int]) -> list[KeyedJaggedTensor]:
    """A bag of each rank."""
    return [
        KeyedJaggedTensor(["f"], torch.tensor(i, dtype=torch.int64), lengths=torch.tensor([len(i)]))
        for i in ids
    ]


def sent(found: list[dict[str, dict[str, int]]], edge: str) -> list[tuple[int, int]]:
    """Bytes of an edge inside the host and across, of every rank."""
    links = [ledger.get(edge, {}) for ledger in found]
    return [(link.get("host", 0), link.get("cross", 0)) for link in links]


NOTHING = batches([], [], [], [])


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_two_groups_of_two_ranks_by_hand(layout: str) -> None:
    """Even rows at place 0. Group 0 touches 0, 1, 2, 3, group 1 touches 0 and 5."""
    places = (0, 1) if layout == "contiguous" else (0, 2)
    plan = plan_of(table(tiers=(Tier(ranks=places, split=ROW_WISE),)), size=2, layout=layout)
    ids = {(0, 0): [0, 1, 2], (0, 1): [2, 3], (1, 0): [5], (1, 1): [0, 5]}
    groups = plan.groups(plan.tables[0])
    found = predict(plan, batches(*(ids[groups.group(r), groups.place(r)] for r in range(4))))
    first = [groups.group(r) == 0 for r in range(4)]

    def near(amount: int) -> tuple[int, int]:
        return (amount, 0) if layout == "contiguous" else (0, amount)

    assert sent(found, "ids") == [near(4)] * 4  # each asks the other place for one row
    assert sent(found, "rows") == sent(found, "backward") == [near(8)] * 4
    # Of four slots: a word that says which, and gradients of two rows, or of one.
    assert sent(found, "replica sync") == [near(20 if f else 12)[::-1] for f in first]
    counts = [(40, 80)] * 4  # 8 (1 + 4 stacks) to everyone, and 8 to the replica
    more = near(8)[::-1]
    assert sent(found, "counts") == [(a + more[0], b + more[1]) for a, b in counts]
    assert sent(found, "status") == [(8, 16)] * 4


FOUR = batches([0, 1, 2], [1, 4], [4], [])


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize(
    ("sync", "row", "extra", "first"),
    [
        (Sync(), 8, 0, "rowwise_adagrad"),
        (WEIGHTS, 12, 0, "momentum_scaled_rowwise_adagrad"),
        (WEIGHTS, 8, 0, "sgd"),
        (WEIGHTS, 16, 0, "adagrad"),
        (WEIGHTS, 8 + 4 + 16, 0, "adam"),
        (MOMENTS, 8, 4, "rowwise_adagrad"),
        (MOMENTS, 8, 0, "adam"),
    ],
)
def test_four_replicas_by_hand(layout: str, sync: Sync, row: int, extra: int, first: str) -> None:
    """Row r goes to rank r mod 4. Rank 0 adds up rows 0 and 4, which are all it adds up."""
    plan = plan_of(table(), size=1, layout=layout, sync=sync)
    earlier = [NOTHING] * (sync.period - 1)
    found = predict(plan, FOUR, sparse=first, earlier=earlier)
    one, both = 4 + row, 2 * row  # a word that says which, unless all
    expected = [(one + both, one + 2 * both), (2 * one, 2 * one), (one, 3 * one), (0, 0)]
    counts = 40 + 16
    if extra:
        small, two = 4 + extra, 2 * extra
        more = [(small + two, small + 2 * two), (2 * small, 2 * small), (small, 3 * small), (0, 0)]
        expected = [(a + c, b + d) for (a, b), (c, d) in zip(expected, more, strict=True)]
        counts += 16
    assert sent(found, "replica sync") == expected
    assert sent(found, "counts") == [(counts, 2 * counts)] * 4
    assert "ids" not in found[0]  # every rank is a group


@pytest.mark.parametrize(
    ("sync", "rule", "edge"),
    [(WEIGHTS, "rowwise_adagrad", 0), (MOMENTS, "sgd", 0), (MOMENTS, "rowwise_adagrad", 1)],
)
def test_weights_wait_for_the_period(sync: Sync, rule: str, edge: int) -> None:
    """Between syncs only squares travel, if they are added up first and the rule adds any."""
    found = predict(plan_of(table(), size=1, sync=sync), FOUR, sparse=rule)
    assert ("replica sync" in found[0]) == bool(edge)
    assert sent(found, "counts") == [(40 + 16 * edge, 2 * (40 + 16 * edge))] * 4


def test_rows_of_all_steps_since_the_last_sync_are_told() -> None:
    plan = plan_of(table(), size=1, sync=replace(WEIGHTS, period=3))
    parts = batches([0], [1], [4], []), batches([1, 2], [4, 1], [], [])
    whole = predict(plan, FOUR, earlier=[NOTHING, NOTHING])
    found = predict(plan, NOTHING, earlier=parts)
    assert sent(found, "replica sync") == sent(whole, "replica sync")


@pytest.mark.parametrize("rows", [8, 7, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_dense_sync_by_hand(rows: int, size: int) -> None:
    """Chunks of ceil(K / M): one to each replica, and the means of the own one back."""
    ranks = (0,)
    sync = Sync(mode="weights", form="dense")
    plan = plan_of(table(rows=rows, tiers=(Tier(ranks=ranks),)), size=size, sync=sync)
    found = predict(plan, FOUR)
    count = 4 // size
    chunk = -(-rows // count)
    chunks = [max(0, min(chunk, rows - i * chunk)) for i in range(count)]
    total = [0] * 4
    for i in range(count):
        for j in range(count):
            total[i * size] += 12 * (chunks[i] + chunks[j]) * (i != j)
    assert [a + b for a, b in sent(found, "replica sync")] == total
    assert sent(found, "counts") == [(40, 80)] * 4  # nobody is told how many


def test_homes_of_hot_rows_are_left_out_and_their_sums_spread_over_groups() -> None:
    """Rows 1, 2, 4, 6 are hot: rank 0 adds up 1 and 4, rank 2 adds up 2 and 6 (N = 2)."""
    hot = Tier(
        ranks=(0, 1, 2, 3), copies=Copies.WORLD, rows=make_hot_set("t", np.array([1, 2, 4, 6]))
    )
    dense = Sync(mode="weights", form="dense")
    step = batches([1, 3], [2], [6, 4], [3, 1])
    plan = plan_of(table(tiers=(hot, Tier(ranks=(0,)))), size=2)
    found = predict(plan, step)
    # One of two rows, of row 1: a word and a gradient from ranks 0 (at home) and 3 to rank 0; ...
    assert sent(found, "ids") == [(0, 0), (0, 4 + 0), (0, 4), (4, 4)]
    # ... rank 0 tells all of 1 and 4, rank 2 of 2 and 6: all of theirs, so which is not said.
    told = {0: (16, 32), 2: (16, 32)}
    parts = {1: (0, 8), 2: (0, 8), 3: (0, 8)}
    expected = [
        tuple(told.get(r, (0, 0))[i] + parts.get(r, (0, 0))[i] for i in range(2)) for r in range(4)
    ]
    assert sent(found, "hot gradients") == expected
    assert sent(found, "replica sync") == [(0, 12), (0, 0), (0, 12), (0, 0)]  # row 3 alone
    found = predict(replace(plan, sync=dense), step)
    assert sent(found, "replica sync") == [(0, 12 * 4), (0, 0), (0, 12 * 4), (0, 0)]


def test_sums_of_all_hot_rows_travel_as_before() -> None:
    """Riders of the dense layers know no groups."""
    rows = make_hot_set("t", np.array([1, 2, 4]))
    for sums in ("dense", "bucket"):
        hot = Tier(ranks=(0, 1, 2, 3), copies=Copies.WORLD, rows=rows, sums=sums)  # type: ignore[arg-type]
        one = plan_of(table(tiers=(hot, Tier(ranks=(0,)))), size=4, dense=(5,))
        two = replace(one, mesh=replace(one.mesh, group=2)).validate()
        for edge in ("hot gradients", "dense"):
            assert sent(predict(one, FOUR), edge) == sent(predict(two, FOUR), edge)


def test_copies_per_host_stay_in_the_group() -> None:
    """A host is a group: its holders have no peers, and sync their copies with the other's."""
    tier = Tier(
        ranks=(0, 1, 2, 3),
        copies=Copies.HOST,
        split=Split(kind="boxes", rows="host"),
        rows=make_hot_set("t", np.array([2, 5])),
    )
    plan = plan_of(table(tiers=(tier, Tier(ranks=(0,)))), size=2)
    found = predict(plan, batches([2], [5, 2], [2, 0], [0]))
    assert sent(found, "ids") == [(0, 0), (4, 0), (0, 0), (4, 0)]  # row 2 is with local rank 0
    assert sent(found, "hot gradients") == [(0, 0)] * 4
    # Rank 0 has 8 + 1 slots; it has touched its copy, rank 2 its copy and row 0.
    assert sent(found, "replica sync") == [(0, 12), (0, 8), (0, 4 + 16), (0, 0)]
    dense = replace(plan, sync=Sync(mode="weights", form="dense"))
    # Of 7 of 9 slots chunks of 4 and 3; of the copy at rank 1 chunks of 1 and 0.
    found = predict(dense, FOUR)
    assert sent(found, "replica sync") == [(0, 84), (0, 12), (0, 84), (0, 12)]


def test_columns_of_groups_tell_squares_of_the_rows_they_step() -> None:
    """Gradients: of rows that any group touched; else of the group's own."""
    split = Split(kind="boxes", columns=2, rows="none")
    plan = plan_of(table(tiers=(Tier(ranks=(0, 1), split=split),)), size=2)
    step = batches([0, 1], [2], [5], [])
    assert sent(predict(plan, step), "column squares") == [(16, 0)] * 4
    apart = replace(plan, sync=Sync(mode="weights"))
    assert sent(predict(apart, step), "column squares") == [(12, 0), (12, 0), (4, 0), (4, 0)]
    assert sent(predict(apart, step, sparse="sgd"), "column squares") == [(0, 0)] * 4
    # Both pieces hold all eight rows, four bytes of each: two sets in two stacks' messages.
    assert sent(predict(plan, step), "replica sync") == [(0, 4 + 12)] * 2 + [(0, 4 + 4)] * 2


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_a_relay_is_of_the_askers_group(layout: str) -> None:
    """2 hosts x 4 ranks in two groups: strided ones have two ranks on each host."""
    mesh = MeshShape(hosts=2, local=4, group=4, layout=layout)  # type: ignore[arg-type]
    ranks = (0, 1) if layout == "contiguous" else (0, 2)
    one = table(
        tiers=(Tier(ranks=ranks, split=Split(kind="boxes", rows="host")),),
        exchange=Exchange.POOLED,
    )
    plan = Plan(mesh=mesh, tables=(one,)).validate()
    found = predict(plan, batches(*([[]] * 7), [0, 1]))  # rank 7 is the last of group 1
    asked = [sum(map(sum, [pair])) for pair in sent(found, "pooled")]
    # Contiguous: its group is on one host, so it relays for itself. Strided: rank 3 does.
    assert asked == ([0] * 8 if layout == "contiguous" else [0, 0, 0, 8, 0, 0, 0, 0])
    rows = [8, 8] if layout == "contiguous" else [8]
    assert [a for a, _ in sent(found, "rows") if a] == rows
    hosts = 1 if layout == "contiguous" else 2
    beside = {r for r in range(8) if hosts == 1 or r < 4}
    peers = 3 if hosts == 1 else 1
    for rank, (near, far) in enumerate(sent(found, "counts")):
        more = 8 * hosts * peers * (rank in beside)
        replica = (0, 8) if layout == "contiguous" else (8, 0)
        assert (near, far) == (40 * 3 + more + replica[0], 40 * 4 + replica[1])


def test_tables_of_different_groups_share_no_stack() -> None:
    small, large = table("small", group=1), table("large")
    plan = plan_of(small, large, size=2)
    found = predict(plan, FOUR)
    # Two stacks, a sync with one replica and two rounds of one with three.
    assert sent(found, "counts") == [(72 + 16, 144 + 32 + 8)] * 4
    alone = [plan_of(small, size=2), plan_of(large, size=2)]
    both = [sent(predict(p, FOUR), "replica sync") for p in alone]
    total = [tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(*both, strict=True)]
    assert sent(found, "replica sync") == total


def test_frozen_and_copied_tables_are_not_synced() -> None:
    everywhere = table("all", tiers=(Tier(ranks=(0, 1, 2, 3), copies=Copies.WORLD),))
    plan = plan_of(table(trainable=False), everywhere, size=1)
    found = predict(plan, FOUR)
    assert all("replica sync" not in ledger for ledger in found)
    assert sent(found, "counts") == [(72 + 8, 144 + 16)] * 4


def test_what_predict_refuses() -> None:
    plan = plan_of(table(), size=1, sync=WEIGHTS)
    with pytest.raises(InputError, match="2 earlier steps were given, but replicas sync every 2"):
        predict(plan, FOUR, earlier=[NOTHING] * 2)
    with pytest.raises(InputError, match="the plan has 4 ranks, but 3 batches were given"):
        predict(plan, FOUR, earlier=[NOTHING[:3]])
    with pytest.raises(InputError, match="unknown update rule 'adagrd': did you mean 'adagrad'"):
        predict(plan, FOUR, sparse="adagrd")
    one = plan_of(table(), size=4, sync=WEIGHTS)  # nothing to sync, so nothing is overdue
    assert predict(one, FOUR, earlier=[FOUR] * 3) == predict(one, FOUR)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Plan, list[list[KeyedJaggedTensor]], str]:
    """Two tables of one stack on 4 or 8 ranks, hot rows or none; steps up to a sync."""
    hosts, local = draw(st.sampled_from([(1, 4), (2, 2), (2, 4), (4, 1), (4, 2)]))
    world = hosts * local
    sizes = [n for n in (1, 2, 4) if n < world and (n % local == 0 or local % n == 0)]
    size = draw(st.sampled_from(sizes))
    layout = draw(st.sampled_from(["contiguous", "strided"]))
    mesh = MeshShape(hosts=hosts, local=local, group=size, layout=layout)
    groups = Plan(mesh=mesh, tables=()).groups(table())
    tables = []
    for name in ("a", "b"):
        rows = draw(st.integers(1, 70))
        owners = draw(st.integers(1, size))
        ranks = tuple(draw(st.permutations(groups.members(0)))[:owners])
        ids = np.unique(draw(st.lists(st.integers(0, rows - 1), max_size=8)))
        hot = [make_hot_set(name, ids)] if len(ids) and draw(st.booleans()) else []
        tiers = [Tier(ranks=tuple(range(world)), copies=Copies.WORLD, rows=h) for h in hot]
        if hot and layout == "contiguous" and size % local == 0 and draw(st.booleans()):
            split = Split(kind="boxes", rows="host")
            tiers = [replace(t, copies=Copies.HOST, split=split) for t in tiers]
        rest = Tier(ranks=ranks, split=ROW_WISE)
        tables.append(table(name, rows=rows, tiers=(*tiers, rest), feature_names=(name,)))
    sync = draw(st.sampled_from([Sync(), WEIGHTS, MOMENTS, replace(WEIGHTS, form="dense")]))
    plan = Plan(mesh=mesh, tables=tuple(tables), tree="host-first", sync=sync).validate()

    def batch() -> KeyedJaggedTensor:
        ids = [draw(st.lists(st.integers(0, t.num_embeddings - 1), max_size=12)) for t in tables]
        flat = torch.tensor([i for values in ids for i in values], dtype=torch.int64)
        return KeyedJaggedTensor(["a", "b"], flat, lengths=torch.tensor([len(i) for i in ids]))

    steps = [[batch() for _ in range(world)] for _ in range(sync.period)]
    return plan, steps, draw(st.sampled_from(sorted(RULE_STATES)))


Row = tuple[str, int, bool]  # table, row, whether it is a copy per host


def slots_of(plan: Plan, place: int) -> list[Row]:
    """What lies in the slots of a place, one after the other."""
    groups, local = plan.groups(plan.tables[0]), plan.mesh.local
    found: list[Row] = []
    copies: list[tuple[int, Row]] = []
    for one in plan.tables:
        homes = one.homes()
        for owner, rank in enumerate(one.rest.ranks):
            if groups.place(rank) == place:
                found += [(one.name, row, False) for row in homes.rows(owner).tolist()]
        for tier, rows in one.hot:
            assert rows.ids is not None
            for i, row in enumerate(rows.ids.tolist()):
                if tier.copies is Copies.HOST and i % local == place % local:
                    home = groups.place(one.rest.ranks[int(homes.owners(np.array([row]))[0])])
                    copies.append((home, (one.name, row, True)))
    return found + [row for _, row in sorted(copies, key=lambda copy: copy[0])]


def words(count: int, size: int) -> int:
    return 0 if count == size else min(count, -(-size // 32))


@LAW
@given(worlds())
def test_bytes_between_replicas_equal_sets_of_rows(
    case: tuple[Plan, list[list[KeyedJaggedTensor]], str],
) -> None:
    plan, steps, rule = case
    groups, sync, state = plan.groups(plan.tables[0]), plan.sync, RULE_STATES[rule]
    hot = {(t.name, int(i)): tier.copies for t in plan.tables for tier, h in t.hot for i in h.ids}
    total: Counter[int] = Counter()

    def touched(group: int, chosen: list[list[KeyedJaggedTensor]]) -> set[Row]:
        asked = {
            (t.name, int(i), (t.name, int(i)) in hot)
            for step in chosen
            for rank in groups.members(group)
            for t in plan.tables
            for i in step[rank][t.name].values()
        }
        return {r for r in asked if hot.get(r[:2]) is not Copies.WORLD}

    def exchange(chosen: list[list[KeyedJaggedTensor]], row: int) -> None:
        for place in range(groups.size):
            slots, count = slots_of(plan, place), groups.count
            mine = [touched(m, chosen) & set(slots) for m in range(count)]
            for i in range(count):
                for a in range(count) if count > 2 else (i,):
                    part = set(slots[a::count] if count > 2 else slots)
                    n, union = len(mine[i] & part), len(set.union(*mine) & part)
                    if count == 2 or a != i:
                        total[groups.rank(i, place)] += 4 * words(n, len(part)) + n * row
                    else:
                        told = 4 * words(union, len(part)) + union * row
                        total[groups.rank(i, place)] += told * (count - 1)

    if sync.mode == "gradients":
        exchange(steps[-1:], 8)
    if sync.mode == "moments-first" and state.adds_squares:
        exchange(steps[-1:], 4)
    row = 8 if sync.mode == "moments-first" else 8 + state.row_bytes + 2 * state.element_bytes
    if sync.mode != "gradients" and sync.form == "sparse":
        exchange(steps, row)
    for place in range(groups.size) if sync.form == "dense" else ():
        kept = [r for r in slots_of(plan, place) if r[2] or r[:2] not in hot]
        chunk = -(-len(kept) // groups.count)
        for i, rank in enumerate(groups.replicas(groups.rank(0, place))):
            own = len(kept[i * chunk : (i + 1) * chunk])
            total[rank] += row * (len(kept) - own + own * (groups.count - 1))
    found = predict(plan, steps[-1], sparse=rule, earlier=steps[:-1])
    assert [a + b for a, b in sent(found, "replica sync")] == [
        total[rank] for rank in range(len(found))
    ]
