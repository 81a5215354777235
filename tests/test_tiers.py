"""Copies per host and three tiers: the planner, the bytes, and rows that move between steps."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import PlanError, StepError
from rowmesh.placement import Copies, Split, TablePlan, Tier, make_hot_set
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.planners import RowTiers, choose_tiers
from rowmesh.planners.per_host import EVERYWHERE, OWNER, PER_HOST
from rowmesh.runtime.export import full_sparse_state
from rowmesh.runtime.retier import change_tiers
from rowmesh.train.config import TrainingConfig
from rowmesh.train.model import build_model
from rowmesh.train.planning import PlanConfig, check_plan
from rowmesh.train.trainer import Trainer
from tests.cases import DENSE, RULES, Case, Collection, Model, Table
from tests.ranks import run_on_ranks
from tests.test_hot import (
    RATES,
    STATE,
    check_expected,
    heat_of,
    plan,
    stats_of,
    table,
    zipf_batches,
)
from tests.test_trainer import tiny_run

EVERYONE = (0, 1, 2, 3)


def three_tiers(t: TablePlan, everywhere: Any, per_host: Any) -> TablePlan:
    tiers = [
        Tier(
            ranks=EVERYONE, copies=Copies.WORLD, rows=make_hot_set(t.name, np.asarray(everywhere))
        ),
        Tier(
            ranks=EVERYONE,
            copies=Copies.HOST,
            rows=make_hot_set(t.name, np.asarray(per_host)),
            split=Split(kind="boxes", rows="host"),
        ),
    ]
    return replace(t, tiers=(*tiers, *t.tiers))


@pytest.mark.parametrize("dedup", [True, False])
def test_expected_bytes_of_three_tiers_are_near_the_mean_of_batches(dedup: bool) -> None:
    """Invariant 4: within 10 % on the mean of 20 batches that the statistics have not seen."""
    rows = {"a": 3000, "b": 500}
    bare = tuple(table(name, rows=n, dedup=dedup) for name, n in rows.items())
    stats = stats_of(bare, zipf_batches(rows, count=40, requests=400, seed=1))
    heats = {t.name: heat_of(stats, t.name) for t in bare}
    tables = [three_tiers(t, heats[t.name][:40], heats[t.name][40:200]) for t in bare]
    planned = plan(*tables, dense=(100,)).validate()
    check_expected(planned, stats, zipf_batches(rows, count=80, requests=400, seed=2))


def test_memory_of_copies_per_host_is_shared_by_its_ranks() -> None:
    bare = table(rows=100)
    row = 8 * 4 + 4
    split = three_tiers(bare, [1], range(10, 31))  # 21 rows: 11 with local rank 0, 10 with 1
    held = np.subtract(bytes_per_rank(plan(split)), bytes_per_rank(plan(bare))).tolist()
    assert held == [12 * row, 11 * row, 12 * row, 11 * row]
    whole = replace(split.tiers[1], ranks=(1, 3), split=Split())
    moved = replace(split, tiers=(split.tiers[0], whole, split.tiers[2]))
    held = np.subtract(bytes_per_rank(plan(moved)), bytes_per_rank(plan(bare))).tolist()
    assert held == [row, 22 * row, row, 22 * row]


@pytest.mark.parametrize("sums", ["sparse", "bucket"])
@pytest.mark.parametrize("dedup", [True, False])
def test_no_other_tiers_take_less_time_in_as_much_memory(dedup: bool, sums: Any) -> None:
    """Against all 3^n choices of tiers."""
    rows = {"a": 5, "b": 2}
    tables = tuple(table(name, rows=n, dedup=dedup) for name, n in rows.items())
    stats = stats_of(tables, zipf_batches(rows, count=12, requests=2))
    cut = RowTiers(plan(*tables), stats, rates=RATES, state=STATE, sums=sums)
    parts = [(r.seconds, r.held) for r in cut.rows]
    seconds, held = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    every = list(itertools.product((OWNER, PER_HOST, EVERYWHERE), repeat=seconds.shape[1]))
    columns = np.arange(seconds.shape[1])
    all_s = np.array([seconds[list(c), columns].sum() for c in every])
    all_bytes = np.array([held[list(c), columns].sum() for c in every])
    for budget in (0.0, 40.0, 100.0, 170.0, 1e9):
        price = cut.price_within(budget)
        mine_s, mine_bytes = cut.seconds_at(price), cut.bytes_at(price)
        assert mine_bytes <= budget
        assert mine_s <= all_s[all_bytes <= mine_bytes + 1e-9].min() * (1 + 1e-9)
    assert cut.bytes_at(cut.dearest) == 0.0


def test_a_budget_is_kept_and_used() -> None:
    rows = {"a": 2000}
    tables = (table("a", rows=2000, dedup=False),)
    stats = stats_of(tables, zipf_batches(rows, count=20, requests=2000))
    base = plan(*tables)
    limit = int(1.25 * max(bytes_per_rank(base)))
    cut = RowTiers(base, stats, rates=RATES, state=STATE)
    tiers = cut.at(cut.price_within(limit - max(bytes_per_rank(base)))).validate()
    held = max(bytes_per_rank(tiers))
    assert 0.9 * (limit - max(bytes_per_rank(base))) < held - max(bytes_per_rank(base))
    assert held <= limit
    chosen = choose_tiers(base, stats, rates=RATES, limit=limit)
    assert max(bytes_per_rank(chosen)) <= limit
    assert chosen.hot is not None
    assert chosen.hot.step_s < chosen.hot.step_s_cold


def retier(mesh: Mesh, case: Case) -> Any:
    model = rm.shard(Model(case), case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE[case.dense], sparse=RULES[case.rule])
    batch = case.batches_of(mesh.rank)[0]
    mesh.mean(model(batch)).backward()
    complaints = []
    try:
        change_tiers(model, case.plan_at(1), optimizer=optimizer)
    except StepError as error:
        complaints.append(str(error))
    optimizer.clip_grad_norm_(100.0)
    try:
        change_tiers(model, case.plan_at(1), optimizer=optimizer)
    except StepError as error:
        complaints.append(str(error))
    optimizer.step()
    stored = optimizer.state_dict()
    tables = tuple(replace(t, dedup=not t.dedup) for t in case.plan().tables)
    other = replace(case.plan(), tables=tables)
    try:
        change_tiers(model, other, optimizer=optimizer)
    except PlanError as error:
        complaints.append(str(error))
    before = rm.full_state_dict(model), full_sparse_state(model)
    mesh.ledger.reset()
    change_tiers(model, case.plan_at(1), optimizer=optimizer)
    moved = mesh.ledger.by_edge()
    try:
        optimizer.load_state_dict(stored)
    except rm.InputError as error:
        complaints.append(str(error))
    return before, (rm.full_state_dict(model), full_sparse_state(model)), moved, complaints


def test_rows_move_between_steps_and_no_bit_changes() -> None:
    ids = [[[[[i, (7 * i + r) % 20] for i in range(8)]] for r in range(4)]]
    first = Table(rows=20, dim=4, ranks=EVERYONE, hot=(1, 2, 3), per_host=(4, 5, 6, 7))
    later = replace(first, hot=(2, 9, 13), per_host=(1, 5, 11, 0))  # as many as before
    case = Case(
        world=4,
        hosts=2,
        tree="host-first",
        ids=ids,
        collections=(Collection(tables=(first,)),),
        later=(Collection(tables=(later,)),),
    )
    found = run_on_ranks(4, retier, case, hosts=2)
    (weights, states), (weights_after, states_after), _, complaints = found[0]
    assert all(torch.equal(w, weights_after[name]) for name, w in weights.items())
    for name, state in states.items():
        assert all(torch.equal(v, states_after[name][key]) for key, v in state.items())
    assert "between steps" in complaints[0]
    assert "between steps" in complaints[1]
    assert "in more than hot rows" in complaints[2]
    assert "of other hot rows" in complaints[3]
    assert {edge for _, _, moved, _ in found for edge in moved} == {"tier move"}


def run_with_refresh(mesh: Mesh, refresh: int | None) -> Any:
    settings = PlanConfig(split="row_wise", exchange="rows", tiers="hot:8", refresh=refresh)
    trainer = Trainer(tiny_run(plan=settings, training=TrainingConfig(steps=6)), mesh)
    first = trainer.plan
    trainer.run()
    return rm.full_state_dict(trainer.model), first == trainer.plan


def test_a_run_whose_tiers_follow_the_data_learns_the_same_bits() -> None:
    (fixed, is_same), _ = run_on_ranks(2, run_with_refresh, None)
    (followed, is_same_too), _ = run_on_ranks(2, run_with_refresh, 2)
    assert is_same
    assert not is_same_too
    assert all(torch.equal(value, followed[name]) for name, value in fixed.items())


def test_fewer_hot_rows_are_chosen_where_fewer_are_asked_for() -> None:
    tables = (table("a", rows=50),)
    stats = stats_of(tables, zipf_batches({"a": 50}, count=4, requests=5))
    chosen = choose_tiers(plan(*tables), stats, tiers="hot:50", rates=RATES)
    assert chosen.hot is not None
    assert 0 < chosen.hot.rows == len(heat_of(stats, "a")) < 50


def test_rows_get_no_copies_per_host_under_flat_sums() -> None:
    """Where they would under host-first ones: slow links between hosts, none inside."""
    tables = (table("a", rows=2000, dedup=False),)
    stats = stats_of(tables, zipf_batches({"a": 2000}, count=16, requests=2000))
    rates = replace(RATES, host_bytes_per_s=1e15)
    limit = max(bytes_per_rank(plan(*tables))) + 20_000
    for tree, has_copies in (("host-first", True), ("flat", False)):
        base = replace(plan(*tables), tree=tree)
        chosen = choose_tiers(base, stats, rates=rates, limit=limit)
        copies = {tier.copies for t in chosen.tables for tier, _ in t.hot}
        assert (Copies.HOST in copies) == has_copies


def test_a_refresh_changes_nothing_but_hot_rows() -> None:
    tables = (table("a", rows=30),)
    stats = stats_of(tables, zipf_batches({"a": 30}, count=16, requests=200))
    base = plan(*tables)
    chosen = choose_tiers(base, stats, rates=RATES)
    assert [t.tiers[-1] for t in chosen.tables] == [t.tiers[-1] for t in base.tables]


def test_refresh_is_taken_from_the_command_line() -> None:
    settings = PlanConfig(split="row_wise", exchange="rows", tiers="hot:4", refresh=2)
    config = tiny_run(plan=settings)
    model = build_model(config.model, config.data, seed=1)
    check_plan(settings, model, rm.Topology(local=2))
