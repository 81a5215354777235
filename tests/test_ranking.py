"""Each sentence of `rowmesh.train.ranking`, against brute force."""

import math

import pytest
import torch
from torch import Tensor

import rowmesh as rm
from rowmesh.cli.view import View
from rowmesh.errors import InputError
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.train.inputs import checked
from rowmesh.train.ranking import RankingMetrics
from rowmesh.train.stop import Stop


def draw(num_groups: int, size: int, *, levels: int = 10**6) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and groups; the positive is anywhere in its group, groups are mixed up."""
    rng = torch.Generator().manual_seed(size)
    scores = (torch.rand((num_groups, size), generator=rng) * levels).round()
    labels = torch.zeros(num_groups, size)
    labels[torch.arange(num_groups), torch.randint(size, (num_groups,), generator=rng)] = 1.0
    groups = (7 * torch.arange(num_groups)).unsqueeze(1).expand(-1, size)
    order = torch.randperm(num_groups * size, generator=rng)
    return scores.reshape(-1)[order], labels.reshape(-1)[order], groups.reshape(-1)[order]


def brute(scores: Tensor, labels: Tensor, groups: Tensor) -> tuple[float, float]:
    hits, gains = [], []
    for group in groups.unique():
        own, is_positive = scores[groups == group].tolist(), labels[groups == group].tolist()
        best = next(s for s, y in zip(own, is_positive, strict=True) if y)
        rank = sum(1 for s in own if s >= best)  # with itself
        hits.append(float(rank <= 10))
        gains.append(1 / math.log2(rank + 1) if rank <= 10 else 0.0)
    return sum(hits) / len(hits), sum(gains) / len(gains)


@pytest.mark.parametrize(("size", "levels"), [(1, 5), (12, 3), (30, 20), (100, 10**6)])
def test_hr_and_ndcg_equal_brute_force_with_ties_against_the_positive(
    size: int, levels: int
) -> None:
    scores, labels, groups = draw(40, size, levels=levels)
    metrics = RankingMetrics()
    metrics.update(scores, labels, groups)
    hr, ndcg = brute(scores, labels, groups)
    found = metrics.result()
    assert found == pytest.approx({"groups": 40, "hr_at_10": hr, "ndcg_at_10": ndcg})
    assert size == 1 or 0 < found["hr_at_10"] < 1 or levels == 3


def test_by_hand() -> None:
    labels, groups = torch.tensor([1.0] + [0.0] * 11), torch.zeros(12, dtype=torch.int64)
    for ahead, hr, ndcg in ((0, 1, 1.0), (2, 1, 0.5), (9, 1, 1 / math.log2(11)), (10, 0, 0.0)):
        metrics = RankingMetrics()
        scores = torch.tensor([0.0] + [1.0] * ahead + [-1.0] * (11 - ahead))
        metrics.update(scores, labels, groups)
        assert metrics.result() == pytest.approx({"groups": 1, "hr_at_10": hr, "ndcg_at_10": ndcg})


def test_a_model_that_says_the_same_of_all_gets_nothing() -> None:
    labels, groups = torch.tensor([1.0] + [0.0] * 11), torch.zeros(12, dtype=torch.int64)
    for scores in (torch.zeros(12), torch.full((12,), math.nan)):
        metrics = RankingMetrics()
        metrics.update(scores, labels, groups)
        assert metrics.result()["hr_at_10"] == 0.0


def test_states_of_streams_add_up_exactly() -> None:
    whole, parts = RankingMetrics(), [RankingMetrics(), RankingMetrics(), RankingMetrics()]
    scores, labels, groups = draw(30, 20)
    whole.update(scores, labels, groups)
    for part, metrics in enumerate(parts[:2]):
        mine = groups % 2 == part
        metrics.update(scores[mine], labels[mine], groups[mine])
    parts[2].update(scores[:0], labels[:0], groups[:0])
    added = RankingMetrics.from_state(sum(p.state() for p in parts))
    assert added.result() == pytest.approx(whole.result(), rel=1e-12)
    assert RankingMetrics().result() == {}


def test_a_group_that_is_not_whole_is_refused() -> None:
    labels, groups = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([4, 4, 9])
    with pytest.raises(InputError, match=r"group 9 has 0 samples of label 1.*whole in one batch"):
        RankingMetrics().update(torch.zeros(3), labels, groups)
    with pytest.raises(InputError, match="group 4 has 2 samples"):
        RankingMetrics().update(torch.zeros(2), torch.ones(2), torch.tensor([4, 4]))
    with pytest.raises(InputError, match=r"groups must have shape \[3\], got \[2\]"):
        RankingMetrics().update(torch.zeros(3), labels, groups[:2])


def test_a_batch_with_half_a_group_is_bad_input_on_all_ranks() -> None:
    features = KeyedJaggedTensor.from_dense({"a": torch.tensor([1, 2])})
    batch = Batch(
        dense_features=torch.zeros(2, 0),
        sparse_features=features,
        labels=torch.zeros(2),
        groups=torch.tensor([5, 5]),
    )
    (rejected,) = checked(
        iter([batch]), num_dense=0, first_step=3, device=torch.device("cpu"), what="step"
    )
    with pytest.raises(InputError, match="step 3: group 5 has 0 samples"):
        rejected.sparse_features.keys()


def test_they_are_printed_where_there_are_groups(capsys: pytest.CaptureFixture[str]) -> None:
    view = View(num_steps=2, world=1, first_step=0, stop=Stop(rm.init_mesh()), rule="sgd")
    found = {"auc": 0.5, "ne": 1.0, "logloss": 0.7}
    view.show_evaluation(1, found)
    view.show_evaluation(1, found | {"groups": 1200.0, "hr_at_10": 0.25, "ndcg_at_10": 0.125})
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("AUC 0.5000, NE 1.0000, logloss 0.7000")
    assert "HR" not in first
    assert "HR@10 0.2500, NDCG@10 0.1250 of 1,200 groups, AUC 0.5000" in second
