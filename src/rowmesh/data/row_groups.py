"""Parquet files: which there are, what their columns are, and one row group's rows."""

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
    holds_lists,
    holds_numbers,
    import_arrow,
    is_id_type,
)
from rowmesh.data.hashing import hash_ids
from rowmesh.data.rows import Layout, Rows
from rowmesh.errors import InputError, did_you_mean

__all__ = ["Columns", "Files", "RowGroup", "list_files"]


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

    def read(self, group: RowGroup) -> Rows:
        """All rows of a row group, in the order of the file.

        Raises:
            InputError: If the file has gone or is damaged, or a value is not allowed, naming
                file, column and row.
        """
        parquet, columns, layout = import_arrow("pyarrow.parquet"), self.columns, self.layout
        with _readable(group.file):
            if _version(group.file) != self._versions[group.file]:
                raise InputError(
                    f"{group.file} has changed since the files were listed: start again, since "
                    f"the order of the samples depends on all files"
                )
            with parquet.ParquetFile(
                group.file,
                metadata=self._footers[group.file],
                read_dictionary=list(layout.singles),  # strings: hash each distinct one once
            ) as file:
                names = columns.names()
                table = file.read_row_group(group.number, columns=names, use_threads=False)
        singles = np.empty((len(layout.singles), group.num_rows), dtype=layout.id_type)
        values, offsets = [], []
        for name, num_rows in columns.sparse:
            if name in layout.lists:
                keys, lengths, _ = arrow_bags(name, table[name])
                ids = hash_ids(keys.view(np.uint64), num_rows)
                values.append(ids.astype(layout.id_type, copy=False))
                offsets.append(np.concatenate(([0], np.cumsum(lengths))))
                continue
            keys, valid, _ = arrow_keys(table[name])
            row = singles[layout.singles.index(name)]
            row[:] = hash_ids(keys.view(np.uint64), num_rows)
            if valid is not None:
                row[~valid] = -1
        return Rows(
            labels=_labels(group, columns.label, table[columns.label]),
            dense=_dense(group, columns, table),
            singles=singles,
            values=values,
            offsets=offsets,
        )


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


def _numbers(column: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_] | None]:
    """Values with 0 for nulls, and where nulls are (None: nowhere)."""
    pyarrow = import_arrow()
    column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    missing = None
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(False if pyarrow.types.is_boolean(column.type) else 0)
    return column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False), missing


def _labels(group: RowGroup, name: str, column: Any) -> npt.NDArray[np.float32]:
    labels, missing = _numbers(column)
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
    return np.array(labels)  # Arrow's memory is read-only, and holds the whole column


def _dense(group: RowGroup, columns: Columns, table: Any) -> npt.NDArray[np.float32]:
    """``log1p(max(x, 0))`` or x, 0 for nulls; below it the flags, 1 for nulls."""
    count = len(columns.dense)
    out = np.zeros((count * (1 + columns.missing_flags), group.num_rows), dtype=np.float32)
    for c, name in enumerate(columns.dense):
        numbers, missing = _numbers(table[name])
        if not np.isfinite(numbers).all():
            row = int(np.isfinite(numbers).argmin())
            raise InputError(
                f"{group.file}: column {name!r} is {numbers[row]:g} in row "
                f"{group.first_row + row}, but must be finite: write a null for a missing number"
            )
        out[c] = np.log1p(np.maximum(numbers, 0)) if columns.log1p else numbers
        if columns.missing_flags and missing is not None:
            out[count + c] = missing
    return out
