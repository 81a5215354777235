"""What the trainer asks of data: tables to build, batches to train on, batches to judge by."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from rowmesh.features import Batch
from rowmesh.tables import TableConfig

__all__ = ["Source"]


class Source(Protocol):
    """Data that every rank reads for itself, without talking to the others.

    A batch is a function of the configuration, its seed, rank, world and step, and of nothing
    else, so the step alone is the position: a run may stop, and go on with another number of
    ranks. Where samples are finite the union over the ranks is, for every step, the same set of
    samples for every world: none is lost or repeated. `SyntheticClicks`, which never repeats, has
    a batch size per rank, and so more samples a step on more ranks.
    """

    @property
    def num_dense(self) -> int:
        """Columns of `Batch.dense_features`."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in which every sample comes once; None where the data never repeats."""

    def tables(self, embedding_dim: int) -> Sequence[TableConfig]:
        """The tables that the features of a batch index: pooled ones, sequences, or both."""

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        """This rank's batches from global step ``start`` on; endless.

        Step s belongs to epoch ``s // steps_per_epoch``. What lies before ``start`` is not read.
        """

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        """This rank's batches of samples that are never trained on, in the same order each time.

        Where they have `Batch.groups`, a group is whole in one batch of one rank.
        """
