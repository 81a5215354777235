"""papers/p2res: coverage, collisions, the report, and small curves."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.beside import share_of_collisions
from papers.__main__ import main
from papers.p2res.coverage import measure_coverage
from papers.p2res.report import render_report, summarise
from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.lab import check_permitted
from rowmesh.placement import Copies, MeshShape, Plan, Split, TablePlan, Tier, make_hot_set
from rowmesh.tables import PoolingType

REFUSED = check_permitted()


def run(out: Path, *words: str) -> None:
    main(["p2res", "--out", str(out), *words])


def batch(*ids: int) -> KeyedJaggedTensor:
    values = torch.tensor(ids, dtype=torch.int64)
    return KeyedJaggedTensor.from_lengths_sync(["f"], values, torch.ones_like(values))


def plan(*hot: int) -> Plan:
    tiers = [Tier(ranks=(0, 1), split=Split(kind="boxes", rows="all"))]
    if hot:
        ids = make_hot_set("t", np.asarray(hot))
        tiers.insert(0, Tier(ranks=(0, 1), copies=Copies.WORLD, rows=ids))
    table = TablePlan(
        name="t",
        collection="",
        num_embeddings=100,
        embedding_dim=4,
        data_type="fp32",
        pooling=PoolingType.SUM,
        feature_names=("f",),
        virtual_shards=16,
        tiers=tuple(tiers),
    )
    return Plan(mesh=MeshShape(hosts=2, local=1, group=2), tables=(table,))


def test_collisions_are_rows_to_fetch_that_any_rank_updates_in_the_step_before() -> None:
    steps = [[batch(1, 2, 2), batch(3)], [batch(1, 3, 9), batch(7, 2, 2, 8)]]
    # of 1, 3, 9 and 7, 2, 8 the running step has 1, 3 and 2
    assert share_of_collisions(plan(), steps) == pytest.approx(3 / 6)
    assert share_of_collisions(plan(1, 3), steps) == pytest.approx(1 / 4)
    assert share_of_collisions(plan(1, 2, 3, 7, 8, 9), steps) is None


def test_coverage_is_that_of_the_files(tmp_path: Path) -> None:
    # users 0..201, two lines a batch: item 5 is in every batch, all others are new each time
    lines = [f"{user} 5 {1000 + user}" for user in range(202)]
    (tmp_path / "sequences").mkdir()
    (tmp_path / "sequences/Beauty.txt").write_text("\n".join(lines) + "\n")
    missing: list[str] = []
    (found,) = measure_coverage(tmp_path, (), batch=8, on_missing=missing.append)
    assert found["data"] == "sequences/Beauty.txt"
    assert found["samples"] == 2
    assert found["seen_rows"] == 201  # item 5, and one for each of 200 users
    assert found["steady"] == pytest.approx(1 / 201)
    assert found["steady_take"] == pytest.approx(0.5)
    assert found["unseen"] == pytest.approx(2 / 3)  # of item 5 and two new ones
    assert len(missing) == 3
    assert "clicks is not there" in missing[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1::x::3::4", "invalid literal"),
        ("", "no ids"),
        ("1::2::3::4", "1 samples make fewer than 101 batches"),
    ],
)
def test_data_that_cannot_be_counted_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "movietweetings").mkdir()
    (tmp_path / "movietweetings/ratings.dat").write_text(text)
    with pytest.raises(InputError, match=rf"ratings.dat cannot be counted: .*{sentence}"):
        list(measure_coverage(tmp_path, (), batch=8, on_missing=lambda sentence: None))


def curve(**changes: Any) -> dict[str, Any]:
    def row(name: str, k: int, ms: float, *, is_model: bool = False) -> dict[str, Any]:
        return {
            "name": name,
            "rows": k,
            "sums": "",
            "mb_a_rank": 1.0,
            "told_ms": ms,
            "ms": [ms],
            "median_ms": ms,
            "is_model": is_model,
            "mb_across": {"rows": 2.0, "dense": 1.0},
            "collide": 0.5 if k == 0 else 0.25,
            "bytes_are_exact": True,
        }

    rows = [row("cold", 0, 200.0), row("k=9", 9, 100.0, is_model=True), row("all", 99, 150.0)]
    case = {"hosts": 2, "local": 2, "rate": "200mbit", "alpha": 1.2, "dedup": False, "depth": 2}
    return case | {"model": {"coverage": 0.9}, "rows": rows} | changes


def test_a_summary_names_the_models_rows_and_the_best() -> None:
    found = summarise(curve())
    assert (found["model_k"], found["best_k"]) == (9, 9)
    assert found["gain"] == pytest.approx(2.0)
    assert found["above_best"] == pytest.approx(0.0)
    assert found["spread"] == pytest.approx(2.0)
    assert (found["collide_cold"], found["collide_model"]) == (0.5, 0.25)


def test_a_report_says_when_bytes_differ() -> None:
    right, wrong = curve(), curve()
    wrong["rows"][1]["bytes_are_exact"] = False
    assert "to the byte on every plan" in render_report([right], [], picture="x.svg")
    told = render_report([right, wrong], [], picture="x.svg")
    assert "NOT on every plan" in told
    assert "| 9 **(model)** |" in told
    assert "| 100 [100, 100] | DIFFER |" in told


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--parts", "curve"], "did you mean 'curves'?"),
        (["--shapes", "2by2"], "say hosts x ranks"),
        (["--rates", "none"], "hot rows are about slow links"),
        (["--dedup", "yes"], "say on, off, or off,on"),
        (["--alphas", "x"], "is not a number"),
        (["--alphas", "nan"], "alpha is nan, but must be from 0 to 100"),
        (["--rounds", "0"], "rounds is 0, but must be at least 1"),
    ],
)
def test_bad_words_are_named(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        run(tmp_path / "r", *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", ["1x2", pytest.param("2x1", marks=pytest.mark.skipif(bool(REFUSED), reason="no lab"))]
)
def test_a_small_curve_is_stored_and_not_run_again(
    tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--shapes", shape, "--json"]
    run(tmp_path / "r", *words)
    (found,) = json.loads(capsys.readouterr().out)["curves"]
    assert found["bytes_are_exact"]
    stored = json.loads((tmp_path / "r.json").read_text())
    (case,) = stored["cases"]
    assert case["rows"][0]["name"] == "cold"
    assert sum(row["is_model"] for row in case["rows"]) == 1
    assert "<svg" in (tmp_path / "r.svg").read_text()
    run(tmp_path / "r", *words)
    assert "200mbit\n" not in capsys.readouterr().err  # no hosts were made
    assert json.loads((tmp_path / "r.json").read_text()) == stored
