"""How many distinct rows were seen, told from the smallest hashes of them."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.data.hashing import mix
from rowmesh.profile.counts import Ints

__all__ = ["SKETCH_ERROR", "Hashes", "estimate_distinct", "merge_hashes", "smallest_hashes"]

Hashes = NDArray[np.uint64]
_SIZE: Final = 4096
SKETCH_ERROR: Final = (_SIZE - 2) ** -0.5  # standard error of the estimate, as a share: 1.6 %


def smallest_hashes(rows: Ints) -> Hashes:
    """The 4,096 smallest hashes of distinct rows, ascending, or all if they are fewer."""
    hashes = mix(rows.astype(np.uint64))
    if len(hashes) > _SIZE:
        hashes = np.partition(hashes, _SIZE)[:_SIZE]
    return np.sort(hashes)


def merge_hashes(hashes: Hashes, others: Hashes) -> Hashes:
    """The smallest hashes of the rows of both."""
    return np.union1d(hashes, others)[:_SIZE]


def estimate_distinct(hashes: Hashes) -> float:
    """k minimum values: (k - 1) / largest, hashes as numbers from 0 to 1; fewer than k are exact.

    The mixer has an inverse, so distinct rows have distinct hashes.
    """
    if len(hashes) < _SIZE:
        return float(len(hashes))
    return (_SIZE - 1) / ((float(hashes[-1]) + 1.0) / 2.0**64)
