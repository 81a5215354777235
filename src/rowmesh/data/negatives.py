"""Items that a user does not know, drawn by counter: no state, no second try."""

import numpy as np
import numpy.typing as npt

from rowmesh.data.hashing import mix
from rowmesh.data.sequence_files import Sequences
from rowmesh.errors import InputError

__all__ = ["Negatives"]

_Ids = npt.NDArray[np.int64]


class Negatives:
    """Uniform draws, with replacement, from the items outside a user's whole sequence.

    With a_0 < a_1 < ... the items that user u knows, of n in all, draw k is the k-th item that is
    none of them: ``k + #{i : a_i - i <= k}``, for k a hash modulo ``n - #a``. So every draw is a
    function of its counter alone, and costs one search.

    Raises:
        InputError: If a user knows all items.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._num_items = sequences.num_items
        known = np.unique(sequences.users * self._num_items + sequences.items)
        users = known // self._num_items
        counts = np.bincount(users, minlength=sequences.num_users)
        if counts.max() == self._num_items:
            raise InputError(
                f"the user at place {int(counts.argmax())} knows all {self._num_items} items, so "
                f"none is left for a negative: take this user out of the file"
            )
        self._firsts = np.cumsum(counts) - counts
        self._unknown = self._num_items - counts
        # Ascending over all users, since a_i - i is below n + 1 and does not fall.
        places = np.arange(len(known)) - self._firsts[users]
        self._keys = users * (self._num_items + 1) + known % self._num_items - places

    def draw(self, users: _Ids, counters: _Ids, count: int, *, stream: int) -> _Ids:
        """``[len(users), count]`` rows: for each user those of its counter.

        Args:
            users: Places of users.
            counters: A number for each, from 0.
            count: Draws for each.
            stream: Below 2^64; other streams are other draws.
        """
        words = (counters[:, None] * count + np.arange(count)).astype(np.uint64)
        bits = mix(mix(words) ^ mix(np.array([stream], dtype=np.uint64)))
        pools = self._unknown[users, None].astype(np.uint64)
        k = (bits % pools).astype(np.int64)
        keys = users[:, None] * (self._num_items + 1) + k
        below = np.searchsorted(self._keys, keys, side="right") - self._firsts[users, None]
        return np.asarray(k + below, dtype=np.int64)
