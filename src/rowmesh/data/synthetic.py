"""Synthetic clicks: Zipf ids, normal dense features, labels from a planted truth or a coin.

Every batch is a function of (seed, rank, step), so ranks need not talk and runs can be repeated.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.data.planted import bias_for, hashed_normal, sigmoid, zipf_cdf
from rowmesh.errors import InputError, check_range, did_you_mean
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.tables import EmbeddingBagConfig, PoolingType

__all__ = ["CRITEO_KAGGLE", "EVAL_STEP", "LabelModel", "SyntheticClicks"]

# Rows of the 26 tables of the Criteo Display Advertising Challenge, as published with DLRM.
CRITEO_KAGGLE: Final[tuple[int, ...]] = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
EVAL_STEP: Final = 2**31
_CARDINALITIES = {"criteo-kaggle": CRITEO_KAGGLE}

# A generator's entropy is 32-bit words: [seed, rank, step] draws ids and dense features,
# [seed, 7, table] the popularity order; a fourth word keeps these two apart from both.
_LABELS, _CALIBRATION = 99, 98
_WORD = 2**32
_CALIBRATION_SAMPLES = 16_384
_SPARSE_SD, _DENSE_SD = 2.0, 0.5

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


class LabelModel(StrEnum):
    """Where labels come from: OPTIMISERS plants a weight on every row, COIN ignores the inputs."""

    OPTIMISERS = "optimisers"
    COIN = "coin"


class _Cache:
    """What is built once, on first use; not pickled, since it grows with the tables."""

    def __init__(self) -> None:
        self.cdfs: dict[int, _Floats] = {}
        self.orders: dict[int, _Ids] = {}
        self.bias: float | None = None

    def __reduce__(self) -> tuple[type["_Cache"], tuple[()]]:
        return _Cache, ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticClicks:
    """Click data with bounded Zipf ids and a known truth, for any number of ranks and steps.

    The row of popularity k (from 1) of a table of n rows is drawn with probability
    k^-alpha / sum_{j<=n} j^-alpha; a fixed permutation per table maps popularity to row id.
    Under ``labels="optimisers"`` a click has probability::

        p* = sigmoid(b0 + sum_f 1/sqrt(P_f) sum_{id in bag f} a[f, id] + w . dense)

    with a[f, id] of standard deviation 2 / sqrt(F), the same for rare and for frequent rows.
    The sum over a bag of P ids is divided by sqrt(P), which leaves the variance over samples as
    it is for P = 1. w has length 0.5. b0 makes the mean of p* `click_rate` (to about 0.01).
    a is a hash of (seed, table, row): no memory. The popularity order and the distribution of a
    table take 16 bytes a row, from the first batch on.

    Steps are disjoint random streams: train on 0, 1, ... and evaluate on `EVAL_STEP` + 0, 1, ...

    Args:
        cardinalities: Rows of each table, or ``"criteo-kaggle"``.
        cap: Upper limit on the rows of a table.
        alpha: Exponent of the popularity; 0 is uniform.
        pooling: Ids in a bag, for all tables or for each.
        batch_size: Samples a rank and step.
        num_dense: Dense features, standard normal.
        seed: Below 2^32. Changes the data and the truth.
        labels: A `LabelModel` or its value.
        click_rate: Mean label.
        held_out_batches: Batches of each rank kept for evaluation.

    Raises:
        InputError: If an argument is out of range or a name is unknown.
    """

    cardinalities: Sequence[int] | str = "criteo-kaggle"
    cap: int | None = None
    alpha: float = 1.05
    pooling: int | Sequence[int] = 1
    batch_size: int = 2048
    num_dense: int = 13
    seed: int = 1
    labels: LabelModel | str = LabelModel.OPTIMISERS
    click_rate: float = 0.25
    held_out_batches: int = 20
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_name("cardinalities", self.cardinalities, _CARDINALITIES)
        _check_name("labels", self.labels, [model.value for model in LabelModel])
        object.__setattr__(self, "labels", LabelModel(self.labels))
        for name in ("cardinalities", "pooling"):  # tuples: equal, hashable, not shared
            value = getattr(self, name)
            object.__setattr__(self, name, value if isinstance(value, str | int) else tuple(value))
        if len(self.pooling_factors) != len(self.num_rows):
            raise InputError(
                f"pooling has {len(self.pooling_factors)} entries for {len(self.num_rows)} "
                f"tables: give one integer, or one a table"
            )
        check_range("number of tables", len(self.num_rows), 1)
        check_range("cap", 1 if self.cap is None else self.cap, 1)
        check_range("rows of the smallest table", min(self.num_rows), 1)
        check_range("smallest pooling", min(self.pooling_factors), 1)
        check_range("batch_size", self.batch_size, 1, 2**31 - 1)
        check_range("held_out_batches", self.held_out_batches, 1, EVAL_STEP - 1)
        check_range("num_dense", self.num_dense, 0)
        check_range("seed", self.seed, 0, _WORD - 1)
        check_range("alpha", self.alpha, 0, 100)
        check_range("click_rate", self.click_rate, 1e-6, 1 - 1e-6)

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of each table, after the cap."""
        given = self.cardinalities
        rows = _CARDINALITIES[given] if isinstance(given, str) else given
        return tuple(n if self.cap is None else min(n, self.cap) for n in rows)

    @property
    def pooling_factors(self) -> tuple[int, ...]:
        """Ids in a bag, for each table."""
        given = self.pooling
        return (given,) * len(self.num_rows) if isinstance(given, int) else tuple(given)

    @property
    def feature_names(self) -> list[str]:
        """``cat_0``, ``cat_1``, ...: one feature a table."""
        return [f"cat_{f}" for f in range(len(self.num_rows))]

    def tables(
        self, embedding_dim: int, *, pooling: PoolingType = PoolingType.SUM
    ) -> list[EmbeddingBagConfig]:
        """Configurations ``t_cat_0``, ``t_cat_1``, ... of the tables the features index."""
        return [
            EmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=rows,
                embedding_dim=embedding_dim,
                feature_names=[name],
                pooling=pooling,
            )
            for name, rows in zip(self.feature_names, self.num_rows, strict=True)
        ]

    def batch_at(self, rank: int, step: int) -> Batch:
        """The batch of ``rank`` at ``step``: a function of these, of the seed and of nothing else.

        Labels do not disturb the inputs: ids and dense features are the same for every
        `LabelModel`. `Batch.true_probabilities` is p* (`click_rate` throughout for a coin).

        Raises:
            InputError: If rank or step is negative, or 2^32 or more.
        """
        check_range("rank", rank, 0, _WORD - 1)
        check_range("step", step, 0, _WORD - 1)
        rng = np.random.default_rng([self.seed, rank, step])
        dense, ids = self._draw_inputs(rng, self.batch_size)
        if self.labels is LabelModel.COIN:
            true = np.full(self.batch_size, self.click_rate)
        else:
            true = sigmoid(self._bias() + self._signal(dense, ids))
            rng = np.random.default_rng([self.seed, rank, step, _LABELS])
        clicks = rng.random(self.batch_size) < true
        lengths = np.repeat(np.array(self.pooling_factors, dtype=np.int32), self.batch_size)
        return Batch(
            dense_features=torch.from_numpy(dense),
            sparse_features=KeyedJaggedTensor(
                self.feature_names,
                torch.from_numpy(np.concatenate(ids)),
                lengths=torch.from_numpy(lengths),
                stride=self.batch_size,
            ),
            labels=torch.from_numpy(clicks.astype(np.float32)),
            true_probabilities=torch.from_numpy(true.astype(np.float32)),
        )

    @property
    def steps_per_epoch(self) -> None:
        """None: the data has no end."""

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        """`batch_at` of this rank from step ``start`` on; another world only adds ranks."""
        return (self.batch_at(rank, step) for step in itertools.count(start))

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        """`batch_at` of this rank at `EVAL_STEP` and after, `held_out_batches` of them."""
        steps = range(EVAL_STEP, EVAL_STEP + self.held_out_batches)
        return (self.batch_at(rank, step) for step in steps)

    def rows_by_popularity(self, table: int) -> Tensor:
        """``[rows]``: row ids of a table, the most popular first."""
        return torch.from_numpy(self._order(table).copy())

    def planted_weights(self, table: int, ids: Tensor) -> Tensor:
        """a[table, id] for each of ``ids``, in float64."""
        return torch.from_numpy(self._weights([table], [ids.numpy()]))

    def _order(self, table: int) -> _Ids:
        orders = self._cache.orders
        if table not in orders:
            rng = np.random.default_rng([self.seed, 7, table])
            orders[table] = rng.permutation(self.num_rows[table]).astype(np.int64, copy=False)
        return orders[table]

    def _cdf(self, num_rows: int) -> _Floats:
        cdfs = self._cache.cdfs
        if num_rows not in cdfs:
            cdfs[num_rows] = zipf_cdf(num_rows, self.alpha)
        return cdfs[num_rows]

    def _draw_inputs(
        self, rng: np.random.Generator, num_samples: int
    ) -> tuple[npt.NDArray[np.float32], list[_Ids]]:
        """Dense features, then the ids of one table after the other: the order fixes the bits."""
        dense = rng.standard_normal((num_samples, self.num_dense), dtype=np.float32)
        ids = []
        sizes = zip(self.num_rows, self.pooling_factors, strict=True)
        for table, (rows, factor) in enumerate(sizes):
            uniform = rng.random(num_samples * factor)
            ids.append(self._order(table)[np.searchsorted(self._cdf(rows), uniform)])
        return dense, ids

    def _weights(self, tables: Sequence[int], ids: Sequence[_Ids]) -> _Floats:
        owner = np.repeat(np.array(tables) + 1, [len(i) for i in ids])
        normal = hashed_normal(self.seed, owner, np.concatenate(ids))
        return normal * (_SPARSE_SD / math.sqrt(len(self.num_rows)))

    def _signal(self, dense: npt.NDArray[np.float32], ids: Sequence[_Ids]) -> _Floats:
        """The logit of each sample, without b0."""
        columns = np.arange(self.num_dense)
        direction = hashed_normal(self.seed, 0 * columns, columns)  # 0: no table's owner
        logits = (dense * direction).sum(axis=1) * _DENSE_SD
        logits /= max(float(np.linalg.norm(direction)), 1e-30)
        weights = self._weights(range(len(ids)), ids)
        ends = np.cumsum([len(i) for i in ids])
        for part, factor in zip(np.split(weights, ends[:-1]), self.pooling_factors, strict=True):
            logits += part.reshape(-1, factor).sum(axis=1) / math.sqrt(factor)
        return np.asarray(logits, dtype=np.float64)

    def _bias(self) -> float:
        """b0 by bisection: the mean of p* over a fixed sample of its own is `click_rate`."""
        if self._cache.bias is None:
            rng = np.random.default_rng([self.seed, 0, 0, _CALIBRATION])
            signal = self._signal(*self._draw_inputs(rng, _CALIBRATION_SAMPLES))
            self._cache.bias = bias_for(signal, self.click_rate)
        return self._cache.bias


def _check_name(option: str, value: object, known: Collection[str]) -> None:
    if isinstance(value, str) and value not in known:
        hint, names = did_you_mean(value, known), ", ".join(sorted(known))
        raise InputError(f"unknown {option} {value!r}{hint}" + f" ({names})" * (names not in hint))
