"""Each sentence of `rowmesh.data.synthetic` about the data, checked on small tables."""

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rowmesh.data import CRITEO_KAGGLE, EVAL_STEP, LabelModel, SyntheticClicks
from rowmesh.errors import InputError
from rowmesh.features import Batch
from rowmesh.tables import PoolingType
from rowmesh.train.metrics import ClickMetrics, exact_auc

ROWS = (1000, 7, 1, 300, 1000)
PEER = Path(__file__).parents[1] / ".." / "shared" / "peer" / "synth.py"


@pytest.fixture(scope="module")
def peer() -> Any:
    if not PEER.exists():
        pytest.skip("the peer's generator, ../shared/peer/synth.py, is not beside this repository")
    spec = importlib.util.spec_from_file_location("peer_synth", PEER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def criteo() -> SyntheticClicks:
    return SyntheticClicks(cap=10_000)


def assert_same_inputs(a: Batch, b: Batch) -> None:
    assert torch.equal(a.dense_features, b.dense_features)
    assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
    assert torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())


@pytest.mark.parametrize("pooling", [1, 3])
@pytest.mark.parametrize("alpha", [1.05, 0.0])
def test_inputs_and_coin_labels_are_those_of_the_peer_bit_for_bit(
    peer: Any, pooling: int, alpha: float
) -> None:
    theirs = peer.Gen(list(ROWS), alpha=alpha, pooling=pooling, batch=64, dense=5, seed=3)
    ours = SyntheticClicks(
        cardinalities=ROWS,
        alpha=alpha,
        pooling=pooling,
        batch_size=64,
        num_dense=5,
        seed=3,
        labels="coin",
    )
    for rank, step in ((0, 0), (5, 17), (7, 1)):
        dense, ids, labels = theirs.batch_at(rank, step)
        batch = ours.batch_at(rank, step)
        assert batch.dense_features.dtype == torch.float32
        assert np.array_equal(batch.dense_features.numpy(), dense)
        assert np.array_equal(batch.sparse_features.values().numpy(), np.concatenate(ids))
        assert batch.labels.dtype == torch.float32
        assert np.array_equal(batch.labels.numpy(), labels)


def test_defaults_are_the_peers(peer: Any) -> None:
    assert list(CRITEO_KAGGLE) == peer.CRITEO_KAGGLE
    ours = SyntheticClicks(cap=500, labels="coin")
    assert list(ours.num_rows) == peer.rows_per_table(500)
    dense, ids, labels = peer.Gen(peer.rows_per_table(500)).batch_at(1, 2)
    batch = ours.batch_at(1, 2)
    assert np.array_equal(batch.dense_features.numpy(), dense)
    assert np.array_equal(batch.sparse_features.values().numpy(), np.concatenate(ids))
    assert np.array_equal(batch.labels.numpy(), labels)


def test_batch_is_a_function_of_seed_rank_and_step_whatever_came_before() -> None:
    make = dict(cardinalities=ROWS, batch_size=32)
    used = SyntheticClicks(**make)  # type: ignore[arg-type]
    for step in range(3):
        used.batch_at(1, step)
    a, b = used.batch_at(0, 5), SyntheticClicks(**make).batch_at(0, 5)  # type: ignore[arg-type]
    assert_same_inputs(a, b)
    assert torch.equal(a.labels, b.labels)
    assert a.true_probabilities is not None
    assert b.true_probabilities is not None
    assert torch.equal(a.true_probabilities, b.true_probabilities)


@pytest.mark.parametrize(
    ("rank", "step", "seed"), [(1, 0, 1), (0, 1, 1), (0, EVAL_STEP, 1), (0, 0, 2)]
)
def test_other_ranks_steps_and_seeds_are_other_streams(rank: int, step: int, seed: int) -> None:
    here = SyntheticClicks(cardinalities=ROWS, batch_size=256).batch_at(0, 0)
    there = SyntheticClicks(cardinalities=ROWS, batch_size=256, seed=seed).batch_at(rank, step)
    assert not bool((here.dense_features == there.dense_features).any(dim=1).all())
    assert not torch.equal(here.sparse_features.values(), there.sparse_features.values())
    assert not torch.equal(here.labels, there.labels)


def test_labels_do_not_disturb_the_inputs() -> None:
    coin, planted = (
        SyntheticClicks(cardinalities=ROWS, batch_size=128, labels=labels).batch_at(2, 3)
        for labels in LabelModel
    )
    assert_same_inputs(coin, planted)
    assert not torch.equal(coin.labels, planted.labels)


def test_a_coin_says_the_click_rate_throughout() -> None:
    data = SyntheticClicks(cardinalities=ROWS, batch_size=20_000, labels="coin", click_rate=0.1)
    batch = data.batch_at(0, 0)
    assert batch.true_probabilities is not None
    assert bool((batch.true_probabilities == torch.tensor(0.1)).all())
    assert float(batch.labels.mean()) == pytest.approx(0.1, abs=0.01)  # 5 standard errors


@pytest.mark.parametrize("alpha", [0.0, 1.05, 1.5])
def test_ids_are_bounded_zipf_through_a_permutation(alpha: float) -> None:
    rows, samples = 200, 100_000
    data = SyntheticClicks(cardinalities=[rows], alpha=alpha, batch_size=samples, labels="coin")
    order = data.rows_by_popularity(0)
    assert torch.equal(order.sort().values, torch.arange(rows))
    assert not torch.equal(order, torch.arange(rows))
    ids = data.batch_at(0, 0).sparse_features.values()
    share = torch.bincount(ids, minlength=rows)[order].double() / samples
    expected = torch.arange(1, rows + 1, dtype=torch.float64) ** -alpha
    expected /= expected.sum()
    noise = (expected * (1 - expected) / samples).sqrt()
    assert float(((share - expected) / noise).abs().max()) < 5
    assert float((((share - expected) / noise) ** 2).mean()) == pytest.approx(1, abs=0.5)


def test_pooling_may_differ_by_table() -> None:
    data = SyntheticClicks(cardinalities=[50, 60, 70], pooling=[1, 4, 2], batch_size=8)
    features = data.batch_at(0, 0).sparse_features
    assert features.keys() == data.feature_names == ["cat_0", "cat_1", "cat_2"]
    assert [jagged.lengths().tolist() for jagged in features.to_dict().values()] == [
        [1] * 8,
        [4] * 8,
        [2] * 8,
    ]
    assert features.lengths().dtype == torch.int32
    for key, rows in zip(features.keys(), data.num_rows, strict=True):
        assert 0 <= int(features[key].values().min()) <= int(features[key].values().max()) < rows


def test_tables_name_one_feature_each() -> None:
    tables = SyntheticClicks(cardinalities=[50, 600], cap=100).tables(8, pooling=PoolingType.MEAN)
    assert [(t.name, t.num_embeddings, t.embedding_dim) for t in tables] == [
        ("t_cat_0", 50, 8),
        ("t_cat_1", 100, 8),
    ]
    assert [t.feature_names for t in tables] == [["cat_0"], ["cat_1"]]
    assert {t.pooling for t in tables} == {PoolingType.MEAN}
    assert SyntheticClicks().tables(4)[2].num_embeddings == 10131227


def test_planted_probability_is_the_stated_formula() -> None:
    data = SyntheticClicks(cardinalities=[90, 40], pooling=[1, 4], batch_size=500, num_dense=3)
    first, second = data.batch_at(0, 0), data.batch_at(0, 1)

    def rest(batch: Batch) -> torch.Tensor:
        assert batch.true_probabilities is not None
        one, four = (batch.sparse_features[k].values() for k in ("cat_0", "cat_1"))
        sparse = data.planted_weights(0, one)
        sparse = sparse + data.planted_weights(1, four).view(-1, 4).sum(1) / 4**0.5
        return torch.logit(batch.true_probabilities.double()) - sparse

    with_one = torch.cat([first.dense_features, torch.ones(500, 1)], dim=1).double()
    fit = torch.linalg.lstsq(with_one, rest(first)[:, None]).solution
    assert float(fit[:3].norm()) == pytest.approx(0.5, abs=1e-4)
    with_one = torch.cat([second.dense_features, torch.ones(500, 1)], dim=1).double()
    torch.testing.assert_close((with_one @ fit)[:, 0], rest(second), atol=1e-4, rtol=0)


def test_planted_truth_is_learnable_and_calibrated(criteo: SyntheticClicks) -> None:
    metrics = ClickMetrics()
    batches = [criteo.batch_at(rank, EVAL_STEP + i) for rank in (0, 1) for i in range(10)]
    for batch in batches:
        assert batch.true_probabilities is not None
        metrics.update(torch.logit(batch.true_probabilities), batch.labels)
    found = metrics.result()
    assert found["auc"] > 0.8
    assert found["ne"] < 0.75
    true = torch.cat([b.true_probabilities for b in batches if b.true_probabilities is not None])
    labels = torch.cat([b.labels for b in batches])
    for decile in true.argsort().chunk(10):  # 4,096 samples: standard error at most 0.008
        assert float(labels[decile].mean()) == pytest.approx(float(true[decile].mean()), abs=0.035)
    assert float(labels.mean()) == pytest.approx(float(true.mean()), abs=0.01)
    assert exact_auc(true, labels) == pytest.approx(found["auc"], abs=1e-4)


@pytest.mark.parametrize("click_rate", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_mean_probability_is_the_click_rate(click_rate: float, seed: int) -> None:
    data = SyntheticClicks(cap=1000, click_rate=click_rate, seed=seed, batch_size=20_000)
    true = data.batch_at(1, 1).true_probabilities
    assert true is not None
    assert float(true.mean()) == pytest.approx(click_rate, abs=0.01)


def test_pooling_keeps_the_variance_of_the_logit() -> None:
    deviations = []
    for pooling in (1, 9):
        data = SyntheticClicks(cap=1000, pooling=pooling, batch_size=10_000)
        true = data.batch_at(0, 0).true_probabilities
        assert true is not None
        deviations.append(float(torch.logit(true.double()).std()))
    assert deviations[0] == pytest.approx(deviations[1], rel=0.04)
    assert 1.5 < deviations[0] < 2.2


def test_rare_and_frequent_rows_carry_equal_signal() -> None:
    data = SyntheticClicks(cardinalities=[100_000] * 4)
    order = data.rows_by_popularity(2)
    weights = data.planted_weights(2, order)
    for part in weights.chunk(10):  # 10,000 rows: 0.7 % standard error of the deviation
        assert float(part.std()) == pytest.approx(2 / 4**0.5, rel=0.03)
        assert float(part.mean()) == pytest.approx(0, abs=0.05)
    quantiles = torch.quantile(weights, torch.tensor([0.0228, 0.1587, 0.8413, 0.9772]).double())
    torch.testing.assert_close(
        quantiles, torch.tensor([-2, -1, 1, 2.0]).double(), atol=0.04, rtol=0
    )


def test_weights_are_a_hash_of_seed_table_and_row_and_take_no_memory() -> None:
    data = SyntheticClicks(cardinalities=[2**40] * 2)
    ids = torch.tensor([0, 1, 2, 3, 2**40 - 1])
    a, b = data.planted_weights(0, ids), data.planted_weights(1, ids)
    c = SyntheticClicks(cardinalities=[2**40] * 2, seed=2).planted_weights(0, ids)
    assert torch.equal(a.flip(0), data.planted_weights(0, ids.flip(0)))
    assert len(set(torch.cat([a, b, c]).tolist())) == 15


def test_no_dense_features_is_fine() -> None:
    batch = SyntheticClicks(cardinalities=ROWS, num_dense=0, batch_size=4).batch_at(0, 0)
    assert batch.dense_features.shape == (4, 0)
    assert batch.true_probabilities is not None
    assert bool(batch.true_probabilities.isfinite().all())


def test_a_used_configuration_is_equal_hashable_and_pickles_small() -> None:
    used = SyntheticClicks(cardinalities=[50_000], pooling=[2], batch_size=4)
    batch = used.batch_at(0, 0)
    fresh = SyntheticClicks(cardinalities=(50_000,), pooling=(2,), batch_size=4)
    assert used == fresh
    assert hash(used) == hash(fresh)
    pickled = pickle.dumps(used)
    assert len(pickled) < 2_000
    assert_same_inputs(batch, pickle.loads(pickled).batch_at(0, 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "optimizers"}, "unknown labels 'optimizers': did you mean 'optimisers'"),
        ({"labels": "towers"}, "unknown labels 'towers'.*coin, optimisers"),
        ({"labels": "xyz"}, "unknown labels 'xyz': known are coin, optimisers$"),
        ({"cardinalities": "criteo"}, "did you mean 'criteo-kaggle'"),
        ({"cardinalities": []}, "number of tables is 0"),
        ({"cardinalities": [5, 0]}, "rows of the smallest table is 0, but must be at least 1"),
        ({"cap": 0}, "cap is 0"),
        ({"pooling": [1, 2]}, "pooling has 2 entries for 26 tables"),
        ({"pooling": 0}, "smallest pooling is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_dense": -1}, "num_dense is -1"),
        ({"seed": 2**32}, "seed is 4294967296, but must be from 0 to 4294967295"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"click_rate": 1.0}, "click_rate is 1.0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SyntheticClicks(**options)


@pytest.mark.parametrize(("rank", "step"), [(-1, 0), (0, -1), (0, 2**32)])
def test_rank_and_step_are_words(rank: int, step: int) -> None:
    with pytest.raises(InputError, match="but must be from 0"):
        SyntheticClicks(cardinalities=[3]).batch_at(rank, step)
