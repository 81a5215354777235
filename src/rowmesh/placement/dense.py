"""How dense gradients are bucketed: fixed by the parameters' sizes alone."""

from collections.abc import Sequence

__all__ = ["bucket_elements", "bucket_parameters"]

_LEAST_ELEMENTS = 1 << 16  # of a bucket: less is not worth its messages
_MOST_BUCKETS = 16


def bucket_parameters(numels: Sequence[int]) -> list[list[int]]:
    """Parameters of each bucket, in reverse order, as backward finishes them.

    A bucket is closed by the parameter with which it has 65,536 elements, or a 16th of all if that
    is more: so a layer's large weight, which backward reaches after its bias, does not wait for the
    layer before it. The last bucket holds what is left.
    """
    least = max(_LEAST_ELEMENTS, -(-sum(numels) // _MOST_BUCKETS))
    buckets: list[list[int]] = []
    filled = least
    for i in reversed(range(len(numels))):
        if filled >= least:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += numels[i]
    return buckets


def bucket_elements(numels: Sequence[int]) -> tuple[int, ...]:
    """Elements that travel for each bucket: its gradients, and a flag per parameter."""
    return tuple(
        sum(numels[i] for i in bucket) + len(bucket) for bucket in bucket_parameters(numels)
    )
