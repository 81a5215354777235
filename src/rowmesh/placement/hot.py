"""Hot sets: the ids of a tier, in memory and in a sidecar file beside the plan."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import PlanError
from rowmesh.files import read_array, write_whole
from rowmesh.placement.plan import HotSet, Tier

__all__ = ["holders", "hot_ids", "load_ids", "make_hot_set", "save_ids"]

Ints = NDArray[np.int64]
_MOST_NAME = 60  # characters of a table's name in that of a file, which has room for 255 bytes


def make_hot_set(table: str, ids: Ints) -> HotSet:
    """The hot set of these rows of ``table``.

    Args:
        table: Its name, part of the sidecar's.
        ids: Distinct rows, in any order.

    Raises:
        PlanError: If there is no row, or one comes twice or is negative.
    """
    rows = np.unique(np.asarray(ids, dtype=np.int64))
    if len(rows) != len(ids) or not len(rows) or rows[0] < 0:
        raise PlanError(f"table {table!r}: hot rows must be distinct, from 0, and at least one")
    digest = _digest(rows)
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in table)[:_MOST_NAME]
    hot = HotSet(count=len(rows), sha256=digest, file=f"hot_{name}_{digest[:12]}.npy")
    return _fill(hot, rows)


def save_ids(hot: HotSet, folder: Path, *, where: str) -> None:
    """Write the sidecar into ``folder``; one of that name holds the same, unless it is damaged."""
    stream = io.BytesIO()
    np.save(stream, hot_ids(hot, where=where))
    write_whole(folder / hot.file, stream.getvalue())


def load_ids(hot: HotSet, folder: Path, *, where: str) -> HotSet:
    """The same hot set with the ids of its sidecar in ``folder``.

    Raises:
        PlanError: If the file is not there, or not the one that the plan was made with.
    """
    path = folder / hot.file
    try:
        with path.open("rb") as file:
            rows = read_array(file, num_bytes=os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise PlanError(
            f"{where}: cannot read its hot rows from {path}: {error.strerror}; keep the file "
            f"beside the plan"
        ) from None
    except ValueError as error:
        raise PlanError(f"{where}: {path} is damaged ({error}): make the plan again") from None
    is_set = rows.dtype == np.int64 and rows.ndim == 1 and len(rows) == hot.count
    if not is_set or _digest(rows) != hot.sha256:
        raise PlanError(
            f"{where}: {path} does not hold the {hot.count:,} hot rows that the plan was made "
            f"with: make the plan again"
        )
    return _fill(HotSet(count=hot.count, sha256=hot.sha256, file=hot.file), rows)


def hot_ids(hot: HotSet, *, where: str) -> Ints:
    """The ids, ascending.

    Raises:
        PlanError: If the plan came without them.
    """
    if hot.ids is None:
        raise PlanError(f"{where}: the plan came without its hot rows: read it with rm.load_plan")
    return hot.ids


def holders(tier: Tier, count: int, local: int) -> Ints:
    """Of each row of a tier with copies per host: the local rank that has it, on every host.

    Row i of the set is with local rank i mod L, or if a copy is whole, with the one it lists.
    """
    if tier.split.kind == "whole":
        return np.full(count, tier.ranks[0] % local, dtype=np.int64)
    return np.arange(count, dtype=np.int64) % local


def _fill(hot: HotSet, rows: Ints) -> HotSet:
    rows.flags.writeable = False
    object.__setattr__(hot, "ids", rows)
    return hot


def _digest(rows: Ints) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<i8").tobytes()).hexdigest()
