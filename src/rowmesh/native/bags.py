"""From jagged features to keys: ids in the order of bags, their check, their places."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.native.library import is_wide, library, pointer, takes

__all__ = ["Places", "flatten", "ids_fit", "make_keys"]

_SMALL, _LARGE = (torch.int32,), (torch.int64,)
_FLOAT, _BOOL = (torch.float32,), (torch.bool,)


def flatten(
    values: Tensor,
    begins: Tensor,
    counts: Tensor,
    weights: Tensor | None,
    num_readers: int,
    per_reader: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Ids (int64), reader, bag (int32), weights of ``counts[b]`` values from ``begins[b]``.

    ``per_reader`` bags in a row have one reader; 0 if readers go round with the bags.
    """
    lib = library()
    if lib is None or not takes(values) or not takes(begins, counts, dtypes=_LARGE):
        return None
    if not takes(weights, dtypes=_FLOAT):
        return None
    num_ids = int(counts.sum())
    ids = torch.empty(num_ids, dtype=torch.int64)
    reader, bag = (torch.empty(num_ids, dtype=torch.int32) for _ in range(2))
    found = None if weights is None else torch.empty(num_ids)
    done = lib.rm_flatten(
        *(len(begins), pointer(begins), pointer(counts)),
        *(len(values), pointer(values), is_wide(values), pointer(weights)),
        *(num_readers, per_reader, pointer(ids), pointer(reader), pointer(bag), pointer(found)),
    )
    return (ids, reader, bag, found) if done == 0 else None


def ids_fit(ids: Tensor, reader: Tensor, rows: Tensor) -> bool:
    """``0 <= ids[i] < rows[reader[i]]`` for all i; False also if it cannot be told here."""
    lib = library()
    if lib is None or not takes(ids, rows, dtypes=_LARGE) or not takes(reader, dtypes=_SMALL):
        return False
    return bool(lib.rm_ids_fit(len(ids), pointer(ids), pointer(reader), pointer(rows)))


class Places(ctypes.Structure):
    """Where the rows of each (reader's table, virtual shard) lie, as `make_keys` reads it.

    Made anew for every call: it holds addresses, not tensors.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first_entry", "num_shards", "owner", "slot0")),
        *((name, ctypes.c_void_p) for name in ("stride", "bases", "is_copied", "is_pooled")),
        ("num_entries", ctypes.c_int64),
        ("copies_base", ctypes.c_int64),
        ("shard_bits", ctypes.c_int32),
    )


def make_keys(
    ids: Tensor,
    reader: Tensor,
    bag: Tensor,
    *,
    entries: Sequence[Tensor],
    flags: Sequence[Tensor | None],
    shard_bits: int | None,
    bases: Sequence[int],
    dtype: torch.dtype,
    slot_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None] | None:
    """Keys of ``dtype``, and slots of ``slot_dtype`` unless None (`rowmesh.runtime.routes`).

    Args:
        ids, reader, bag: Of `Bags`.
        entries: ``first_entry``, ``num_shards``, ``owner``, ``slot0``, ``stride`` of the layout.
        flags: Per reader: copied, pooled by owners; None if none is.
        shard_bits: Of the layout.
        bases: First keys of rows and bags by owner, then of copies, then the end.
        dtype: Wide enough for the last base.
        slot_dtype: Wide enough for slots.
    """
    lib = library()
    if lib is None or not takes(ids, *entries, dtypes=_LARGE):
        return None
    if not takes(reader, bag, dtypes=_SMALL) or not takes(*flags, dtypes=_BOOL):
        return None
    keys = torch.empty(len(ids), dtype=dtype)
    slots = None if slot_dtype is None else torch.empty(len(ids), dtype=slot_dtype)
    base = torch.tensor(bases, dtype=torch.int64)
    places = Places(
        *(pointer(t) for t in (*entries, base, *flags)),
        len(entries[-1]),
        bases[-2],
        -1 if shard_bits is None else shard_bits,
    )
    done = lib.rm_keys(
        *(ctypes.byref(places), len(ids), pointer(ids), pointer(reader), pointer(bag)),
        *(is_wide(keys), pointer(keys), slots is not None and is_wide(slots), pointer(slots)),
    )
    return (keys, slots) if done == 0 else None
