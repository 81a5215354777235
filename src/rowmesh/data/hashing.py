"""Ids of any kind to rows of a table: a 64-bit mixer, and a key for a string of bytes.

The same id gives the same row in every process, run and machine.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["Keys", "hash_ids", "mix", "string_keys"]

Keys = npt.NDArray[np.uint64]

# Mixing goes through memory some ten times: a block stays in a core's cache meanwhile.
_BLOCK_KEYS = 1 << 13


def mix(words: Keys) -> Keys:
    """SplitMix64 of each word, in place: every bit of the input moves half the bits."""
    words += np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def hash_ids(keys: Keys, num_rows: int) -> npt.NDArray[np.int64]:
    """``mix(key) mod num_rows`` for each key; ``keys`` is left as it is.

    n distinct keys in a table of r rows leave about ``r (1 - exp(-n / r))`` rows in use, as
    random rows would.
    """
    out = np.empty(len(keys), dtype=np.int64)
    for start in range(0, len(keys), _BLOCK_KEYS):
        block = slice(start, start + _BLOCK_KEYS)
        np.remainder(mix(keys[block].copy()), np.uint64(num_rows), out=out[block].view(np.uint64))
    return out


def string_keys(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Keys:
    """A key for each string ``data[offsets[i]:offsets[i + 1]]``.

    ``key = mix(length + sum_p mix(256 p + byte_p))`` modulo 2^64, p from 0: equal strings have
    equal keys, others the same key once in about 2^64 pairs.
    """
    lengths = np.diff(offsets)
    first = int(offsets[0])
    place = np.arange(int(lengths.sum()), dtype=np.int64)
    place -= np.repeat(offsets[:-1] - first, lengths)
    words = mix((place << 8).view(np.uint64) + data[first : int(offsets[-1])])
    sums = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(words, out=sums[1:])  # wraps around, and so does the difference
    ends = sums[offsets - first]
    return mix(ends[1:] - ends[:-1] + lengths.view(np.uint64))
