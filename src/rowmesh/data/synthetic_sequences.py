"""Synthetic sequences: Zipf items whose popularity drifts, labels from a planted truth."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rowmesh.data.drift import Drift
from rowmesh.data.planted import bias_for, hashed_bits, hashed_normal, sigmoid, zipf_cdf
from rowmesh.data.synthetic import EVAL_STEP
from rowmesh.errors import check_range
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.tables import EmbeddingConfig

__all__ = ["SyntheticSequences"]

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]
_WORD = 2**32
_LABELS, _CALIBRATION = 99, 98  # fourth words of a generator's entropy, besides those of Drift
_CALIBRATION_SAMPLES = 16_384
_KINDS, _KIND_WEIGHT, _ITEM_SD = 8, 6.0, 1.0
_KIND_OWNER, _ITEM_OWNER = 1, 2


class _Cache:
    """What is built once, on first use; not pickled, since it grows with the table."""

    def __init__(self) -> None:
        self.drift: Drift | None = None
        self.cdf: _Floats | None = None
        self.bias: float | None = None

    def __reduce__(self) -> tuple[type["_Cache"], tuple[()]]:
        return _Cache, ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticSequences:
    """Histories and candidates from one table, with a known truth, for any ranks and steps.

    Every item, of a history or a candidate, is drawn by itself: the row of popularity k (from 1)
    with probability k^-alpha / sum_{j<=num_items} j^-alpha. A permutation maps popularity to row;
    it drifts as `Drift` says. A history has n items with probability proportional to q^n for n
    from 0 to ``longest``, q = mean / (1 + mean). Every item is of one of 8 kinds and has a weight
    a of standard deviation 1, both a hash of (seed, row), which drift leaves with the row::

        p* = sigmoid(b0 + a[candidate] + 6 (share - 1/8))

    with share the part of the history that is of the candidate's kind; without history the last
    term is 0. b0 makes the mean of p* `click_rate` at the first order (to about 0.01).

    Args:
        num_items: Rows of the table.
        alpha: Exponent of the popularity; 0 is uniform.
        mean_length: Of a history, were it not for ``longest``.
        longest: Items of a history, at most.
        drift_every: Steps between changes of popularity; None for none.
        batch_size: Samples a rank and step.
        click_rate: Mean label.
        held_out_batches: Batches of each rank kept for evaluation.
        held_out_step: The step whose popularity these have.
        seed: Below 2^32. Changes the data and the truth.

    Raises:
        InputError: If an argument is out of range.
    """

    num_items: int = 100_000
    alpha: float = 1.2
    mean_length: float = 20.0
    longest: int = 50
    drift_every: int | None = None
    batch_size: int = 1024
    click_rate: float = 0.25
    held_out_batches: int = 16
    held_out_step: int = 0
    seed: int = 1
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range("num_items", self.num_items, 1)
        check_range("alpha", self.alpha, 0, 100)
        check_range("mean_length", self.mean_length, 0, 1e9)
        check_range("longest", self.longest, 1, 2**31 - 1)
        check_range("drift_every", 1 if self.drift_every is None else self.drift_every, 1)
        check_range("batch_size", self.batch_size, 1, 2**31 - 1)
        check_range("click_rate", self.click_rate, 1e-6, 1 - 1e-6)
        check_range("held_out_batches", self.held_out_batches, 1, EVAL_STEP - 1)
        check_range("held_out_step", self.held_out_step, 0, EVAL_STEP - 1)
        check_range("seed", self.seed, 0, _WORD - 1)

    @property
    def num_dense(self) -> int:
        """None."""
        return 0

    @property
    def steps_per_epoch(self) -> None:
        """None: the data has no end."""

    @property
    def length_probabilities(self) -> _Floats:
        """``[longest + 1]``: the chance of a history of 0, 1, ... items."""
        ratio = self.mean_length / (1.0 + self.mean_length)
        weights = ratio ** np.arange(self.longest + 1, dtype=np.float64)
        return np.asarray(weights / weights.sum())

    @property
    def mean_requests(self) -> float:
        """Mean number of items of a sample: of its history, and one candidate."""
        chances = self.length_probabilities
        return 1.0 + float(chances @ np.arange(len(chances)))

    def tables(self, embedding_dim: int) -> list[EmbeddingConfig]:
        """``item``, read by history and candidate."""
        return [
            EmbeddingConfig(
                name="item",
                num_embeddings=self.num_items,
                embedding_dim=embedding_dim,
                feature_names=["history", "candidate"],
            )
        ]

    def batch_at(self, rank: int, step: int) -> Batch:
        """The batch of ``rank`` at ``step``: a function of these, of the settings and nothing else.

        Raises:
            InputError: If rank or step is negative, rank is 2^32 or more or step is 2^31 or more.
        """
        check_range("step", step, 0, EVAL_STEP - 1)
        return self._batch(rank, step, self._drift().order(step))

    def row_probabilities(self, step: int) -> _Floats:
        """``[num_items]``: the chance that a request at ``step`` is for the row.

        All requests of a batch are independent: n of them have it with 1 - (1 - p)^n, and a
        batch has ``batch_size * mean_requests`` in the mean.
        """
        found = np.empty(self.num_items)
        found[self._drift().order(step)] = np.diff(self._cdf(), prepend=0.0)
        return found

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        """`batch_at` of this rank from step ``start`` on; another world only adds ranks."""
        return (self.batch_at(rank, step) for step in itertools.count(start))

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        """Batches like that of ``held_out_step``, from random streams of their own."""
        for step in range(EVAL_STEP, EVAL_STEP + self.held_out_batches):
            yield self._batch(rank, step, self._drift().order(self.held_out_step))

    def _batch(self, rank: int, stream: int, order: _Ids) -> Batch:
        check_range("rank", rank, 0, _WORD - 1)
        rng = np.random.default_rng([self.seed, rank, stream])
        lengths, items = self._draw(rng, self.batch_size, order)
        true = sigmoid(self._bias() + self._signal(lengths, items))
        rng = np.random.default_rng([self.seed, rank, stream, _LABELS])
        clicks = rng.random(self.batch_size) < true
        counts = np.concatenate((lengths, np.ones_like(lengths)))
        return Batch(
            dense_features=torch.zeros((self.batch_size, 0)),
            sparse_features=KeyedJaggedTensor(
                ["history", "candidate"],
                torch.from_numpy(items),
                lengths=torch.from_numpy(counts),
                stride=self.batch_size,
            ),
            labels=torch.from_numpy(clicks.astype(np.float32)),
            true_probabilities=torch.from_numpy(true.astype(np.float32)),
        )

    def _draw(self, rng: np.random.Generator, num_samples: int, order: _Ids) -> tuple[_Ids, _Ids]:
        """Lengths of the histories; their items, one after the other, then the candidates."""
        ends = np.cumsum(self.length_probabilities)[:-1]
        lengths = np.searchsorted(ends, rng.random(num_samples), side="right").astype(np.int64)
        uniform = rng.random(int(lengths.sum()) + num_samples)
        return lengths, order[np.searchsorted(self._cdf()[:-1], uniform, side="right")]

    def _signal(self, lengths: _Ids, items: _Ids) -> _Floats:
        """The logit of each sample, without b0."""
        candidates = items[len(items) - len(lengths) :]
        history = items[: len(items) - len(lengths)]
        sample = np.repeat(np.arange(len(lengths)), lengths)
        is_same = self._kinds(history) == self._kinds(candidates)[sample]
        same = np.bincount(sample, weights=is_same, minlength=len(lengths))
        share = np.where(lengths > 0, same / np.maximum(lengths, 1), 1.0 / _KINDS)
        own = _ITEM_SD * hashed_normal(self.seed, np.full_like(candidates, _ITEM_OWNER), candidates)
        return np.asarray(own + _KIND_WEIGHT * (share - 1.0 / _KINDS), dtype=np.float64)

    def _kinds(self, items: _Ids) -> npt.NDArray[np.uint64]:
        bits = hashed_bits(self.seed, np.full_like(items, _KIND_OWNER), items)
        return bits % np.uint64(_KINDS)

    def _bias(self) -> float:
        if self._cache.bias is None:
            rng = np.random.default_rng([self.seed, 0, 0, _CALIBRATION])
            inputs = self._draw(rng, _CALIBRATION_SAMPLES, self._drift().order(0))
            self._cache.bias = bias_for(self._signal(*inputs), self.click_rate)
        return self._cache.bias

    def _cdf(self) -> _Floats:
        if self._cache.cdf is None:
            self._cache.cdf = zipf_cdf(self.num_items, self.alpha)
        return self._cache.cdf

    def _drift(self) -> Drift:
        if self._cache.drift is None:
            self._cache.drift = Drift(self.num_items, every=self.drift_every, seed=self.seed)
        return self._cache.drift
