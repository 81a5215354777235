"""Each sentence of `SyntheticSequences` and `Drift` about the data, checked on small tables."""

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import torch

from rowmesh.data import SyntheticSequences
from rowmesh.data.drift import Drift
from rowmesh.errors import InputError
from rowmesh.features import Batch
from rowmesh.train.metrics import exact_auc
from rowmesh.train.model import ModelConfig, build_model
from rowmesh.train.planning import assume_stats

DATA = SyntheticSequences(num_items=400, mean_length=6.0, longest=20, batch_size=512, drift_every=3)


def same(a: Batch, b: Batch) -> bool:
    pairs = [
        (a.sparse_features.values(), b.sparse_features.values()),
        (a.sparse_features.lengths(), b.sparse_features.lengths()),
        (a.labels, b.labels),
        (a.true_probabilities, b.true_probabilities),
    ]
    return all(torch.equal(x, y) for x, y in pairs)  # type: ignore[arg-type]


def test_a_batch_is_a_function_of_settings_rank_and_step() -> None:
    fresh = pickle.loads(pickle.dumps(DATA))
    steps = [5, 0, 11, 2]  # in any order, with other calls between
    first = {step: DATA.batch_at(1, step) for step in steps}
    DATA.row_probabilities(30)
    list(DATA.held_out(rank=0, world=1))
    assert all(same(fresh.batch_at(1, step), first[step]) for step in reversed(steps))
    found = list(itertools.islice(DATA.batches(rank=1, world=4, start=4), 2))
    assert same(found[1], first[5])
    assert not same(DATA.batch_at(0, 5), first[5])
    assert not same(dataclasses.replace(DATA, seed=2).batch_at(1, 5), first[5])


def test_histories_have_the_lengths_that_are_promised() -> None:
    data = dataclasses.replace(DATA, batch_size=50_000, drift_every=None)
    lengths = data.batch_at(0, 0).sparse_features["history"].lengths().numpy()
    assert lengths.max() == 20
    counts = np.bincount(lengths, minlength=21) / len(lengths)
    ratio = 6 / 7
    expected = ratio ** np.arange(21) / sum(ratio**n for n in range(21))
    np.testing.assert_allclose(data.length_probabilities, expected)
    assert np.abs(counts - expected).max() < 5 * (0.25 / 50_000) ** 0.5
    assert data.mean_requests == pytest.approx(1 + (expected * np.arange(21)).sum())
    assert 1 + lengths.mean() == pytest.approx(data.mean_requests, rel=0.02)
    assert (lengths == 0).any()


@pytest.mark.parametrize("step", [0, 40])
def test_requests_follow_the_row_probabilities_of_the_step(step: int) -> None:
    data = dataclasses.replace(DATA, batch_size=20_000)
    chances = data.row_probabilities(step)
    assert chances.sum() == pytest.approx(1.0)
    zipf = np.arange(1, 401) ** -1.2
    np.testing.assert_allclose(np.sort(chances)[::-1], zipf / zipf.sum())
    for feature in ("history", "candidate"):
        ids = data.batch_at(0, step).sparse_features[feature].values().numpy()
        shares = np.bincount(ids, minlength=400) / len(ids)
        spread = np.sqrt(chances * (1 - chances) / len(ids))
        assert (np.abs(shares - chances) < 6 * spread + 1e-9).all()


def test_ids_are_permuted() -> None:
    assert not np.array_equal(np.argsort(-DATA.row_probabilities(0)), np.arange(400))


@pytest.mark.parametrize(
    ("rows", "head", "end", "swapped"),
    [(150_000, 1000, 100_000, 50), (100_000, 1000, 100_000, 50), (20_000, 200, 20_000, 10),
     (400, 4, 400, 1), (3, 1, 3, 1)],
)  # fmt: skip
def test_drift_swaps_some_of_the_head_with_ranks_further_down(
    rows: int, head: int, end: int, swapped: int
) -> None:
    drift = Drift(rows, every=10, seed=5)
    before = drift.order(9)
    after = drift.order(10)
    moved = np.flatnonzero(before != after)
    assert np.array_equal(np.sort(after), np.arange(rows))
    assert (moved < head).sum() == (moved >= head).sum() == swapped
    assert moved.max() < end
    places = np.empty(rows, dtype=np.int64)
    places[after] = np.arange(rows)
    for place in moved[moved < head]:
        assert before[places[before[place]]] == after[place]  # who came is where who left was


def test_drift_comes_every_so_many_steps_and_can_be_off() -> None:
    drift = Drift(400, every=10, seed=5)
    orders = [drift.order(step) for step in (0, 9, 10, 19, 20)]
    equal = [np.array_equal(a, b) for a, b in itertools.pairwise(orders)]
    assert equal == [True, False, True, False]
    assert np.array_equal(drift.order(0), orders[0])
    still = Drift(400, every=None, seed=5)
    assert np.array_equal(still.order(10**6), orders[0])
    assert Drift(1, every=1, seed=5).order(7).tolist() == [0]


def test_drift_leaves_the_truth_with_the_row() -> None:
    later, early = DATA.batch_at(0, 60), dataclasses.replace(DATA, drift_every=None)
    features = later.sparse_features
    lengths = features["history"].lengths().numpy()
    signal = early._signal(lengths, features.values().numpy())
    true = 1 / (1 + np.exp(-(early._bias() + signal)))
    assert later.true_probabilities is not None
    np.testing.assert_allclose(later.true_probabilities.numpy(), true, rtol=1e-5)


def test_labels_come_from_the_truth_and_there_is_something_to_learn() -> None:
    data = dataclasses.replace(DATA, batch_size=50_000, click_rate=0.3)
    batch = data.batch_at(0, 0)
    true = batch.true_probabilities
    assert true is not None
    assert float(true.mean()) == pytest.approx(0.3, abs=0.015)
    assert float(batch.labels.mean()) == pytest.approx(float(true.mean()), abs=0.01)
    assert exact_auc(true, batch.labels) > 0.7
    lengths = batch.sparse_features["history"].lengths()
    candidates = batch.sparse_features["candidate"].values()
    hot = candidates == candidates.mode().values  # one candidate: only the history is left
    assert float(true[hot & (lengths > 0)].std()) > 0.05
    assert float(true[hot & (lengths == 0)].std()) == pytest.approx(0.0, abs=1e-6)


def test_held_out_batches_have_the_popularity_of_their_step() -> None:
    data = dataclasses.replace(DATA, held_out_batches=3, batch_size=20_000)
    held = list(data.held_out(rank=0, world=1))
    assert len(held) == 3
    assert not same(held[0], data.batch_at(0, 0))
    later = dataclasses.replace(data, held_out_step=300)
    for source, step in ((data, 0), (later, 300)):
        ids = next(source.held_out(rank=0, world=1)).sparse_features["history"].values().numpy()
        shares = np.bincount(ids, minlength=400) / len(ids)
        assert np.abs(shares - data.row_probabilities(step)).max() < 0.01
    gap = data.row_probabilities(0) - data.row_probabilities(300)
    assert np.abs(gap).max() > 0.02


def test_assumed_accesses_are_of_the_sources_own_law() -> None:
    model = build_model(ModelConfig(kind="din", dim=4), DATA, seed=1)
    accesses = assume_stats(model, DATA).tables["item"]
    assert accesses.requests == pytest.approx(512 * DATA.mean_requests)
    chances = DATA.row_probabilities(0)
    distinct = (1 - (1 - chances) ** accesses.requests).sum()
    assert accesses.distinct == pytest.approx(distinct, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_items": 0},
        {"alpha": -1.0},
        {"mean_length": -1.0},
        {"longest": 0},
        {"drift_every": 0},
        {"batch_size": 0},
        {"click_rate": 1.0},
        {"held_out_batches": 0},
        {"held_out_step": -1},
        {"seed": 2**32},
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, float]) -> None:
    (name,) = changes
    with pytest.raises(InputError, match=f"{name} is "):
        SyntheticSequences(**changes)  # type: ignore[arg-type]


def test_ranks_and_steps_out_of_range_are_named() -> None:
    with pytest.raises(InputError, match="step is -1"):
        DATA.batch_at(0, -1)
    with pytest.raises(InputError, match="rank is -1"):
        DATA.batch_at(-1, 0)
