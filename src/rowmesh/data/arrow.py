"""Arrow columns as 64-bit keys; the only file of the package's data that knows Arrow's types.

pyarrow is an extra: it is imported on first use.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rowmesh.data.hashing import string_keys
from rowmesh.errors import InputError
from rowmesh.extras import require_extra

__all__ = [
    "arrow_bags",
    "arrow_keys",
    "arrow_numbers",
    "holds_lists",
    "holds_numbers",
    "import_arrow",
    "is_id_type",
]


def import_arrow(module: str = "pyarrow") -> Any:
    """pyarrow, or a module of it.

    Raises:
        InputError: If it is not installed.
    """
    return require_extra("pyarrow", module)


def holds_lists(kind: Any) -> bool:
    """Whether a column of this Arrow type has a list for each sample."""
    types = import_arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def holds_numbers(kind: Any) -> bool:
    """Whether it has an integer, a boolean or a floating-point number for each sample."""
    types = import_arrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_id_type(kind: Any) -> bool:
    """Whether it has integers or strings, dictionary-encoded or not, or lists of them."""
    types = import_arrow().types
    if holds_lists(kind):
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind) or types.is_null(kind) or _is_text(kind))


def _is_text(kind: Any) -> bool:
    return str(kind).removeprefix("large_").removesuffix("_view") in ("string", "binary")


def arrow_bags(name: str, column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], bool]:
    """Keys and lengths of an Arrow column's bags, and whether the keys are those of strings.

    Raises:
        InputError: If the column has no ids.
    """
    if not is_id_type(column.type):
        raise InputError(
            f"column {name!r} is {column.type}, but ids must be integers or strings, or lists "
            f"of them"
        )
    column = _one_array(column)
    if not holds_lists(column.type):
        keys, valid, are_strings = arrow_keys(column)
        if valid is None:
            return keys, np.ones(len(column), dtype=np.int64), are_strings
        return keys[valid], valid.astype(np.int64), are_strings
    compute = import_arrow("pyarrow.compute")
    lengths = compute.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
    keys, valid, are_strings = arrow_keys(column.flatten())  # without what null lists cover
    if valid is not None:
        bags = np.concatenate(([0], np.cumsum(lengths)))
        keys, lengths = keys[valid], np.diff(np.concatenate(([0], np.cumsum(valid)))[bags])
    return keys, lengths, are_strings


def arrow_keys(column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None, bool]:
    """A key for each entry of a column of ids, where they are valid (None: everywhere), and
    whether they are those of strings. A null's key has no meaning."""
    pyarrow = import_arrow()
    column = _one_array(column)
    valid, kind = _valid(column), column.type
    if pyarrow.types.is_null(kind):
        return np.zeros(len(column), dtype=np.int64), np.zeros(len(column), dtype=bool), False
    if _is_text(kind):
        if str(kind).endswith("_view"):  # it has no dictionary_encode
            column = column.cast(f"large_{str(kind).removesuffix('_view')}")
        column = column.dictionary_encode()
    if pyarrow.types.is_dictionary(column.type):
        if column.dictionary.null_count:  # a null may also hide in the dictionary
            return arrow_keys(column.dictionary_decode())
        known, _, are_strings = _dictionary_keys(column.dictionary)
        codes = column.indices.fill_null(0).to_numpy()
        keys = known[codes] if len(known) else np.zeros(len(column), dtype=known.dtype)
        return keys, valid, are_strings
    ids = _values(column)
    return ids if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False), valid, False


def arrow_numbers(column: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_] | None]:
    """A number for each entry of a column of them, 0 for nulls, and where these are (None:
    nowhere)."""
    column = _one_array(column)
    valid = _valid(column)
    if import_arrow().types.is_boolean(column.type):
        column = column.cast("uint8")
    numbers = _values(column)
    if valid is not None:
        numbers = np.where(valid, numbers, numbers.dtype.type(0))
    missing = None if valid is None else ~valid
    return numbers.astype(np.float32, copy=False), missing


def _valid(column: Any) -> npt.NDArray[np.bool_] | None:
    bits = column.buffers()[0] if column.null_count else None
    if bits is None:  # no nulls, or a type that has no bits for them
        return column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    end = column.offset + len(column)
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=end, bitorder="little")
    return flags[column.offset :].view(np.bool_)


def _values(column: Any) -> npt.NDArray[Any]:
    """The memory of a column of numbers, whatever lies where the nulls are."""
    kind = np.dtype(column.type.to_pandas_dtype())
    if not len(column):
        return np.empty(0, dtype=kind)
    data = np.frombuffer(column.buffers()[1], dtype=kind, count=column.offset + len(column))
    return data[column.offset :]


def _dictionary_keys(entries: Any) -> tuple[npt.NDArray[Any], None, bool]:
    if not _is_text(entries.type):
        return arrow_keys(entries)[0], None, False
    pyarrow = import_arrow()
    for kind in (pyarrow.binary(), pyarrow.large_binary()):  # in two steps: Arrow has no direct one
        if entries.type not in (pyarrow.large_binary(), pyarrow.large_string()):
            entries = entries.cast(kind)
    _, offsets, data = entries.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[entries.offset :][: len(entries) + 1]
    content = np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, dtype=np.uint8)
    return string_keys(content, ends), None, True


def _one_array(column: Any) -> Any:
    """A ChunkedArray as one Array, its dictionaries made one."""
    if hasattr(column, "chunks"):
        column = column.unify_dictionaries().combine_chunks()
        if hasattr(column, "chunks"):  # some versions keep a chunked array without chunks
            column = (
                import_arrow().concat_arrays(column.chunks)
                if column.num_chunks
                else (import_arrow().array([], type=column.type))
            )
    return column
