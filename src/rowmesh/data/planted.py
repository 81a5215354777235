"""What planted data is made of: Zipf ids, weights that are a hash of their row, a mean label."""

import numpy as np
import numpy.typing as npt

from rowmesh.data.hashing import mix

__all__ = ["bias_for", "hashed_bits", "hashed_normal", "sigmoid", "zipf_cdf"]

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]
_WORD = 2**32


def zipf_cdf(num_rows: int, alpha: float) -> _Floats:
    """``[num_rows]``: the chance of popularity 1 to k, of k^-alpha / sum_{j<=num_rows} j^-alpha."""
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -alpha
    total = np.cumsum(weights, out=weights)
    total /= total[-1]
    return total


def sigmoid(logits: _Floats) -> _Floats:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits)), dtype=np.float64)


def hashed_bits(seed: int, owners: _Ids, rows: _Ids) -> npt.NDArray[np.uint64]:
    """64 random bits for each (seed, owner, row); owners below 2^24, rows below 2^40."""
    keys = mix(np.array([seed], dtype=np.uint64)) ^ mix(
        (owners.astype(np.uint64) << np.uint64(40)) | rows.astype(np.uint64)
    )
    return mix(keys)


def hashed_normal(seed: int, owners: _Ids, rows: _Ids) -> _Floats:
    """A standard normal for each (seed, owner, row): Box-Muller on the halves of a hash."""
    bits = hashed_bits(seed, owners, rows)
    radius = np.sqrt(-2.0 * np.log(((bits >> np.uint64(32)) + 0.5) / _WORD))
    angle = (bits & np.uint64(_WORD - 1)) * (2.0 * np.pi / _WORD)
    return np.asarray(radius * np.cos(angle), dtype=np.float64)


def bias_for(signal: _Floats, rate: float) -> float:
    """b by bisection: the mean of sigmoid(b + signal) is ``rate``."""
    low, high = -40.0 - float(signal.max()), 40.0 - float(signal.min())
    while high - low > 1e-9:
        middle = (low + high) / 2
        below = sigmoid(middle + signal).mean() < rate
        low, high = (middle, high) if below else (low, middle)
    return round(low, 6)  # rounded: machines differ in the last bits
