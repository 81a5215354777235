"""papers/two_d, bytes and speed: formulas, verdicts, and a contest on real ranks."""

import itertools
import json
from typing import Any

import pytest

import rowmesh as rm
from papers.two_d.counted import count_groups, count_sync, dense_sync_bytes
from papers.two_d.run import run_bytes, write_report
from papers.two_d.speed import Speed
from papers.two_d.speed_report import judge_speed, rank_correlation, render_speed
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, DenseCost, Rates
from tests.ranks import run_on_ranks

SMALL: dict[str, Any] = {"cap": 2000, "dim": 8, "alpha": 1.05, "batch": 32}


def test_imbalance_falls_as_groups_get_smaller() -> None:
    rows = [r for r in count_groups([(4, 4)], **SMALL) if r["layout"] == "contiguous"]
    assert [r["size"] for r in rows] == [16, 8, 4, 2, 1]
    for what in ("bytes_imbalance", "work_imbalance"):
        found = [r[what] for r in rows]
        assert found[0] > 1.15
        assert all(b <= a + 0.02 for a, b in itertools.pairwise(found))
        assert found[-1] < 1.02
    assert [r["memory_mb"] for r in rows] == sorted(r["memory_mb"] for r in rows)


def test_layouts_send_the_exchange_or_the_sync_across() -> None:
    rows = {(r["size"], r["layout"]): r for r in count_groups([(2, 2)], **SMALL)}
    near, far = rows[2, "contiguous"], rows[2, "strided"]
    assert near["exchange_cross_mb"] == near["sync_host_mb"] == 0.0
    assert far["exchange_host_mb"] == far["sync_cross_mb"] == 0.0
    assert near["exchange_host_mb"] > 0.0 < far["exchange_cross_mb"]
    assert near["sync_cross_mb"] == pytest.approx(far["sync_host_mb"], rel=0.1)
    assert rows[1, "contiguous"]["exchange_host_mb"] == 0.0
    assert rows[4, "contiguous"]["sync_cross_mb"] == 0.0


def test_a_sparse_sync_sends_what_was_touched() -> None:
    few, many = (count_sync([(2, 1)], **SMALL | {"cap": cap})[0] for cap in (2000, 20_000))
    assert few["ratio"] == few["dense_mb"] / few["sparse_mb"] > 5
    assert many["dense_mb"] > 4 * few["dense_mb"]
    assert many["sparse_mb"] < 2 * few["sparse_mb"]


def test_a_sync_of_all_rows_sends_each_and_its_moment_to_one_replica_and_back() -> None:
    topology, table = rm.Topology(hosts=2, local=2), {"name": "t", "num_embeddings": 7}
    config = rm.EmbeddingBagConfig(**table, embedding_dim=5, feature_names=["f"])
    model = rm.EmbeddingBagCollection([config], device="meta")
    plans = [
        rm.make_plan(model, topology, split="row_wise", exchange="rows", groups=n) for n in (2, 1)
    ]
    row = 4 * 5 + 4
    # 2 replicas: each sends 7 rows of its place to the other, half to be added and half added
    assert dense_sync_bytes(plans[0]) == pytest.approx(2 * 7 * row / 4)
    # 4 replicas of whole tables: three send a fourth's part to it, and it answers all three
    assert dense_sync_bytes(plans[1]) == pytest.approx(2 * 3 * 7 * row / 4)


def test_places_are_correlated() -> None:
    assert rank_correlation([1.0, 2.0, 9.0], [4.0, 5.0, 6.0]) == pytest.approx(1.0)
    assert rank_correlation([3.0, 2.0, 1.0], [4.0, 5.0, 6.0]) == pytest.approx(-1.0)


def case(told: list[float], measured: list[float], *, exact: bool = True) -> dict[str, Any]:
    rows = [
        {
            "name": f"N={i}",
            "size": i,
            "layout": "strided",
            "sync": "none",
            "told_ms": t,
            "ms": [m],
            "median_ms": m,
            "exposed_ms": 1.0,
            "mb_across": {"rows": 1.0, "replica sync": 0.5},
            "mb_inside": {},
            "mb_a_rank": 3.0,
            "bytes_are_exact": exact,
        }
        for i, (t, m) in enumerate(zip(told, measured, strict=True))
    ]
    return {"hosts": 2, "local": 2, "rate": "1gbit", "rows": rows}


def test_verdicts_follow_the_figures() -> None:
    good = judge_speed(case([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]))
    assert (good["loss"], good["chosen"], good["best"]) == (0.0, "N=0", "N=0")
    bad = judge_speed(case([3.0, 2.0, 1.0], [10.0, 20.0, 30.0], exact=False))
    assert (bad["loss"], bad["chosen"], bad["best"]) == (2.0, "N=2", "N=0")
    assert not bad["bytes_are_exact"]
    setting = {"alpha": 1.05, "batch": 32, "rounds": 1, "steps": 2, "depth": 2}
    cases = [case([3.0, 2.0], [1.0, 2.0], exact=False)]
    text = render_speed({"about": "today", "setting": setting, "cases": cases})
    assert "(N=1) takes 100.0% longer than the best (N=0)" in text
    assert "as predicted: NO" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_report_of_bytes_has_a_verdict(tmp_path: Any) -> None:
    what = Speed(shapes=((2, 1),), cap=500, dim=4, batch=64)
    write_report(tmp_path / "r", {"bytes": run_bytes(what, large=(2, 2))})
    text = (tmp_path / "r.md").read_text()
    assert "100x required: NO" in text  # 5,000 rows are not many
    assert json.loads((tmp_path / "r.json").read_text())["bytes"]["sync"]


def contest(mesh: Mesh) -> dict[str, Any]:
    asked = Speed(syncs=("gradients", "weights:2"), cap=300, dim=4, batch=16, rounds=1)
    dense = DenseCost(flops=1e6, parameters=1e4, forward_s=1e-3, backward_s=2e-3, step_s=1e-4)
    calibration = Calibration(topology=mesh.topology, rates=Rates(dense=dense))
    return asked.measure("all", mesh, calibration)


@pytest.mark.nightly
def test_every_size_layout_and_sync_is_run_and_its_bytes_checked() -> None:
    found = run_on_ranks(4, contest, hosts=2)[0]
    names = [(r["size"], r["layout"], r["sync"]) for r in found["rows"]]
    assert len(names) == len(set(names)) == 7
    assert {n[0] for n in names} == {1, 2, 4}
    assert all(row["bytes_are_exact"] for row in found["rows"])
    synced = {n: sum(r["mb_across"].values()) for n, r in zip(names, found["rows"], strict=True)}
    assert synced[2, "strided", "gradients"] < synced[1, "contiguous", "gradients"]


def test_what_is_timed_is_checked() -> None:
    assert Speed(syncs=("gradients",)).steps == 2
    assert Speed(syncs=("weights:3", "weights:4")).steps == 12
    for wrong in ({"rates": ("none",)}, {"syncs": ("often",)}, {"batch": 0}, {"alpha": -1.0}):
        with pytest.raises(rm.InputError):
            Speed(**wrong)
