"""The rules of bench_codec_quality.py: the planted truth, the control, the verdicts."""

import numpy as np
import pytest
import torch
from codec_quality.data import PlantedHalfDense, Trial, planted_trial
from codec_quality.report import judge, markdown
from codec_quality.runs import ARMS, CONTROL, crude

from rowmesh.data import SyntheticClicks


def trial() -> Trial:
    """A short one."""
    return planted_trial(steps=2, held_out=2, rates=(1.0,))


def source(seed: int) -> PlantedHalfDense:
    """Its data."""
    found = trial().source(seed)
    assert isinstance(found, PlantedHalfDense)
    return found


def test_half_of_the_variance_is_dense_and_a_quarter_of_the_labels_are_clicks() -> None:
    draws = SyntheticClicks(cardinalities=(1000,) * 8, batch_size=8192, labels="coin")
    planted = PlantedHalfDense(draws=draws, seed=1)
    batch = next(planted.batches(rank=0, world=2))
    rows, dense = planted._parts(batch)
    assert dense.var() / (rows.var() + dense.var()) == pytest.approx(0.5, abs=0.03)
    assert float(batch.labels.mean()) == pytest.approx(0.25, abs=0.03)
    assert batch.true_probabilities is not None
    assert float(batch.true_probabilities.mean()) == pytest.approx(0.25, abs=0.03)


def test_seeds_differ_by_their_training_samples_and_share_the_held_out_ones() -> None:
    first, second = source(1), source(2)
    one, two = (next(s.batches(rank=0, world=2)) for s in (first, second))
    assert not torch.equal(one.dense_features, two.dense_features)
    one, two = (next(s.held_out(rank=1, world=2)) for s in (first, second))
    assert torch.equal(one.dense_features, two.dense_features)
    assert torch.equal(one.labels, two.labels)
    again = next(source(1).held_out(rank=1, world=2))
    assert torch.equal(one.labels, again.labels)


def test_the_control_keeps_nothing_below_half_of_the_largest() -> None:
    grad = torch.tensor([[4.0, -1.9], [2.1, -3.0]])
    assert crude(grad).tolist() == [[4.0, 0.0], [4.0, -4.0]]
    assert crude(torch.zeros(2)).tolist() == [0.0, 0.0]


def runs(losses: dict[str, float]) -> list[dict[str, object]]:
    """Five seeds; fp32's NE at rate 1 is 0.7 with a spread of about 0.23 %; rate 2 is worse."""
    spread = np.linspace(-0.002, 0.002, 5)
    return [
        {
            "set": "planted",
            "arm": arm,
            "rate": rate,
            "seed": seed,
            "ne": (0.7 + spread[seed]) * (1 + loss / 100) * (1.1 if rate == 2 else 1),
            "bayes_ne": 0.6,
            "mean_kl": 0.01,
            "exactness": "E3",
            "mb_step": 1.0,
            "ne_deciles": [None] + [0.7] * 9,
        }
        for arm, loss in losses.items()
        for rate in (1.0, 2.0)
        for seed in range(5)
    ]


def test_a_loss_is_judged_by_the_spread_of_fp32() -> None:
    found = judge(runs({"fp32": 0.0, "bf16": 0.2, "int8": 0.3, CONTROL: 9.0}))
    spread = 100 * np.std(np.linspace(0.698, 0.702, 5), ddof=1) / 0.7
    assert found[0].spread == pytest.approx(spread)
    assert 0.2 < spread < 0.3
    assert [v.is_within for v in found] == [True, True, False, False]
    assert [v.rate for v in found] == [1.0] * 4
    assert found[1].loss.mean == pytest.approx(0.2)


def test_a_run_that_diverged_is_not_within() -> None:
    found = runs({"fp32": 0.0, "bf16": 0.0, CONTROL: 9.0})
    for run in found:
        if run["arm"] == "bf16":
            run["ne"] = float("nan")
    assert not judge(found)[1].is_within


def test_the_page_says_which_codec_loses_and_whether_the_control_does() -> None:
    about = {
        "date": "2026-01-01",
        "commit": "abc",
        "torch": "2",
        "machine": "a machine",
        "ranks": 2,
        "seeds": [0, 1, 2, 3, 4],
        "command": "torchrun",
    }
    losses = {"fp32": 0.0, "bf16": 0.1, "int8": 0.5, CONTROL: 9.0}
    sets = {"planted": "It learns so.", "clicks": "Not run: no --clicks was given."}
    page = markdown({"about": about, "sets": sets, "runs": runs(losses)})
    assert "**NE of all codecs but int8 is within the seeds' spread" in page
    assert "the control loses more, as it must.**" in page
    assert "Not run: no --clicks was given." in page
    assert "| bf16 |  | +0.00 |" in page  # by tenths; the first has no NE
    page = markdown({"about": about, "sets": sets, "runs": runs(losses | {CONTROL: 0.0})})
    assert "does NOT lose more: no test" in page


def test_arms_are_fp32_first_four_codecs_and_a_control() -> None:
    assert [arm.name for arm in ARMS] == [
        *("fp32", "bf16", "fp16", "int8", "forward=fp16,backward=bf16", CONTROL)
    ]
    assert [arm.is_crude for arm in ARMS] == [False] * 5 + [True]
