"""Codecs in plans: what they should send and cost, when `auto` takes them, what is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmesh.cost import DenseCost, Rates, expect_dense, expect_plan, plan_time, predict
from rowmesh.errors import InputError
from rowmesh.placement import Copies, MeshShape, Plan, Split, Tier, make_hot_set
from rowmesh.placement.codecs import WIRE_CODECS, describe_codecs, parse_codecs, wire_form
from rowmesh.placement.diff import diff_plans
from rowmesh.placement.document import plan_from_json, plan_to_json
from rowmesh.planners import make_plan, parse_allow
from rowmesh.stats import Stats
from rowmesh.topology import Topology
from rowmesh.train.planning import PlanConfig
from tests.test_cli_plan import RECIPE, run, write
from tests.test_expected import NEW, OLD, SQUARE, bag, draw, sent
from tests.test_planners import EIGHT, bags, stats_of, uses
from tests.test_planners import bag as table_of

HOT = make_hot_set("t", np.arange(0, 3000, 3))
REST = Tier(ranks=(0, 1, 2, 3), split=Split(kind="boxes", rows="all"))
EVERYWHERE = Tier(ranks=(0, 1, 2, 3), copies=Copies.WORLD, rows=HOT)
PER_HOST = Tier(
    ranks=(0, 1, 2, 3), copies=Copies.HOST, rows=HOT, split=Split(kind="boxes", rows="host")
)
HOT_ROWS: dict[str, dict[str, Any]] = {
    "hot": {"tiers": (EVERYWHERE, REST)},
    "hot-dense": {"tiers": (replace(EVERYWHERE, sums="dense"), REST)},
    "hot-bucket": {"tiers": (replace(EVERYWHERE, sums="bucket"), REST)},
    "per-host": {"tiers": (PER_HOST, REST)},
}
SETTINGS = {
    name: settings
    for name, settings in (OLD | NEW | HOT_ROWS).items()
    if name in ("rows", "fp16", "pooled", "copies", "column-wise-pooled", "grid-pooled", *HOT_ROWS)
}


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "forward=int8,hot gradients=bf16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_expected_bytes_are_within_a_tenth_of_predict(name: str, codec: str) -> None:
    """Per rank and link, over the mean of 20 batches."""
    table, steps = draw(SETTINGS[name], 1.0)
    plan = Plan(
        mesh=MeshShape(hosts=2, local=2, group=4),
        tables=(table,),
        dense=(3001, 700),
        codecs=parse_codecs(codec),
        tree="host-first" if name == "per-host" else "flat",
    ).validate()
    batches = [b for step in steps for b in step]
    stats = Stats.from_batches([bag("t", 6400, feature_names=["f"])], batches)
    found = expect_plan(plan, stats.tables)
    measured = np.mean([sent(plan, step) for step in steps], axis=0)
    expected = np.array([found.sent_host, found.sent_cross])
    assert expected == pytest.approx(measured, rel=0.1, abs=1.0)
    exact = expect_plan(replace(plan, codecs=()), stats.tables)
    is_as_it_was = name == "fp16" and "int8," in codec  # rows of 16 bits, and no copies
    assert (float(found.sent_cross.sum()) < float(exact.sent_cross.sum())) != is_as_it_was
    assert bool((found.work > exact.work).all()) != is_as_it_was


@pytest.mark.parametrize("tree", ["flat", "host-first"])
@pytest.mark.parametrize("codec", WIRE_CODECS)
def test_bytes_of_dense_buckets(codec: str, tree: str) -> None:
    plan = Plan(
        mesh=MeshShape(hosts=2, local=2, group=4),
        tables=(),
        dense=(100_000,),
        tree=tree,  # type: ignore[arg-type]
        codecs=parse_codecs(codec),
    )
    ledgers = predict(plan, [{}] * 4)
    found = np.mean([sum(ledger["dense"].values()) for ledger in ledgers])
    load = expect_dense(100_000, topology=SQUARE, tree=tree, form=wire_form(plan))
    assert float((load.sent_host + load.sent_cross).mean()) == pytest.approx(found, rel=0.01)


SLOW, FAST = Rates(cross_bytes_per_s=2.5e7, host_bytes_per_s=2e8), Rates(cross_bytes_per_s=1e12)


def chosen(rates: Rates, **options: Any) -> Plan:
    names = [f"t{i}" for i in range(8)]
    stats = stats_of(**dict.fromkeys(names, uses(20, 9000)))
    model = bags(*(table_of(name, dim=64) for name in names))
    return make_plan(model, EIGHT, stats=stats, rates=rates, **options)


def test_auto_takes_codecs_only_if_allowed_and_where_they_pay() -> None:
    assert chosen(SLOW).codecs == ()
    assert chosen(FAST, allow_lossy=True).codecs == ()
    lossy = chosen(SLOW, allow_lossy=True)
    assert describe_codecs(lossy.codecs).startswith("rows: int8, pooled: int8")
    assert lossy.exactness == "E3"
    assert replace(lossy, codecs=(), predicted=chosen(SLOW).predicted) == chosen(SLOW)
    assert lossy.predicted.cross_bytes < 0.4 * chosen(SLOW).predicted.cross_bytes
    assert lossy.predicted.step_s < chosen(SLOW).predicted.step_s


def test_a_more_lossy_codec_must_pay_again() -> None:
    medium = Rates(cross_bytes_per_s=2e9, host_bytes_per_s=2e9)
    assert describe_codecs(chosen(medium, allow_lossy=True).codecs).startswith("rows: bf16")


def test_codecs_that_are_named_are_taken() -> None:
    named = chosen(FAST, codecs="forward=fp16,backward=bf16", allow_lossy=True)
    assert describe_codecs(named.codecs) == (
        "rows: fp16, pooled: fp16, backward: bf16, hot gradients: bf16"
    )
    assert plan_from_json(plan_to_json(named)) == named


def test_codecs_cost_work_and_save_time_on_slow_links() -> None:
    names = [f"t{i}" for i in range(8)]
    stats = stats_of(**dict.fromkeys(names, uses(20, 9000)))
    dense = DenseCost(flops=0.0, parameters=0.0, forward_s=0.0, backward_s=0.0, step_s=0.0)
    exact = chosen(SLOW)
    times = {
        name: plan_time(
            replace(exact, codecs=parse_codecs(name)), stats.tables, rates=SLOW, cost=dense
        )
        for name in ("fp32", "bf16", "int8")
    }
    assert times["fp32"].rows_s < times["bf16"].rows_s < times["int8"].rows_s
    assert times["fp32"].total_s > times["bf16"].total_s > times["int8"].total_s


def test_a_plan_says_its_codecs() -> None:
    plan = chosen(SLOW, codecs="dense=bf16")
    assert "\nexactness E3: lossy numbers on the wire\ncodecs dense: bf16\n" in str(plan)
    assert "codecs" not in str(chosen(SLOW))
    changes = {c.what: (c.before, c.after) for c in diff_plans(chosen(SLOW), plan).changes}
    assert changes == {"exactness": ("E0", "E3"), "codecs": ("none", "dense: bf16")}


def test_settings_of_a_run() -> None:
    assert PlanConfig(codecs="bf16", allow="lossy").codecs == "bf16"
    with pytest.raises(InputError, match=r"plan\.codecs: codecs 'bf61': unknown codec"):
        PlanConfig(codecs="bf61")
    with pytest.raises(InputError, match=r"plan\.allow: unknown word 'loss': did you mean 'lossy'"):
        PlanConfig(allow="loss")
    assert [parse_allow(word) for word in ("exact", "lossy")] == [False, True]


def test_the_command_line_takes_codecs(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.toml", RECIPE + 'codecs = "dense=int8"\n')
    assert "codecs dense: int8" in run("plan", recipe, "--ranks-per-host", "2").stdout
    shown = run("plan", recipe, "--codecs", "bf16").stdout
    assert "exactness E3: lossy numbers on the wire\ncodecs rows: bf16, pooled: bf16" in shown
    exact = run("plan", "--allow", "lossy", "--cap", "1000").stdout
    assert "exactness" in exact
    wrong = run("plan", "--codecs", "fp8")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("rowmesh: plan.codecs: codecs 'fp8': unknown codec 'fp8'")


def test_one_rank_has_nothing_to_encode() -> None:
    stats = stats_of(a=uses(1, 300))
    model, alone = bags(table_of("a")), Topology(hosts=1, local=1)
    exact, lossy = (make_plan(model, alone, stats=stats, codecs=c) for c in ("fp32", "int8"))
    loads = [expect_plan(plan, stats.tables) for plan in (exact, lossy)]
    assert (loads[0].values == loads[1].values).all()
