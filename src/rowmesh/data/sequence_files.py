"""Files of what users took, one after the other: read whole, ids made rows of tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowmesh.errors import InputError
from rowmesh.files import read_text

__all__ = ["Sequences", "read_lines", "read_ratings"]

_Ids = npt.NDArray[np.int64]
_MOST_DIGITS = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """Items of users in time order: user u took ``items[offsets[u]:offsets[u + 1]]``.

    Args:
        items: Rows of the item table: places of the ids among the distinct ids, ascending.
        offsets: ``[users + 1]``; users are in ascending order of their ids.
        num_items: Distinct items.
        times: When each was taken; None where the file does not say.
    """

    items: _Ids
    offsets: _Ids
    num_items: int
    times: _Ids | None = None

    @property
    def num_users(self) -> int:
        """Users, with those who took one item only."""
        return len(self.offsets) - 1

    @property
    def users(self) -> _Ids:
        """The user of each item."""
        return np.repeat(np.arange(self.num_users), np.diff(self.offsets))


def read_lines(path: str) -> Sequences:
    """A file of one user a line, ``user item item ...`` in time order, all whole numbers.

    Raises:
        InputError: If it cannot be read, has no item, a word is no whole number, or a user has
            two lines.
    """
    lines = _lines(path)
    words = [line.split() for line in lines]
    numbers = _whole(path, [w for ws in words for w in ws], [len(ws) for ws in words])
    counts = np.array([len(ws) - 1 for ws in words if ws], dtype=np.int64)
    firsts = np.cumsum(counts + 1) - counts - 1
    ids, order = np.unique(numbers[firsts], return_index=True)
    if len(ids) < len(firsts):
        twice = np.setdiff1d(np.arange(len(firsts)), order)[0]
        raise InputError(
            f"{path}: user {numbers[firsts[twice]]} has two lines: put all items of a user on one"
        )
    items = np.delete(numbers, firsts)
    users = np.repeat(np.arange(len(counts)), counts)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return _sequences(path, rank[users], items, None, num_users=len(ids))


def read_ratings(path: str) -> Sequences:
    """A file of ratings, ``user::item::rating::time``, in any order; time is a whole number.

    A user's items are ordered by time, those of one time by their lines. The rating is not used:
    that a user rated an item is what there is to predict.

    Raises:
        InputError: If it cannot be read, has no rating, or a line is not of that form.
    """
    lines = [line for line in _lines(path) if line.strip()]
    for number, line in enumerate(lines, 1):
        if line.count("::") != 3:
            raise InputError(
                f"{path}: rating {number} is {line[:60]!r}, but must be user::item::rating::time"
            )
    words = [word for line in lines for word in line.split("::")]
    user_ids, item_ids, times = (_whole(path, words[k::4], [1] * len(lines)) for k in (0, 1, 3))
    ids, users = np.unique(user_ids, return_inverse=True)
    return _sequences(path, users, item_ids, times, num_users=len(ids))


def _sequences(
    path: str, users: _Ids, items: _Ids, times: _Ids | None, *, num_users: int
) -> Sequences:
    if not len(items):
        raise InputError(f"{path} has no item: there is nothing to learn from")
    order = np.lexsort((users,) if times is None else (times, users))  # stable
    ids, rows = np.unique(items, return_inverse=True)
    offsets = np.zeros(num_users + 1, dtype=np.int64)
    np.cumsum(np.bincount(users, minlength=num_users), out=offsets[1:])
    return Sequences(
        items=rows[order].astype(np.int64, copy=False),
        offsets=offsets,
        num_items=len(ids),
        times=None if times is None else times[order],
    )


def _lines(path: str) -> list[str]:
    try:
        return read_text(path).splitlines()
    except InputError as error:
        raise InputError(
            f"cannot read the sequences in {str(error).removeprefix('cannot read ')}; give a file: "
            f"--set data.path=FILE"
        ) from None


def _whole(path: str, words: Sequence[str], per_line: Sequence[int]) -> _Ids:
    """``words`` as numbers, of which every line has so many."""
    try:
        return _numbers(words)
    except (ValueError, OverflowError):
        for number, word in zip(np.repeat(np.arange(len(per_line)), per_line), words, strict=True):
            try:
                _numbers([word])
            except (ValueError, OverflowError):
                raise InputError(
                    f"{path}, line {number + 1}: {word[:40]!r} is no whole number of 64 bits: "
                    f"number users and items"
                ) from None
        raise


def _numbers(words: Sequence[str]) -> _Ids:
    if max(map(len, words), default=0) > _MOST_DIGITS:
        raise ValueError("numpy would make every word as long as the longest")
    return np.array(words, dtype=np.str_).astype(np.int64)
