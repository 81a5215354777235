"""Ids of any kind to rows of a table: a 64-bit mixer, and a key for a string of bytes.

The same id gives the same row in every process, run and machine.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Keys", "hash_ids", "mix", "string_keys"]

Keys = npt.NDArray[np.uint64]

# Mixing goes through memory some ten times: a block stays in a core's cache meanwhile.
_BLOCK_KEYS = 1 << 14


def mix(words: Keys, *, shifted: Keys | None = None) -> Keys:
    """SplitMix64 of each word, in place: every bit of the input moves half the bits.

    ``shifted`` is memory of the same size to work in.
    """
    shifted = np.empty_like(words) if shifted is None else shifted
    words += np.uint64(0x9E3779B97F4A7C15)
    words ^= np.right_shift(words, np.uint64(30), out=shifted)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= np.right_shift(words, np.uint64(27), out=shifted)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= np.right_shift(words, np.uint64(31), out=shifted)
    return words


def hash_ids(
    keys: Keys, num_rows: int, *, id_type: type[np.int32] | type[np.int64] = np.int64
) -> npt.NDArray[Any]:
    """``mix(key) mod num_rows`` for each key, as ``id_type``; ``keys`` is left as it is.

    n distinct keys in a table of r rows leave about ``r (1 - exp(-n / r))`` rows in use, as
    random rows would.
    """
    out = np.empty(len(keys), dtype=id_type)
    scratch = np.empty(min(len(keys), _BLOCK_KEYS), dtype=np.uint64)
    for start in range(0, len(keys), _BLOCK_KEYS):
        words = keys[start : start + _BLOCK_KEYS].copy()
        quotients = scratch[: len(words)]
        mix(words, shifted=quotients)
        np.floor_divide(words, np.uint64(num_rows), out=quotients)  # numpy's remainder is slower
        quotients *= np.uint64(num_rows)
        words -= quotients
        out[start : start + _BLOCK_KEYS] = words
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
