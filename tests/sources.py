"""Data that goes wrong on rank 1 at a chosen step, and a recipe around it."""

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rowmesh.data import SyntheticClicks
from rowmesh.errors import InputError
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.tables import EmbeddingBagConfig

REAL_CLICKS = (
    Path(os.environ.get("ROWMESH_DATA", Path(__file__).parents[2] / "shared/data")) / "clicks"
)
needs_real_clicks = pytest.mark.skipif(
    not REAL_CLICKS.is_dir(), reason="no clicks in $ROWMESH_DATA or ../shared/data"
)
RECIPE = """
from pathlib import Path
from rowmesh.train.config import RunConfig
from tests.sources import BadClicks

def recipe():
    return RunConfig(data=BadClicks(how={how!r}, at={at}, mark={mark!r}))
"""
CLICKS = SyntheticClicks(cardinalities=(50, 40), batch_size=32, num_dense=3, held_out_batches=2)


@dataclass(frozen=True, kw_only=True)
class BadClicks:
    """`CLICKS`, but rank 1's batch at step ``at`` (from 1) is wrong in the way ``how`` says.

    ``mark`` names a file that is made just before.
    """

    how: str
    at: int = 3
    mark: str = ""
    num_dense: int = 3
    steps_per_epoch: int = 8

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        return CLICKS.tables(embedding_dim)

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        for batch in CLICKS.held_out(rank=rank, world=world):
            yield self._spoil(batch) if rank == 1 and self.how == "held-out nan" else batch

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(CLICKS.batches(rank=rank, world=world, start=start), start):
            wrong = rank == 1 and step + 1 == self.at and not self.how.startswith("held-out")
            if wrong and self.mark:
                Path(self.mark).write_text(str(time.time()))
            yield self._spoil(batch) if wrong else batch

    def _spoil(self, batch: Batch) -> Batch:
        dense, ids = batch.dense_features.clone(), batch.sparse_features.values().clone()
        labels, lengths = batch.labels.clone(), batch.sparse_features.lengths().clone()
        keys, how = list(batch.sparse_features.keys()), self.how
        if how.endswith("nan"):
            dense[5, 2] = float("nan")
        elif how == "label":
            labels[7] = float("inf")
        elif how == "soft label":
            labels[7] = 0.5
        elif how == "large id":
            ids[4] = 50
        elif how == "negative id":
            ids[4] = -1
        elif how == "dtype of ids":
            ids = ids.float()
        elif how == "dtype of dense":
            dense = dense.double()
        elif how == "columns":
            dense = dense[:, :2]
        elif how == "lengths":
            lengths[0] = 2
        elif how == "missing feature":
            keys = ["cat_0", "dog_1"]
        elif how == "source":
            raise InputError("part-3.parquet is not a Parquet file")
        elif how == "gone":
            raise FileNotFoundError(2, "No such file or directory", "part-3.parquet")
        elif how == "hang":
            time.sleep(600)
        elif how == "die" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "2")) < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        features = KeyedJaggedTensor(keys, ids, lengths=lengths, stride=32)
        made = {"dense_features": dense, "sparse_features": features, "labels": labels}
        return dataclasses.replace(batch, **made)


def write_recipe(folder: Path, how: str, *, at: int = 3) -> Path:
    """A Python recipe with `BadClicks`; they leave ``folder / mark`` when they go wrong."""
    file = folder / "bad.py"
    file.write_text(RECIPE.format(how=how, at=at, mark=str(folder / "mark")))
    return file
