"""The two data sets: planted clicks whose truth is half dense, and real ones."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rowmesh.data import ParquetClicks, Source, SyntheticClicks
from rowmesh.data.planted import bias_for, sigmoid
from rowmesh.data.synthetic import EVAL_STEP
from rowmesh.features import Batch
from rowmesh.tables import EmbeddingBagConfig
from rowmesh.train.model import ModelConfig
from rowmesh.train.recipes import load_recipe

__all__ = ["PlantedHalfDense", "Trial", "clicks_trial", "planted_trial"]

_Floats = npt.NDArray[np.float64]
_HIDDEN = 16
_TRUTH, _LABELS, _CALIBRATION = 17, 97, 96  # words of generators' entropy
_STRIDE = 1_000_000  # steps between the samples of two seeds
_CALIBRATION_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedHalfDense:
    """Planted clicks of METHODS.md, "dense and codecs": half of the logit's variance is dense.

    ``logit = b0 + sum_f a[f, id] + c * w2 . tanh(W1 x)``: a as in `SyntheticClicks`, x of 13
    standard normals, W1 and w2 random and fixed, c such that both sums have the same variance over
    a fixed sample, b0 such that the mean click rate is 0.25.

    Args:
        draws: Ids and dense features, and the truth's seed.
        seed: Which samples are trained on; the truth and the held-out samples stay.
    """

    draws: SyntheticClicks
    seed: int
    _truth: tuple[_Floats, _Floats, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.draws.seed, _TRUTH])
        first = rng.standard_normal((self.num_dense, _HIDDEN)) * (1.5 / math.sqrt(self.num_dense))
        second = rng.standard_normal(_HIDDEN)
        object.__setattr__(self, "_truth", (first, second, 0.0))
        sample = [
            self._parts(self.draws.batch_at(_CALIBRATION, EVAL_STEP + i))
            for i in range(_CALIBRATION_STEPS)
        ]
        rows, dense = (np.concatenate(parts) for parts in zip(*sample, strict=True))
        second = second * (rows.std() / dense.std())
        bias = bias_for(rows + dense * (rows.std() / dense.std()), self.draws.click_rate)
        object.__setattr__(self, "_truth", (first, second, bias))

    @property
    def num_dense(self) -> int:
        """Columns of dense features."""
        return self.draws.num_dense

    @property
    def steps_per_epoch(self) -> None:
        """None: the data has no end."""

    def tables(self, embedding_dim: int) -> Sequence[EmbeddingBagConfig]:
        """Those of the ids."""
        return self.draws.tables(embedding_dim)

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        """Of this seed's samples."""
        return (self._label(rank, self.seed * _STRIDE + step) for step in count(start))

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        """The same for all seeds."""
        steps = range(EVAL_STEP, EVAL_STEP + self.draws.held_out_batches)
        return (self._label(rank, step) for step in steps)

    def _parts(self, batch: Batch) -> tuple[_Floats, _Floats]:
        """Of each sample the sum over its rows, and the dense net."""
        ids = batch.sparse_features.values().view(len(self.draws.num_rows), -1)
        rows = sum(self.draws.planted_weights(f, row).numpy() for f, row in enumerate(ids))
        first, second, _ = self._truth
        dense = np.tanh(batch.dense_features.double().numpy() @ first) @ second
        return np.asarray(rows, dtype=np.float64), np.asarray(dense, dtype=np.float64)

    def _label(self, rank: int, step: int) -> Batch:
        batch = self.draws.batch_at(rank, step)
        rows, dense = self._parts(batch)
        true = sigmoid(self._truth[2] + rows + dense)
        rng = np.random.default_rng([self.draws.seed, rank, step, _LABELS])
        clicks = rng.random(len(true)) < true
        return replace(
            batch,
            labels=torch.from_numpy(clicks.astype(np.float32)),
            true_probabilities=torch.from_numpy(true.astype(np.float32)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A data set and how a model learns from it.

    ``rates`` multiply both learning rates; a ``is_wide`` model is `Wide`, not that of ``model``.
    """

    name: str
    model: ModelConfig
    sparse_lr: float
    dense_lr: float
    eps: float
    steps: int
    rates: tuple[float, ...]
    is_wide: bool = False
    path: str = ""
    batch: int = 0
    rows: int = 0
    tables: int = 0
    held_out: int = 0

    def source(self, seed: int) -> Source:
        """The samples of a seed: others of the same truth, or the same in another order."""
        if self.path:
            found = load_recipe("clicks").data
            assert isinstance(found, ParquetClicks)
            return replace(found, path=self.path, seed=seed, read_ahead=0)
        draws = SyntheticClicks(
            cardinalities=(self.rows,) * self.tables,
            batch_size=self.batch,
            held_out_batches=self.held_out,
            labels="coin",
        )
        return PlantedHalfDense(draws=draws, seed=seed)


def planted_trial(*, steps: int, held_out: int, rates: tuple[float, ...]) -> Trial:
    """8 tables of 1,000 rows, 256 samples a rank."""
    model = ModelConfig(dim=8, dense_layers=(64, 32))
    return Trial(
        name="planted",
        model=model,
        sparse_lr=0.4,
        dense_lr=0.02,
        eps=1e-8,
        steps=steps,
        rates=rates,
        is_wide=True,
        batch=256,
        rows=1000,
        tables=8,
        held_out=held_out,
    )


def clicks_trial(path: Path, *, steps: int, rates: tuple[float, ...]) -> Trial:
    """The recipe ``clicks`` as it comes, one epoch if it has no more than ``steps``."""
    config = load_recipe("clicks")
    trial = Trial(
        name="clicks",
        model=config.model,
        sparse_lr=config.optimiser.sparse_lr,
        dense_lr=config.optimiser.dense_lr,
        eps=config.optimiser.sparse_eps or 1e-8,
        steps=steps,
        rates=rates,
        path=str(path),
    )
    epoch = trial.source(1).steps_per_epoch
    assert epoch is not None
    return replace(trial, steps=min(steps, epoch))
