"""Popularity that drifts: which row is how popular at a step."""

import numpy as np
import numpy.typing as npt

from rowmesh.errors import check_range

__all__ = ["Drift"]

_Ids = npt.NDArray[np.int64]
_HEAD, _END, _SHARE = 1_000, 100_000, 0.05
_ORDER, _SWAP = 96, 97  # fourth words of a generator's entropy


class Drift:
    """Rows by popularity, some of which change places every few steps.

    After every ``every`` steps 5 % of the ``head`` most popular rows (at least one) change places
    with rows of popularity ``head`` to ``end``, all drawn without replacement: head = 1,000 and
    end = 100,000, or rows / 100 (at least 1) and rows in a table of fewer than 100,000 rows. The
    k-th swap is a function of (seed, k), so the order at a step is one of (seed, step).

    Args:
        num_rows: Rows of the table.
        every: Steps between swaps; None for an order that stays. A table of one row never drifts.
        seed: Below 2^32.
    """

    def __init__(self, num_rows: int, *, every: int | None, seed: int) -> None:
        self._num_rows, self._every, self._seed = num_rows, every, seed
        self.head = _HEAD if num_rows >= _END else max(1, num_rows // 100)
        self.end = min(num_rows, _END)
        self.num_swapped = min(max(1, round(_SHARE * self.head)), self.end - self.head)
        self._order, self._swaps = self._first_order(), 0

    def num_swaps(self, step: int) -> int:
        """Swaps before a step."""
        return 0 if self._every is None or not self.num_swapped else step // self._every

    def order(self, step: int) -> _Ids:
        """``[rows]``: row ids at a step, the most popular first.

        Steps are cheapest in ascending order: going back begins anew.
        """
        check_range("step", step, 0)
        wanted = self.num_swaps(step)
        if wanted < self._swaps:
            self._order, self._swaps = self._first_order(), 0
        if self._swaps < wanted:
            self._order = self._order.copy()  # the one that was given out stays as it is
        while self._swaps < wanted:
            self._swaps += 1
            rng = np.random.default_rng([self._seed, 0, self._swaps, _SWAP])
            above = rng.choice(self.head, self.num_swapped, replace=False)
            below = self.head + rng.choice(
                self.end - self.head, self.num_swapped, replace=False, shuffle=False
            )
            rows = self._order[above]
            self._order[above] = self._order[below]
            self._order[below] = rows
        return self._order

    def _first_order(self) -> _Ids:
        rng = np.random.default_rng([self._seed, 0, 0, _ORDER])
        return rng.permutation(self._num_rows).astype(np.int64, copy=False)
