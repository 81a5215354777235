"""Each sentence of `rowmesh.train.metrics`, against brute force."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.errors import InputError
from rowmesh.train.metrics import ClickMetrics, exact_auc

ALL = ("click_rate", "logloss", "ne", "auc", "auc_error_bound", "bayes_ne", "mean_kl")


def draw(num: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a fair model, labels, and the p* they were drawn from."""
    rng = torch.Generator().manual_seed(seed)
    truth = torch.randn(num, generator=rng, dtype=torch.float64) - 1
    true = truth.sigmoid()
    labels = torch.bernoulli(true, generator=rng)
    return truth + 0.5 * torch.randn(num, generator=rng, dtype=torch.float64), labels, true


def brute_auc(scores: Tensor, labels: Tensor) -> float:
    clicks, others = scores[labels == 1], scores[labels == 0]
    ahead = (clicks[:, None] > others).double() + 0.5 * (clicks[:, None] == others).double()
    return float(ahead.mean())


@pytest.mark.parametrize("levels", [2, 10, 10**6])
def test_exact_auc_counts_ties_half(levels: int) -> None:
    logits, labels, _ = draw(500)
    scores = (logits.sigmoid() * levels).round()
    assert exact_auc(scores, labels) == pytest.approx(brute_auc(scores, labels), abs=1e-12)


def test_exact_auc_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    assert exact_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), labels) == 0.75
    assert exact_auc(torch.tensor([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert exact_auc(torch.zeros(4), labels) == 0.5
    assert math.isnan(exact_auc(torch.zeros(2), torch.ones(2)))
    assert math.isnan(exact_auc(torch.tensor([0.1, math.nan]), torch.tensor([0, 1])))
    assert math.isnan(exact_auc(torch.zeros(0), torch.zeros(0)))
    with pytest.raises(InputError, match="4 labels were given for 3 scores"):
        exact_auc(torch.zeros(3), labels)


@pytest.mark.parametrize("num_bins", [1, 4, 64, 2**16])
def test_streamed_auc_is_within_its_bound(num_bins: int) -> None:
    logits, labels, _ = draw(3000)
    metrics = ClickMetrics(num_bins=num_bins)
    metrics.update(logits, labels)
    found = metrics.result()
    assert abs(found["auc"] - exact_auc(logits, labels)) <= found["auc_error_bound"] + 1e-12
    clicks, others = (
        torch.histc(logits[labels == k], bins=num_bins, min=-16, max=16) for k in (1, 0)
    )
    pairs = float(clicks.sum() * others.sum())
    expected = float((clicks * others).sum()) / (2 * pairs)
    assert found["auc_error_bound"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_default_bins_keep_the_bound_below_1e_4(deviation: float) -> None:
    rng = torch.Generator().manual_seed(0)
    metrics = ClickMetrics()
    labels = torch.bernoulli(torch.full((100_000,), 0.5), generator=rng)
    metrics.update(deviation * torch.randn(100_000, generator=rng), labels)
    assert metrics.result()["auc_error_bound"] < 1e-4


def test_logits_beyond_the_histogram_fall_into_the_outermost_bins() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.tensor([-50.0, -16.0, 0.0, 16.0, 99.0]), torch.tensor([0, 0, 1, 1, 1]))
    assert metrics.result()["auc"] == 1.0
    metrics = ClickMetrics()
    metrics.update(torch.tensor([20.0, 30.0]), torch.tensor([0, 1]))
    assert metrics.result()["auc"] == metrics.result()["auc_error_bound"] == 0.5


def test_losses_are_their_formulas() -> None:
    logits, labels, true = draw(2000)
    metrics = ClickMetrics()
    metrics.update(logits, labels, true)
    found = metrics.result()
    p, c = logits.sigmoid(), float(labels.mean())
    base = -c * math.log(c) - (1 - c) * math.log(1 - c)
    loss = float(F.binary_cross_entropy(p, labels))
    kl = true * (true / p).log() + (1 - true) * ((1 - true) / (1 - p)).log()
    assert (found["count"], found["click_rate"]) == (2000.0, c)
    assert found["logloss"] == pytest.approx(loss, rel=1e-9)
    assert found["ne"] == pytest.approx(loss / base, rel=1e-9)
    bayes = float(F.binary_cross_entropy(true, labels)) / base
    assert found["bayes_ne"] == pytest.approx(bayes, rel=1e-9)
    assert found["mean_kl"] == pytest.approx(float(kl.mean()), rel=1e-9)


def test_mean_kl_is_in_expectation_the_excess_of_ne_times_the_entropy() -> None:
    logits, labels, true = draw(200_000)
    metrics = ClickMetrics()
    metrics.update(logits, labels, true)
    found = metrics.result()
    c = found["click_rate"]
    base = -c * math.log(c) - (1 - c) * math.log(1 - c)
    assert (found["ne"] - found["bayes_ne"]) * base == pytest.approx(found["mean_kl"], abs=0.003)


def test_the_truth_itself_has_no_kl_and_bayes_ne() -> None:
    _, labels, true = draw(2000)
    metrics = ClickMetrics()
    metrics.update(torch.logit(true), labels, true)
    found = metrics.result()
    assert found["mean_kl"] == pytest.approx(0, abs=1e-12)
    assert found["ne"] == found["bayes_ne"] < 1


def test_predicting_the_base_rate_has_ne_one_and_auc_half() -> None:
    labels = torch.tensor([0.0, 0, 0, 1])
    metrics = ClickMetrics()
    metrics.update(torch.logit(torch.full((4,), 0.25, dtype=torch.float64)), labels)
    assert metrics.result()["ne"] == pytest.approx(1, abs=1e-12)
    assert metrics.result()["auc"] == 0.5


def test_sum_of_states_is_the_state_of_the_whole() -> None:
    logits, labels, true = draw(1000)
    whole, parts = ClickMetrics(), [ClickMetrics() for _ in range(3)]
    whole.update(logits, labels, true)
    for k, index in enumerate(torch.tensor_split(torch.arange(1000), [0, 10, 410])):
        parts[k % 3].update(logits[index], labels[index], true[index])
    states = [p.state() for p in parts]
    merged = ClickMetrics.from_state(torch.stack(states).sum(0))
    assert states[0].dim() == 1
    assert states[0].dtype == torch.float64
    assert merged.result() == pytest.approx(whole.result(), rel=1e-12)
    assert merged.result()["auc"] == whole.result()["auc"]  # counts: exact
    merged.update(logits, labels, true)
    assert merged.result()["count"] == 2000


def test_state_is_a_copy_and_its_length_is_stated() -> None:
    metrics = ClickMetrics(num_bins=8)
    state = metrics.state()
    assert state.numel() == 2 * 8 + 7
    state += 1
    assert metrics.result()["count"] == 0
    restored = ClickMetrics.from_state(state)
    state += 1
    assert restored.result()["count"] == 1


@pytest.mark.parametrize(
    "state", [torch.zeros(23), torch.zeros(2, 11).double(), torch.zeros(24).double()]
)
def test_what_is_not_a_state_is_refused(state: Tensor) -> None:
    with pytest.raises(InputError, match="a state is a 1-D float64 tensor"):
        ClickMetrics.from_state(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_dtype_with_gradients(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 1, dtype=dtype, requires_grad=True)
    metrics = ClickMetrics()
    metrics.update(logits, torch.tensor([0, 1, 0, 1, 1, 0]))
    assert metrics.result()["count"] == 6
    assert not metrics.state().requires_grad


def test_nothing_added_is_nan_and_an_empty_batch_changes_nothing() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.zeros(0), torch.zeros(0))
    assert metrics.result()["count"] == 0
    assert all(math.isnan(metrics.result()[name]) for name in ALL)
    logits, labels, true = draw(100)
    metrics.update(logits, labels, true)
    before = metrics.result()
    metrics.update(torch.zeros(0), torch.zeros(0))
    assert metrics.result() == before


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_a_logloss_but_no_auc_and_no_ne(label: int) -> None:
    metrics = ClickMetrics()
    metrics.update(torch.zeros(3), torch.full((3,), label), torch.full((3,), 0.5))
    found = metrics.result()
    assert found["logloss"] == pytest.approx(math.log(2))
    assert found["mean_kl"] == pytest.approx(0, abs=1e-12)
    nan = {name for name, value in found.items() if math.isnan(value)}
    assert nan == {"ne", "auc", "auc_error_bound", "bayes_ne"}


def test_truth_must_come_with_every_sample() -> None:
    logits, labels, true = draw(100)
    metrics = ClickMetrics()
    metrics.update(logits, labels, true)
    metrics.update(logits, labels)
    found = metrics.result()
    assert {n for n, v in found.items() if math.isnan(v)} == {"bayes_ne", "mean_kl"}


def test_certain_probabilities_lose_nothing_or_everything() -> None:
    sure = torch.logit(torch.tensor([0.0, 1.0]))
    right, wrong = ClickMetrics(), ClickMetrics()
    right.update(sure, torch.tensor([0, 1]), torch.tensor([0.0, 1.0]))
    wrong.update(sure, torch.tensor([1, 0]))
    found = right.result()
    assert (found["logloss"], found["mean_kl"], found["auc"]) == (0.0, 0.0, 1.0)
    assert (wrong.result()["logloss"], wrong.result()["auc"]) == (math.inf, 0.0)


def test_a_nan_logit_shows_from_then_on() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.tensor([math.nan, 1.0]), torch.tensor([0, 1]), torch.tensor([0.0, 0.5]))
    metrics.update(*draw(100))
    found = metrics.result()
    nan = {name for name, value in found.items() if math.isnan(value)}
    assert nan == {"logloss", "ne", "auc", "auc_error_bound", "mean_kl"}
    assert found["nan_predictions"] == 1


def test_wrong_inputs_are_named() -> None:
    metrics = ClickMetrics()
    with pytest.raises(InputError, match="2 labels were given for 3 logits"):
        metrics.update(torch.zeros(3), torch.zeros(2))
    with pytest.raises(InputError, match="2 true_probabilities were given for 3 logits"):
        metrics.update(torch.zeros(3), torch.zeros(3), torch.zeros(2))
    with pytest.raises(InputError, match="labels must be 0 or 1"):
        metrics.update(torch.zeros(1), torch.tensor([0.5]))
    with pytest.raises(InputError, match="must be from 0 to 1"):
        metrics.update(torch.zeros(1), torch.zeros(1), torch.tensor([-0.5]))
    with pytest.raises(InputError, match="num_bins is 0"):
        ClickMetrics(num_bins=0)
    assert metrics.result()["count"] == 0


def test_repr_shows_the_result() -> None:
    metrics = ClickMetrics()
    metrics.update(torch.zeros(2), torch.tensor([0, 1]))
    assert "ClickMetrics(count=2, click_rate=0.5, nan_predictions=0, logloss=0.693" in repr(metrics)
