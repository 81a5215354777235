"""Columns of any kind, from lists to Arrow, as the jagged ids the collections read."""

from collections.abc import Mapping, Sequence
from itertools import chain, count, repeat
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.data.arrow import arrow_bags
from rowmesh.data.hashing import hash_ids, string_keys
from rowmesh.errors import InputError, did_you_mean
from rowmesh.features import JaggedTensor, KeyedJaggedTensor

__all__ = ["features_from_columns"]

_KINDS = "integers or strings, or lists of them"


class _Bags(NamedTuple):
    """Ids of one column, sample after sample; strings are keys already."""

    keys: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    are_strings: bool


def features_from_columns(
    columns: Mapping[str, Any], *, num_rows: Mapping[str, int] | None = None
) -> KeyedJaggedTensor:
    """Your columns as the features of a batch.

    ::

        features_from_columns({"user": table["user"], "items": [[7, 9], None, [4]]},
                              num_rows={"user": 1_000_000})

    A column of one id a sample gives bags of one, a column of lists gives bags. A null (None, an
    Arrow null) is an empty bag; nulls inside a list are dropped. With ``num_rows`` ids of any
    size and strings are hashed: ``row = mix(key) mod num_rows[feature]``, the same in every run,
    process and kind of column. Without it integers are taken as they are, and the collection
    checks that they lie inside its table.

    Args:
        columns: By feature: a numpy array ``[B]`` or ``[B, P]``, a torch tensor of the same
            shapes, a list of ids or of lists of ids, or a pyarrow Array or ChunkedArray.
        num_rows: By feature, the rows of its table; only features named here are hashed.

    Returns:
        int64 ids and int32 lengths, the features in the order of ``columns``. Tensors keep their
        device where they are not hashed.

    Raises:
        InputError: If a column has another type or number of samples, a name in ``num_rows`` is
            unknown, strings are not hashed, or a column to be hashed is not on the CPU.
    """
    rows = dict(num_rows or {})
    for name, size in rows.items():
        if name not in columns:
            raise InputError(f"num_rows names {name!r}{did_you_mean(name, columns)}")
        if size < 1:
            raise InputError(f"num_rows of {name!r} is {size}, but must be at least 1")
    return KeyedJaggedTensor.from_dict(
        {name: _jagged(name, column, rows.get(name)) for name, column in columns.items()}
    )


def _jagged(name: str, column: Any, num_rows: int | None) -> JaggedTensor:
    if isinstance(column, Tensor):
        if num_rows is None:
            return _jagged_tensor(name, column)
        if column.device.type != "cpu":
            raise InputError(
                f"column {name!r} is on {column.device}, but ids are hashed on the CPU: make the "
                f"features there and move them with .to()"
            )
        column = column.detach().numpy()
    bags = _bags(name, column)
    ids = _ids(name, bags, num_rows)
    ids = np.require(ids, requirements="W")  # torch warns of memory it must not write, as Arrow's
    lengths = torch.from_numpy(bags.lengths.astype(np.int32))
    return JaggedTensor(torch.from_numpy(ids), lengths=lengths)


def _jagged_tensor(name: str, column: Tensor) -> JaggedTensor:
    if column.dtype.is_floating_point or column.dtype.is_complex or column.dtype == torch.bool:
        raise InputError(f"column {name!r} is {column.dtype}, but ids must be {_KINDS}")
    if column.dim() not in (1, 2):
        raise InputError(f"column {name!r} must be [B] or [B, P], got {list(column.shape)}")
    each = 1 if column.dim() == 1 else column.shape[1]
    lengths = torch.full((len(column),), each, dtype=torch.int32, device=column.device)
    return JaggedTensor(column.to(torch.int64).reshape(-1), lengths=lengths)


def _ids(name: str, bags: _Bags, num_rows: int | None) -> npt.NDArray[np.int64]:
    if num_rows is not None:
        return hash_ids(bags.keys.view(np.uint64), num_rows)
    if bags.are_strings:
        raise InputError(
            f"column {name!r} holds strings: hash them into its table with "
            f"num_rows={{{name!r}: rows}}"
        )
    if bags.keys.dtype == np.uint64 and len(bags.keys) and int(bags.keys.max()) >= 2**63:
        raise InputError(
            f"column {name!r} has id {bags.keys.max()}, but ids end at 2^63 - 1: hash them into "
            f"its table with num_rows={{{name!r}: rows}}"
        )
    return bags.keys.astype(np.int64, copy=False)


def _bags(name: str, column: Any) -> _Bags:
    if type(column).__module__.partition(".")[0] == "pyarrow":  # known without importing it
        return _Bags(*arrow_bags(name, column))
    if isinstance(column, np.ndarray) and column.dtype.kind in "iu":
        return _array_bags(name, column)
    if isinstance(column, np.ndarray) and column.dtype.kind in "OUS" and column.ndim == 1:
        return _object_bags(name, column.astype(object))
    if isinstance(column, Sequence) and not isinstance(column, str | bytes):
        return _object_bags(name, np.fromiter(column, dtype=object, count=len(column)))
    what = f"a {column.dtype} array" if isinstance(column, np.ndarray) else type(column).__name__
    raise InputError(f"column {name!r} is {what}, but ids must be {_KINDS}")


def _array_bags(name: str, column: npt.NDArray[Any]) -> _Bags:
    if column.ndim not in (1, 2):
        raise InputError(f"column {name!r} must be [B] or [B, P], got {list(column.shape)}")
    lengths = np.full(len(column), 1 if column.ndim == 1 else column.shape[1], dtype=np.int64)
    flat = np.ascontiguousarray(column).reshape(-1)
    return _Bags(_wide(flat), lengths, False)


def _wide(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return ids if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False)


def _object_bags(name: str, column: npt.NDArray[np.object_]) -> _Bags:
    """Bags of Python objects; loops run inside `map` and `chain`, none in Python."""
    filled = ~_is_none(column)
    kept = column[filled]
    lengths = filled.astype(np.int64)
    if len(kept) and not isinstance(kept[0], int | str | bytes | np.integer):
        try:
            lengths[filled] = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
            flat = np.fromiter(chain.from_iterable(kept), dtype=object, count=lengths.sum())
        except TypeError:
            raise _wrong_kind(name, kept) from None
        inside = ~_is_none(flat)
        ends = np.concatenate(([0], np.cumsum(inside)))[np.concatenate(([0], np.cumsum(lengths)))]
        kept, lengths = flat[inside], np.diff(ends)
    keys, are_strings = _object_keys(name, kept)
    return _Bags(keys, lengths, are_strings)


def _is_none(column: npt.NDArray[np.object_]) -> npt.NDArray[np.bool_]:
    return np.fromiter(map(is_, column, repeat(None)), dtype=bool, count=len(column))


def _object_keys(name: str, flat: npt.NDArray[np.object_]) -> tuple[npt.NDArray[Any], bool]:
    """Keys of Python integers or strings, and whether they are strings."""
    kinds = set(map(type, flat))
    if all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        try:
            return flat.astype(np.int64), False
        except OverflowError:
            raise InputError(f"column {name!r} has an id beyond 2^63 - 1, where ids end") from None
    if all(issubclass(kind, str) for kind in kinds):
        encode: Any = str.encode
    elif all(issubclass(kind, bytes) for kind in kinds):
        encode = bytes
    else:
        raise _wrong_kind(name, flat)
    distinct = dict(zip(dict.fromkeys(flat), count(), strict=False))
    texts = list(map(encode, distinct))
    offsets = np.concatenate(([0], np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))))
    keys = string_keys(np.frombuffer(b"".join(texts), dtype=np.uint8), offsets)
    return keys[np.fromiter(map(distinct.__getitem__, flat), np.int64, len(flat))], True


def _wrong_kind(name: str, found: npt.NDArray[np.object_]) -> InputError:
    kinds = ", ".join(sorted({kind.__name__ for kind in set(map(type, found))}))
    return InputError(f"column {name!r} holds {kinds}, but ids must be {_KINDS}")
