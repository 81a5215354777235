"""Parquet files: which there are, what their columns are, and one row group's rows."""

import functools
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowmesh.data.arrow import (
    arrow_bags,
    arrow_keys,
    arrow_numbers,
    holds_lists,
    holds_numbers,
    import_arrow,
    is_id_type,
)
from rowmesh.data.hashing import hash_ids
from rowmesh.data.rows import Bags, Layout, Rows
from rowmesh.errors import InputError, did_you_mean

__all__ = ["Columns", "Files", "RowGroup", "list_files"]

# Their logarithms fill 64 KB.
_NUM_COUNTS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which columns to read and what they become; `ParquetClicks` explains the fields."""

    label: str
    dense: tuple[str, ...]
    sparse: tuple[tuple[str, int], ...]
    log1p: bool
    missing_flags: bool

    def names(self) -> list[str]:
        """All columns that are read."""
        return [self.label, *self.dense, *(name for name, _ in self.sparse)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Row group ``number`` of a file; its first row is the file's row ``first_row``."""

    file: str
    number: int
    first_row: int
    num_rows: int

    def num_held_out(self, fraction: float) -> int:
        """``floor(fraction * rows + u)``, u from 0 to 1 a hash of file name and number."""
        return int(fraction * self.num_rows + self._generator().random())

    def random_order(self) -> npt.NDArray[np.int64]:
        """Its rows in an order that depends on file name and number alone."""
        return self._generator().permutation(self.num_rows)

    def _generator(self) -> np.random.Generator:
        name = f"{Path(self.file).name}/{self.number}".encode()
        return np.random.default_rng(list(hashlib.sha256(name).digest()))


def list_files(path: str) -> list[str]:
    """The files that ``path`` names, in the order of their names.

    A folder gives every ``*.parquet`` in it and below it, but for names that start with a dot or
    an underscore; anything else is a file or a glob.

    Raises:
        InputError: If there are none.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not os.access(folder, os.R_OK | os.X_OK):
            raise InputError(f"{path!r} is a folder that may not be read: change its permissions")
        found = (p.relative_to(folder) for p in folder.rglob("*.parquet"))
        names = [folder / p for p in found if not any(n.startswith((".", "_")) for n in p.parts)]
    else:
        names = [Path(p) for p in glob.glob(str(folder), recursive=True) if Path(p).is_file()]
    if not names:
        kind = "the folder has no *.parquet file" if folder.is_dir() else "no file matches"
        raise InputError(f"{path!r}: {kind}: give a folder, a file or a glob of Parquet files")
    return sorted(map(str, names))


class Files:
    """The footers of all files, read once, and their row groups, read as asked.

    Raises:
        InputError: If a file cannot be read, lacks a column or has one of another type.
    """

    def __init__(self, path: str, columns: Columns) -> None:
        import_arrow("pyarrow.parquet")
        self.columns = columns
        self.names = list_files(path)
        self.groups: list[RowGroup] = []
        self._footers: dict[str, Any] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        lists: dict[str, bool] = {}
        for file in self.names:
            with _readable(file):
                self._versions[file] = _version(file)
                footer = import_arrow("pyarrow.parquet").read_metadata(file)
                schema = footer.schema.to_arrow_schema()
            _check_schema(file, schema, columns)
            for name, _ in columns.sparse:
                here = holds_lists(schema.field(name).type)
                if lists.setdefault(name, here) != here:
                    raise InputError(
                        f"{file}: column {name!r} has {'lists' if here else 'single ids'}, unlike "
                        f"in {self.names[0]}: write both alike"
                    )
            self._footers[file] = footer
            self._add_groups(file, footer)
        big = any(rows > np.iinfo(np.int32).max for _, rows in columns.sparse)
        self.layout = Layout(
            num_dense=len(columns.dense) * (2 if columns.missing_flags else 1),
            features=tuple(name for name, _ in columns.sparse),
            lists=tuple(name for name, _ in columns.sparse if lists[name]),
            id_type=np.int64 if big else np.int32,
        )

    def _add_groups(self, file: str, footer: Any) -> None:
        first = 0
        for number in range(footer.num_row_groups):
            rows = footer.row_group(number).num_rows
            if rows:
                group = RowGroup(file=file, number=number, first_row=first, num_rows=rows)
                self.groups.append(group)
            first += rows

    def read(self, group: RowGroup, index: npt.NDArray[np.int64]) -> Rows:
        """The rows ``index`` of a row group, in that order.

        Raises:
            InputError: If the file has gone or is damaged, or a value of any row is not allowed,
                naming file, column and row.
        """
        table, layout = self._table(group), self.layout
        labels = _labels(group, self.columns.label, table[self.columns.label])[index]
        dense = _dense(group, self.columns, table, index)
        if 2 * len(index) < group.num_rows:  # hash those alone; else, taking keys costs more
            table = table.select([name for name, _ in self.columns.sparse]).take(index)
            index = np.arange(len(index))
        singles = np.empty((len(layout.singles), len(index)), dtype=layout.id_type)
        bags: list[Bags] = []
        for name, num_rows in self.columns.sparse:
            if name in layout.lists:
                keys, lengths, _ = arrow_bags(name, table[name])
                ids = hash_ids(keys.view(np.uint64), num_rows, id_type=layout.id_type)
                bags.append(Bags(ids, np.concatenate(([0], np.cumsum(lengths)))).take(index))
            else:
                ids = _single_ids(table[name], num_rows, layout.id_type)
                np.take(ids, index, out=singles[layout.singles.index(name)], mode="clip")
        return Rows(labels=labels, dense=dense, singles=singles, bags=bags)

    def _table(self, group: RowGroup) -> Any:
        parquet = import_arrow("pyarrow.parquet")
        with _readable(group.file):
            if _version(group.file) != self._versions[group.file]:
                raise InputError(
                    f"{group.file} has changed since the files were listed: start again, since "
                    f"the order of the samples depends on all files"
                )
            with parquet.ParquetFile(
                group.file,
                metadata=self._footers[group.file],
                page_checksum_verification=True,  # of pages that have one
                read_dictionary=list(self.layout.singles),  # strings: hash each distinct one once
            ) as file:
                names = self.columns.names()
                return file.read_row_group(group.number, columns=names, use_threads=False)


def _version(file: str) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


@contextmanager
def _readable(file: str) -> Iterator[None]:
    """What goes wrong with a file, as one sentence that names it."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(
            f"{file} has gone since the files were listed: put it back, or start again with the "
            f"files that are there"
        ) from None
    except (import_arrow().ArrowException, OSError) as error:
        why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise InputError(
            f"{file} cannot be read as Parquet ({why}): write it again or take it out"
        ) from None


def _check_schema(file: str, schema: Any, columns: Columns) -> None:
    for name in columns.names():
        if name not in schema.names:
            raise InputError(f"{file} has no column {name!r}{did_you_mean(name, schema.names)}")
        if schema.names.count(name) > 1:
            raise InputError(f"{file} has {schema.names.count(name)} columns {name!r}: write one")
    kinds: Mapping[str, Any] = {name: schema.field(name).type for name in columns.names()}
    for name in (columns.label, *columns.dense):
        if not holds_numbers(kinds[name]):
            what = "a label must be 0 or 1" if name == columns.label else "dense ones are numbers"
            raise InputError(f"{file}: column {name!r} is {kinds[name]}, but {what}")
    for name, _ in columns.sparse:
        if not is_id_type(kinds[name]):
            raise InputError(
                f"{file}: column {name!r} is {kinds[name]}, but ids are integers or strings, or "
                f"lists of them: make it a dense column, or write it as integers"
            )


def _single_ids(
    column: Any, num_rows: int, id_type: type[np.int32] | type[np.int64]
) -> npt.NDArray[Any]:
    """Hashed ids, -1 for nulls."""
    keys, valid, _ = arrow_keys(column)
    ids = hash_ids(keys.view(np.uint64), num_rows, id_type=id_type)
    if valid is not None:
        ids[~valid] = -1
    return ids


def _labels(group: RowGroup, name: str, column: Any) -> npt.NDArray[np.float32]:
    labels, missing = arrow_numbers(column)
    bad = (labels != 0) & (labels != 1)
    if missing is not None:
        bad |= missing
    if bad.any():
        row = int(bad.argmax())
        what = "null" if missing is not None and missing[row] else f"{labels[row]:g}"
        raise InputError(
            f"{group.file}: label {name!r} is {what} in row {group.first_row + row}, but must be "
            f"0 or 1"
        )
    return labels


def _dense(
    group: RowGroup, columns: Columns, table: Any, index: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """``log1p(max(x, 0))`` or x, 0 for nulls; beside it the flags, 1 for nulls."""
    count = len(columns.dense)
    out = np.zeros((count * (1 + columns.missing_flags), group.num_rows), dtype=np.float32)
    for c, name in enumerate(columns.dense):
        numbers, missing = arrow_numbers(table[name])
        finite = np.isfinite(numbers)
        if not finite.all():
            row = int(finite.argmin())
            raise InputError(
                f"{group.file}: column {name!r} is {numbers[row]:g} in row "
                f"{group.first_row + row}, but must be finite: write a null for a missing number"
            )
        out[c] = _log1p(np.maximum(numbers, 0)) if columns.log1p else numbers
        if columns.missing_flags and missing is not None:
            out[count + c] = missing
    return np.take(np.ascontiguousarray(out.T), index, axis=0)  # whole rows: one place each


def _log1p(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``log1p`` of numbers from 0; of small whole ones, as most columns of counts have, looked
    up, which is several times as fast."""
    if len(numbers) < _NUM_COUNTS or numbers.max() >= _NUM_COUNTS:
        return np.log1p(numbers)
    counts = numbers.astype(np.int64)
    if not np.array_equal(counts, numbers):
        return np.log1p(numbers)
    return np.take(_logs_of_counts(), counts)


@functools.cache
def _logs_of_counts() -> npt.NDArray[np.float32]:
    return np.log1p(np.arange(_NUM_COUNTS, dtype=np.float32))
