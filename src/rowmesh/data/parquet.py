"""Clicks in Parquet files as batches for any number of ranks."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rowmesh.data.ahead import read_ahead
from rowmesh.data.reader import Reader
from rowmesh.data.row_groups import Columns, Files, RowGroup
from rowmesh.data.rows import Rows
from rowmesh.data.streams import Deal, num_streams, streams_of
from rowmesh.errors import InputError, check_range, did_you_mean
from rowmesh.features import Batch
from rowmesh.tables import EmbeddingBagConfig, PoolingType

__all__ = ["ParquetClicks"]

_TRANSFORMS: Final = ("log1p", "none")


class _Split(NamedTuple):
    """The row groups that have rows to train on, or held-out ones, and how these are dealt."""

    groups: list[RowGroup]
    deal: Deal


class _Cache:
    """What the files' footers say, read on first use; not pickled: every rank reads them."""

    def __init__(self) -> None:
        self.files: Files | None = None
        self.splits: dict[bool, _Split] = {}

    def __reduce__(self) -> tuple[type["_Cache"], tuple[()]]:
        return _Cache, ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetClicks:
    """A `Source` of labelled rows in Parquet files.

    A batch of ``batch_size`` samples is m = batch_size / V rows of each of V streams, V the
    largest divisor of batch_size that is not above ``streams``. Row groups are shuffled by
    (seed, epoch), the rows in one by (seed, epoch, row group); laid end to end they are cut into
    V streams of equal length, and rank r reads its share of the streams (`streams_of`). So every
    sample comes once an epoch, a step has the same samples for every world, and the global step
    is the position. The last step of an epoch has the rows that are left, on some ranks none.

    A rank decodes only the row groups its streams run through, and holds of each stream the
    current one and, with ``read_ahead``, the next.

    Args:
        path: A folder, a file or a glob; files are ordered by name.
        label: Column of 0 and 1.
        dense: Columns of numbers.
        sparse: Columns of ids (integers or strings, single or lists) and the rows of their
            tables; ids are hashed as in `features_from_columns`. A null is an empty bag.
        batch_size: Samples a step, of all ranks together.
        held_out_files: So many files, the last by name, are for `held_out` alone.
        held_out_fraction: Or so large a random part of each row group, the same for every seed.
        transform: Of dense numbers: ``"log1p"`` for log(1 + max(x, 0)), or ``"none"``. A null
            becomes 0 after it.
        missing_flags: Whether each dense column is joined by one that is 1 where it is null.
        seed: Below 2^32; changes the order of samples and nothing else.
        streams: Upper limit of V, and so of the ranks.
        read_ahead: Batches that a background thread is ahead; 0 reads without a thread.

    Raises:
        InputError: If an argument is out of range, a name is unknown or a column is named twice.
    """

    path: str
    label: str
    dense: Sequence[str] = ()
    sparse: Mapping[str, int] | Sequence[tuple[str, int]]
    batch_size: int = 2048
    held_out_files: int = 0
    held_out_fraction: float = 0.0
    transform: str = "log1p"
    missing_flags: bool = False
    seed: int = 1
    streams: int = 64
    read_ahead: int = 8
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = self.sparse.items() if isinstance(self.sparse, Mapping) else self.sparse
        object.__setattr__(self, "sparse", tuple((name, rows) for name, rows in pairs))
        object.__setattr__(self, "dense", tuple(self.dense))
        if self.transform not in _TRANSFORMS:
            hint = did_you_mean(self.transform, _TRANSFORMS)
            raise InputError(f"unknown transform {self.transform!r}{hint}")
        names = self.columns.names()
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"column {twice!r} is named twice among label, dense and sparse")
        for name, rows in self.columns.sparse:
            check_range(f"rows of the table of {name!r}", rows, 1)
        check_range("number of sparse columns", len(self.sparse), 1)
        check_range("batch_size", self.batch_size, 1, 2**31 - 1)
        check_range("held_out_files", self.held_out_files, 0)
        if not 0 <= self.held_out_fraction < 1:
            limit = "from 0 and below 1"
            raise InputError(f"held_out_fraction is {self.held_out_fraction}, but must be {limit}")
        if self.held_out_files and self.held_out_fraction:
            raise InputError(
                f"held_out_files is {self.held_out_files} and held_out_fraction "
                f"{self.held_out_fraction}: give one of them"
            )
        check_range("seed", self.seed, 0, 2**32 - 1)
        check_range("streams", self.streams, 1)
        check_range("read_ahead", self.read_ahead, 0)

    @property
    def columns(self) -> Columns:
        """What is read of a file."""
        assert not isinstance(self.sparse, Mapping)
        return Columns(
            label=self.label,
            dense=tuple(self.dense),
            sparse=tuple(self.sparse),
            log1p=self.transform == "log1p",
            missing_flags=self.missing_flags,
        )

    @property
    def num_dense(self) -> int:
        """Dense columns, twice with missing_flags: first the numbers, then the flags."""
        return len(self.dense) * (2 if self.missing_flags else 1)

    @property
    def steps_per_epoch(self) -> int:
        """``ceil(training rows / batch_size)``; reads the files' footers on first use."""
        return self._split(held=False).deal.num_steps

    def tables(
        self, embedding_dim: int, *, pooling: PoolingType = PoolingType.SUM
    ) -> list[EmbeddingBagConfig]:
        """A table ``t_<column>`` for each sparse column."""
        return [
            EmbeddingBagConfig(
                name=f"t_{name}",
                num_embeddings=rows,
                embedding_dim=embedding_dim,
                feature_names=[name],
                pooling=pooling,
            )
            for name, rows in self.columns.sparse
        ]

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        """This rank's batches from global step ``start`` on; endless, and closable.

        The same, bit for bit, as those of an iteration from 0 that has come to ``start``; row
        groups that lie before are not read. Closing or dropping the iterator ends its thread.

        Raises:
            InputError: If there are more ranks than streams, start is negative, or a file is
                missing, damaged or has a wrong column or value: the latter at the step that
                needs it.
        """
        check_range("start", start, 0)
        return self._iterate(held=False, rank=rank, world=world, start=start)

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        """This rank's batches of the held-out rows, in the order of the files.

        All ranks get the same number, the last ones maybe empty; none if nothing is held out.
        """
        return self._iterate(held=True, rank=rank, world=world, start=0)

    def _iterate(self, *, held: bool, rank: int, world: int, start: int) -> Iterator[Batch]:
        deal = self._split(held=held).deal
        streams = streams_of(deal.streams, rank=rank, world=world)
        if not deal.num_rows:
            return iter(())
        reader = Reader(
            deal,
            streams,
            load=functools.partial(self._load, held),
            layout=self._files().layout,
            start=start,
            end=deal.num_steps if held else None,
        )
        if not self.read_ahead:
            return reader.batches()
        return read_ahead(reader.batches(), depth=self.read_ahead, when_full=reader.look_ahead)

    def _load(self, held: bool, number: int, index: npt.NDArray[np.int64]) -> Rows:
        """The rows ``index``, in that order, among those of a split in its row group."""
        group = self._split(held=held).groups[number]
        if self.held_out_fraction:
            count, order = group.num_held_out(self.held_out_fraction), group.random_order()
            index = np.sort(order[:count] if held else order[count:])[index]
        return self._files().read(group, index)

    def _files(self) -> Files:
        if self._cache.files is None:
            files = Files(self.path, self.columns)
            if self.held_out_files >= len(files.names):
                raise InputError(
                    f"held_out_files is {self.held_out_files}, but {self.path!r} has "
                    f"{len(files.names)} files: leave at least one to train on"
                )
            self._cache.files = files
        return self._cache.files

    def _split(self, *, held: bool) -> _Split:
        if held not in self._cache.splits:
            self._cache.splits[held] = self._make_split(held)
        return self._cache.splits[held]

    def _make_split(self, held: bool) -> _Split:
        files, streams = self._files(), num_streams(self.batch_size, self.streams)
        last = set(files.names[len(files.names) - self.held_out_files :])
        sizes: dict[RowGroup, int] = {}
        for group in files.groups:
            out = group.num_rows if group.file in last else 0
            out = group.num_held_out(self.held_out_fraction) if self.held_out_fraction else out
            rows = out if held else group.num_rows - out
            sizes |= {group: rows} if rows else {}
        if not held and not sizes:
            raise InputError(f"{self.path!r} has no row to train on: all are empty or held out")
        seed, m = None if held else self.seed, self.batch_size // streams
        return _Split(list(sizes), Deal(list(sizes.values()), streams, m, seed))
