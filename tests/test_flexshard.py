"""papers/flexshard: merged bytes, budgets, drift, the report, and a quick run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from papers.__main__ import main
from papers.flexshard.drift import Drifting, measure_drift
from papers.flexshard.report import case_name, render_flexshard, summarise_case
from papers.flexshard.tiers import Tiers, merged_bytes, within
from rowmesh.cost import Rates
from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn import EmbeddingBagCollection
from rowmesh.placement import MeshShape, Plan, Split, TablePlan, Tier
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.planners import make_plan
from rowmesh.stats import Stats
from rowmesh.tables import EmbeddingBagConfig, PoolingType
from rowmesh.topology import Topology

SMALL = Tiers(items=300, dim=4, batch=8, length=5.0)


def batch(*ids: int) -> KeyedJaggedTensor:
    values = torch.tensor(ids, dtype=torch.int64)
    return KeyedJaggedTensor.from_lengths_sync(["f"], values, torch.ones_like(values))


def test_a_row_crosses_once_for_a_host_if_requests_are_merged() -> None:
    table = TablePlan(
        name="t",
        collection="",
        num_embeddings=8,
        embedding_dim=4,
        data_type="fp32",
        pooling=PoolingType.SUM,
        feature_names=("f",),
        virtual_shards=4,
        tiers=(Tier(ranks=(0, 1, 2, 3), split=Split(kind="boxes", rows="all")),),
    )
    plan = Plan(mesh=MeshShape(hosts=2, local=2, group=4), tables=(table,))
    # row r has its home on rank r mod 4: host 0 asks for 2 and 6 of host 1, which asks for 1
    batches = [batch(0, 2, 2), batch(2, 6), batch(1, 3), batch(1)]
    assert merged_bytes(plan, batches) == (2 + 1) * (4 + 16 + 16) / 2


def test_tiers_take_no_more_memory_than_their_budget() -> None:
    source = SMALL.config().data
    batches = [next(source.batches(rank=0, world=4, start=s)).sparse_features for s in range(16)]
    config = EmbeddingBagConfig(
        name="item", num_embeddings=300, embedding_dim=64, feature_names=[batches[0].keys()[0]]
    )
    stats = Stats.from_batches([config], batches)
    base = make_plan(
        EmbeddingBagCollection([config], device="meta"),
        Topology(hosts=2, local=2),
        stats=stats,
        split="row_wise",
        exchange="rows",
        dedup=False,
    )
    held = max(bytes_per_rank(base))
    for budget in (1.0, 1.1, 1.5):
        plan = within(base, stats, Rates(), budget, hidden=1.0)
        assert max(bytes_per_rank(plan)) <= budget * held + 64 * 4 + 4  # ranks are a row apart
        assert any(table.hot for table in plan.tables) == (budget > 1.0)


def test_tiers_that_stay_as_they_were_fall_behind_those_that_know_the_future() -> None:
    how = Drifting(drift_every=1, refresh=40, windows=4, budget=1.5, hidden=1.0)
    asked = replace(SMALL, items=2000, batch=32)
    found = measure_drift(asked, how, dedup=True)
    assert list(found["policies"]) == ["fixed", "refresh", "oracle"]
    fixed, oracle = (found["policies"][name]["late_rows"] for name in ("fixed", "oracle"))
    assert oracle < 0.95 * fixed
    page = render_flexshard([], [found])
    assert "| 2x2 | yes | forward | 1, 40 |" in page


def case(**changes: Any) -> dict[str, Any]:
    def row(name: str, rows: float, sums: float, memory: float) -> dict[str, Any]:
        across = {"ids": 0.1 * rows, "rows": 0.5 * rows, "backward": 0.4 * rows, "dense": 1.0}
        return {
            "name": name,
            "rows": 7,
            "host_rows": 9,
            "mb_a_rank": memory,
            "mb_across": across | {"hot gradients": sums},
            "mb_inside": {"rows": 2.0},
            **dict.fromkeys(("in_flight_ms", "exposed_ms", "median_ms", "told_ms"), 10.0),
            "ms": [9.0, 10.0, 12.0],
            "bytes_are_exact": True,
        }

    rows = [row("row-wise", 4.0, 0.0, 10.0), row("hot 1.1x", 1.0, 0.5, 11.0)]
    found = {"hosts": 2, "local": 2, "rate": "200mbit", "dedup": False, "depth": 2}
    return found | {"merged_mb": 2.0, "rows": rows} | changes


def test_cuts_are_against_row_wise_with_and_without_sums() -> None:
    whole, hot = summarise_case(case())
    assert (whole["cut"], whole["memory"], hot["memory"]) == (0.0, 1.0, 1.1)
    assert hot["cut"] == pytest.approx(0.75)
    assert hot["sync_mb"] == pytest.approx(0.5)
    assert hot["cut_with_sync"] == pytest.approx(1 - 1.5 / 4)
    assert hot["cut_from_merged"] == pytest.approx(1 - 1.5 / 2)


def test_a_report_says_when_bytes_differ_and_compares_with_dedup() -> None:
    plain, dedup = case(), case(dedup=True)
    plain["rows"][1]["bytes_are_exact"] = False
    page = render_flexshard([plain, dedup], [])
    assert case_name(plain) == "2x2 200mbit no dedup"
    assert "| hot 1.1x | 7 | 9 | 1.10x | 1.00 | 75.0% | 0.50 | 62.5% | 2.00 |" in page
    assert "| 2.00 | 10 | 10 | 10 [9, 12] | 10 | exact |" in page
    assert page.count("| DIFFER |") == 1
    assert "Cuts against row-wise with dedup (4.00 MB): row-wise 0.0%, hot 1.1x 75.0%." in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budgets", "0.5"], "budget is 0.5, but must be from 1.0"),
        (["--items", "1"], "items is 1, but must be at least 2"),
        (["--rates", "none"], "tiers are about slow links"),
        (["--depth", "9"], "depth is 9"),
        (["--parts", "tears"], "did you mean 'tiers'?"),
    ],
)
def test_bad_words_are_named(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        main(["flexshard", "--out", str(tmp_path / "r"), *words])
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_quick_run_on_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["flexshard", "--out", str(tmp_path / "r"), "--quick", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["tables"].values()
    assert found[0]["plan"] == "row-wise"
    assert len(found) > 1
    assert all(plan["bytes_are_exact"] for plan in found)
    assert "## 1x2 200mbit no dedup" in (tmp_path / "r.md").read_text()
