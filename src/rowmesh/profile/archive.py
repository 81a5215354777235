"""Summaries of tables as the bytes of one file: a zip of numpy arrays, with a JSON header."""

import functools
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError
from rowmesh.files import parse_json, read_array
from rowmesh.profile.chunks import TableSummary
from rowmesh.profile.counts import Ints, TableCounts
from rowmesh.profile.tallies import TableTally

__all__ = ["pack", "unpack"]

_Arrays = Callable[[str], NDArray[Any]]
_COLUMNS = TableCounts.nothing().numbers.shape[1]


def pack(header: dict[str, Any], tables: Sequence[TableSummary]) -> bytes:
    """The bytes of a file, the same for the same content; numbers are as narrow as they can be."""
    text = json.dumps(header | {"errors": [_errors(table) for table in tables]})
    arrays: dict[str, Any] = {"header": np.frombuffer(text.encode(), dtype=np.uint8)}
    for i, table in enumerate(tables):
        arrays[f"rows_{i}"] = _narrow(table.counts.rows)
        arrays[f"numbers_{i}"] = _narrow(table.counts.numbers)
        arrays[f"tally_{i}"] = table.tally.to_vector()
        arrays[f"hashes_{i}"] = table.hashes
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def unpack(path: str | Path) -> tuple[dict[str, Any], tuple[TableSummary, ...]]:
    """Header and summaries of a file that holds what `pack` gave.

    Raises:
        InputError: Names the file and what is wrong with it.
    """
    try:
        with Path(path).open("rb") as stream, zipfile.ZipFile(stream) as archive:
            arrays = functools.partial(_array, archive, os.fstat(stream.fileno()).st_size)
            header = parse_json(arrays("header").tobytes(), where="its header")
            errors = header.pop("errors")
            tables = [_unpack_table(arrays, i, *pair) for i, pair in enumerate(errors)]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # whatever damage makes the readers of zip files raise
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is no profile, or is damaged: {reason}") from None
    return header, tuple(tables)


def _array(archive: zipfile.ZipFile, most: int, name: str) -> NDArray[Any]:
    """One array of the file, which has ``most`` bytes in all: `pack` packs nothing."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type != zipfile.ZIP_STORED or member.file_size > most:
        raise ValueError(f"{name} is packed, or said to be longer than the file")
    with archive.open(member) as stream:
        return read_array(stream, num_bytes=member.file_size)


def _unpack_table(arrays: _Arrays, i: int, error: int, requests_error: int) -> TableSummary:
    rows, numbers, vector = (_wide(arrays(f"{n}_{i}")) for n in ("rows", "numbers", "tally"))
    hashes = arrays(f"hashes_{i}")
    if rows.ndim != 1 or numbers.shape != (len(rows), _COLUMNS):
        raise ValueError(f"table {i} has counts of shape {numbers.shape} for rows {rows.shape}")
    if np.any(np.diff(rows) <= 0) or np.any(rows[:1] < 0):
        raise ValueError(f"the rows of table {i} do not ascend from 0")
    if hashes.dtype != np.uint64 or hashes.ndim != 1:
        raise ValueError(f"the hashes of table {i} are {hashes.dtype}")
    if min(error, requests_error) < 0 or np.any(numbers < 0) or np.any(vector < 0):
        raise ValueError(f"a count of table {i} is negative")
    counts = TableCounts(rows=rows, numbers=numbers, error=error, requests_error=requests_error)
    return TableSummary(counts=counts, tally=TableTally.from_vector(vector), hashes=hashes)


def _errors(table: TableSummary) -> list[int]:
    return [table.counts.error, table.counts.requests_error]


def _narrow(numbers: Ints) -> NDArray[Any]:
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _wide(numbers: NDArray[Any]) -> Ints:
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"counts are {numbers.dtype}, not whole numbers")
    return numbers.astype(np.int64)
