"""papers/two_d, quality: data of virtual ranks, runs that are stored, figures and verdicts."""

import json
import math
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.figures import paired
from benchmarks.harness.quality import OneTable, count_rows, deciles, rarest_of_samples
from papers.__main__ import main
from papers.two_d.arms import Arm, Learning, Quality, arms_of, trial_sets
from papers.two_d.figures import Figures, judge
from papers.two_d.quality import Run, measure_runs, prove_gradients, runs_of
from papers.two_d.quality_report import render_quality, summarise_quality
from papers.two_d.run import write_report
from papers.two_d.virtual import Additive, cut_batch, train, train_arm
from rowmesh.data import SyntheticClicks
from rowmesh.errors import InputError
from rowmesh.features import Batch, JaggedTensor, KeyedJaggedTensor
from rowmesh.runtime.oracle import materialise
from rowmesh.tables import EmbeddingBagConfig
from tests.processes import ROOT, finish, start

TINY = Quality(seeds=(1, 2), groups=(4,), periods=(), sets=("planted",), steps=2, held_out=2)
CLICKS = SyntheticClicks(cardinalities=(5, 7), batch_size=16, num_dense=2, held_out_batches=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: on a busy machine a second thread costs a thousand times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def jagged() -> Batch:
    """Five samples; bags of a and b, some empty."""
    features = KeyedJaggedTensor.from_dict(
        {
            "a": JaggedTensor(torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 0, 1, 0, 1])),
            "b": JaggedTensor(torch.tensor([9, 8, 7]), lengths=torch.tensor([0, 0, 1, 1, 1])),
        }
    )
    return Batch(
        dense_features=torch.arange(10.0).view(5, 2),
        sparse_features=features,
        labels=torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]),
    )


# Data


def test_tables_joined_to_one_keep_their_rows_apart() -> None:
    joined = OneTable(CLICKS)
    (table,) = joined.tables(3)
    assert (table.num_embeddings, table.embedding_dim) == (12, 3)
    for mine, given in (
        (next(joined.batches(rank=0, world=1, start=3)), CLICKS.batch_at(0, 3)),
        (next(joined.held_out(rank=0, world=1)), next(CLICKS.held_out(rank=0, world=1))),
    ):
        assert torch.equal(
            mine.sparse_features["cat_0"].values(), given.sparse_features["cat_0"].values()
        )
        assert torch.equal(
            mine.sparse_features["cat_1"].values(), given.sparse_features["cat_1"].values() + 5
        )
        assert torch.equal(mine.labels, given.labels)
        assert mine.true_probabilities is not None


def test_a_table_that_two_features_read_is_not_joined() -> None:
    class Shared:
        num_dense, steps_per_epoch = 1, None

        def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
            return [
                EmbeddingBagConfig(
                    name="t", num_embeddings=3, embedding_dim=1, feature_names=["a", "b"]
                )
            ]

    with pytest.raises(InputError, match="table 't' is read by 2 features"):
        OneTable(Shared())  # type: ignore[arg-type]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_parts_of_a_batch_are_its_samples_in_order(num_parts: int) -> None:
    whole = jagged()
    parts = cut_batch(whole, num_parts)
    assert [p.sparse_features.stride() for p in parts] == [
        (i + 1) * 5 // num_parts - i * 5 // num_parts for i in range(num_parts)
    ]
    for key in ("a", "b"):
        bags = [bag for p in parts for bag in p.sparse_features[key].to_dense()]
        wanted = whole.sparse_features[key].to_dense()
        assert [bag.tolist() for bag in bags] == [bag.tolist() for bag in wanted]
    assert torch.equal(torch.cat([p.labels for p in parts]), whole.labels)
    assert torch.equal(torch.cat([p.dense_features for p in parts]), whole.dense_features)


def test_rows_and_samples_by_frequency() -> None:
    batch = jagged()
    counts = count_rows([batch, batch], 12)
    assert counts.tolist() == [0, 2, 2, 2, 2, 0, 0, 2, 2, 2, 0, 0]
    counts[7], counts[2] = 1, 50
    # rows 1 and 2; none; 3 and 9; 8; 4 and 7
    assert rarest_of_samples(batch, counts).tolist() == [2, 50, 2, 2, 1]


def test_deciles_are_ten_parts_of_equal_size() -> None:
    values = torch.tensor([5, 1, 3, 2, 4]).repeat(8)
    found = deciles(values)
    assert torch.bincount(found).tolist() == [4] * 10
    assert int(values[found == 0].max()) == 1
    assert int(values[found == 9].min()) == 5
    assert deciles(torch.tensor([7, 7])).tolist() == [0, 5]


# One run


def test_an_arm_has_whole_groups_and_a_name() -> None:
    names = [arm.name for arm in (Arm(), *arms_of(4), Arm(groups=2, scale=3.0, period=4))]
    assert names == [
        "full",
        *("weights c=1", "weights c=sqrt(M)", "weights c=M", "moments-first"),
        "weights c=3 k=4",
    ]
    with pytest.raises(InputError, match="6 virtual ranks do not make 4 groups"):
        Arm(groups=4, ranks=6)


def test_the_additive_model_adds_means_of_vectors() -> None:
    joined = OneTable(CLICKS)
    model = materialise(Additive(joined, dim=3, seed=1))
    batch = next(joined.batches(rank=0, world=1))
    rows = batch.sparse_features.values().view(2, 16)
    table = model.embedding_bag_collection.embedding_bags["all"].weight
    with torch.no_grad():
        model.dense.weight.fill_(2.0)
        found = model.logits(batch.dense_features, batch.sparse_features)
        wanted = table[rows].mean(2).sum(0) + 2.0 * batch.dense_features.sum(1)
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("model", ["additive", "dcn"])
def test_a_run_is_repeatable_and_more_virtual_ranks_only_reorder_sums(model: Any) -> None:
    how = Learning(steps=6, model=model, dim=4, dense_layers=(4,))
    full = train_arm(CLICKS, how, Arm(), lr=0.3, seed=1)
    assert full == train_arm(CLICKS, how, Arm(), lr=0.3, seed=1)
    assert len(full["ne_deciles"]) == len(full["log_moments"]) == 10
    spread = train_arm(CLICKS, how, Arm(ranks=4), lr=0.3, seed=1)
    assert spread["ne"] == pytest.approx(full["ne"], rel=1e-4)
    assert full["bayes_ne"] < full["ne"]
    apart = train_arm(CLICKS, how, Arm(groups=4), lr=0.3, seed=1)
    assert abs(apart["ne"] / full["ne"] - 1) > 1e-5  # another trajectory


def test_learning_rates_fall_to_zero_in_a_line() -> None:
    joined = OneTable(CLICKS)
    batches = [next(joined.batches(rank=0, world=1))] * 4
    how = Learning(steps=4, dense_lr=0.0, eps=1e6)  # so large that a step is lr * g / eps
    weights = [
        train(joined, batches[:n], how, Arm(), lr=1e4, seed=1).weight("all") for n in (0, 1, 4)
    ]
    one, four = ((weight - weights[0]).norm() for weight in weights[1:])
    assert float(four / one) == pytest.approx(1 + 3 / 4 + 2 / 4 + 1 / 4, rel=0.05)


# Runs, stored one by one


def test_runs_that_are_stored_are_not_made_again(tmp_path: Path) -> None:
    runs, names = runs_of(TINY)[:3], []

    def measure(runs: Sequence[Run]) -> list[dict[str, Any]]:
        names.clear()
        return measure_runs(
            runs, tmp_path / "runs", workers=1, on_run=lambda done, total, name: names.append(name)
        )

    first = measure(runs)
    assert names == ["stored", *(run.name for run in runs)]
    assert [(found["seed"], found["lr"], found["arm"]) for found in first] == [
        (1, 0.2, "full"),
        (2, 0.2, "full"),
        (1, 0.4, "full"),
    ]
    assert measure(runs) == first
    assert names == ["stored"]
    (tmp_path / f"runs/{runs[0].name}.json").write_text('{"asked": ')
    (tmp_path / f"runs/{runs[2].name}.json").unlink()
    assert measure(runs) == first
    assert names == ["stored", runs[0].name, runs[2].name]
    store = tmp_path / "runs"
    again = measure_runs(
        runs[:1], store, workers=1, again=True, on_run=lambda *_: names.append("x")
    )
    assert (again, names) == (first[:1], ["stored", runs[0].name, runs[2].name, "x", "x"])
    measure(runs_of(replace(TINY, steps=3))[:2])  # other settings under the same names
    assert names == ["stored", runs[0].name, runs[1].name]


def test_the_judged_arms_come_first_and_other_periods_at_one_rate(tmp_path: Path) -> None:
    runs = runs_of(Quality(seeds=(1, 2), clicks=tmp_path / "none"))
    judged = [run.arm.groups in (1, 4) for run in runs]
    assert judged == sorted(judged, reverse=True)
    assert {run.trial.name for run in runs} == {"planted", "few", "dcn"}
    assert {run.lr for run in runs if run.arm.period > 1} == {0.2}
    assert {(r.arm.period, r.arm.name) for r in runs if r.arm.period > 1} == {
        (k, f"weights c={c} k={k}") for k in (4, 16) for c in ("1", "M")
    }
    assert len({run.name for run in runs}) == len(runs)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": (1, 1)}, "number of seeds is 1, but must be from 2 to 30"),
        ({"groups": (2, 8)}, "lack 4, which is judged"),
        ({"groups": (1, 4)}, "groups is 1"),
        ({"periods": (1,)}, "period is 1"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_what_is_tried_makes_sense(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Quality(**changes)


def test_gradients_have_the_bits_of_full_model_parallelism() -> None:
    proof = prove_gradients(replace(TINY, groups=(2, 4)), steps=3)
    assert [row["groups"] for row in proof["rows"]] == [2, 4]
    assert all(row["weights"] == row["moments"] == 0.0 for row in proof["rows"])


def test_clicks_are_read_as_the_recipe_does(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns: dict[str, Any] = {"label": [i % 2 for i in range(64)]}
    columns |= {f"i{i}": [float(i)] * 64 for i in range(1, 14)}
    columns |= {f"c{i}": list(range(64)) for i in range(1, 27)}
    (tmp_path / "clicks").mkdir()
    for number in range(2):
        parquet.write_table(arrow.table(columns), tmp_path / f"clicks/part-{number}.parquet")
    what = replace(TINY, sets=("clicks",), clicks=tmp_path / "clicks")
    (trial,) = trial_sets(what)
    assert (trial.how.steps, trial.how.eps, trial.how.dim) == (1, 2e-3, 8)
    found = train_arm(trial.source(1), trial.how, trial.arms[1], lr=1.0, seed=1)
    assert found["bayes_ne"] is None
    assert math.isfinite(found["ne"])


# Figures and verdicts


def made_up(**losses: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Runs of M = 4 on five seeds whose mean % of NE at three rates is as given."""
    arms = {"c1": "weights c=1", "root": "weights c=sqrt(M)", "cm": "weights c=M"}
    arms["first"] = "moments-first"
    shown: dict[str, tuple[float, ...]] = {"full": (0, 0, 0)}
    shown |= {arms[key]: value for key, value in losses.items()}
    base, noise = (0.82, 0.80, 0.81), (-0.02, -0.01, 0.0, 0.01, 0.02)
    return [
        {
            "set": "planted",
            "groups": 1 if arm == "full" else 4,
            "arm": arm,
            "period": 1,
            "lr": lr,
            "seed": seed,
            "ne": base[r] * (1 + (values[r] + (noise[seed] if arm != "full" else 0)) / 100),
            "auc": 0.8,
            "mean_kl": 0.01,
            "bayes_ne": 0.7,
            "ne_deciles": [0.8] * 9 + [None],
            "log_moments": [math.log(4.0) if arm == "weights c=1" else 0.0] * 10,
        }
        for arm, values in shown.items()
        for r, lr in enumerate((0.2, 0.4, 0.8))
        for seed in range(5)
    ]


GOOD = {"c1": (3.0, 1.0, -0.5), "root": (1.0, 0.05, 0.0), "cm": (0.05, 0.0, 0.1)}
GOOD |= {"first": (-0.2, 0.0, 0.1)}


def test_a_paired_difference_has_its_error_and_interval() -> None:
    found = paired([1.01, 1.02, 1.03, 1.04, 1.05], [1.0] * 5)
    assert found.mean == pytest.approx(3.0)
    assert found.error == pytest.approx(math.sqrt(2.5) / math.sqrt(5))
    assert found.high - found.mean == pytest.approx(2.776 * found.error)
    assert found.mean - found.low == pytest.approx(2.776 * found.error)
    two = paired([1.0, 1.02], [1.0, 1.0])
    assert two.high == pytest.approx(1.0 + 12.706)
    assert paired([1.0] * 29 + [1.3], [1.0] * 30).error == pytest.approx(1.0)


def test_figures_that_fulfil_all_demands_say_yes() -> None:
    verdicts = judge(Figures(made_up(**GOOD)), 4)
    assert [v.holds for v in verdicts] == [True] * 3
    assert [v.holds_throughout for v in verdicts] == [True] * 3
    assert "NO" not in "".join(map(str, verdicts))
    assert "+3.000 [+2.980, +3.020]" in str(verdicts[0])


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({"c1": (0.4, 1.0, 1.0)}, 0),  # the control does not lose where it must
        ({"cm": (0.2, 0.0, 0.0)}, 1),
        ({"cm": (-0.2, 0.0, 0.0)}, 1),  # better is not within either
        ({"cm": (0.05, 0.2, 9.0)}, 2),
        ({"root": (9.0, 0.2, 9.0)}, 2),
        ({"first": (0.0, 0.3, 9.0)}, 2),
        ({"first": (float("nan"),) * 3}, 2),  # it diverged
    ],
)
def test_figures_that_do_not_say_no(changes: dict[str, Any], fails: int) -> None:
    runs = made_up(**(GOOD | changes))
    verdicts = judge(Figures(runs), 4)
    assert [v.holds for v in verdicts] == [i != fails for i in range(3)]
    assert not verdicts[fails].holds_throughout
    assert ": NO, " in str(verdicts[fails])
    assert "| NO | NO |" in render_quality(runs, None)
    assert [v["holds"] for v in summarise_quality(runs)["planted"]].count(False) == 1


def test_a_mean_that_holds_and_an_interval_that_does_not_are_both_said() -> None:
    (_, near, _) = judge(Figures(made_up(**(GOOD | {"cm": (0.095, 0.0, 0.0)}))), 4)
    assert (near.holds, near.holds_throughout) == (True, False)
    assert str(near).endswith("(all of the interval: NO)")


def test_each_arm_is_compared_at_its_best_rate() -> None:
    figures = Figures(made_up(**(GOOD | {"c1": (9.0, 5.0, -1.0)})))
    assert figures.best_rate(1, "full") == 0.4
    assert figures.best_rate(4, "weights c=1") == 0.8
    wanted = 100 * (0.81 * 0.99 / 0.80 - 1)
    assert figures.loss_at_best(4, "weights c=1").mean == pytest.approx(wanted, abs=1e-3)


def test_deciles_are_compared_with_those_of_full() -> None:
    figures = Figures(made_up(**GOOD))
    assert figures.moment_ratios(4, "weights c=1", 0.2) == pytest.approx([4.0] * 10)
    assert figures.decile_losses(4, "weights c=1", 0.2) == [0.0] * 9 + [None]


def test_a_report_has_all_parts_and_fits_a_page(tmp_path: Path) -> None:
    runs = made_up(**GOOD)
    runs += [
        run | {"arm": "weights c=1 k=16", "period": 16}
        for run in runs
        if run["arm"] == "weights c=1" and run["lr"] == 0.2
    ]
    runs += [run | {"groups": 16} for run in runs if run["groups"] == 4]
    proof = prove_gradients(TINY, steps=1)
    found = {"verdicts": summarise_quality(runs), "gradients": proof, "runs": runs}
    write_report(tmp_path / "2d", {"quality": found})
    text = (tmp_path / "2d.md").read_text()
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("| 4 | weights c=1 k=16 | 0.2 |") == 1
    assert "| 4 | 0 | 0 | yes |" in text  # gradients
    assert "NE of p* itself: 0.70000." in text
    stored = json.loads((tmp_path / "2d.json").read_text())["quality"]
    assert stored["runs"] == runs
    write_report(tmp_path / "2d", {"another": 1})  # of a reproduction of another part
    assert (tmp_path / "2d.md").read_text() == text
    assert json.loads((tmp_path / "2d.json").read_text())["another"] == 1
    assert len(stored["verdicts"]["planted"]) == 6


def run(out: Path, *words: str) -> None:
    main(["two_d", "--out", str(out), *words])


@pytest.mark.parametrize(
    ("out", "words", "sentence"),
    [
        ("r", ["--parts", "qualty"], "did you mean 'quality'?"),
        ("r", ["--sets", "plant"], "did you mean 'planted'?"),
        ("r", ["--groups", "2,x"], "--groups: 'x' is not a whole number"),
        ("r", ["--groups", "2,8"], "lack 4, which is judged"),
        ("r", ["--seeds", "1"], "number of seeds is 1, but must be from 2 to 30"),
        ("r", ["--workers", "0"], "workers is 0, but must be at least 1"),
        ("file/r", [], "cannot make the folder"),
        ("r", ["--sets", "clicks", "--clicks", "no"], "no data found at"),
    ],
)
def test_bad_words_are_named(tmp_path: Path, out: str, words: list[str], sentence: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=re.escape(sentence)):
        run(tmp_path / out, *words)


@pytest.mark.nightly
def test_a_quick_run_in_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--parts", "quality", "--sets", "planted,clicks"]
    words += ["--clicks", str(tmp_path / "none"), "--json"]
    run(tmp_path / "r", *words)
    told = capsys.readouterr()
    assert "no run on clicks" in told.err
    assert list(json.loads(told.out)) == ["planted"]
    assert "### planted" in (tmp_path / "r.md").read_text()
    run(tmp_path / "r", *words[:-1])
    told = capsys.readouterr()
    assert "58 of 58 runs: stored" in told.err
    assert "planted: M = 4, lr 0.2: control c = 1 loses" in told.out


@pytest.mark.nightly
def test_a_run_that_is_stopped_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    words = ("two_d", "--quick", "--parts", "quality", "--out", str(tmp_path / "r"))
    process = start(*words, module="papers", cwd=ROOT)
    assert process.stderr is not None
    assert "0 of 58 runs: stored" in process.stderr.readline()
    assert "of 58 runs" in process.stderr.readline()  # workers are at work
    process.terminate()
    # it reads stderr to its end, which comes when no worker holds it any more
    assert finish(process)[0] == 128 + signal.SIGTERM
    kept = len(list((tmp_path / "r/runs").iterdir()))
    code, _, said = finish(start(*words, module="papers", cwd=ROOT), timeout=300)
    assert code == 0
    assert f"{kept} of 58 runs: stored" in said
