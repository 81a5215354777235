"""How dense gradients are bucketed: fixed by the parameters' sizes alone."""

from collections.abc import Sequence

__all__ = ["BUCKET_ELEMENTS", "bucket_elements", "bucket_parameters"]

BUCKET_ELEMENTS = 1 << 18


def bucket_parameters(numels: Sequence[int], *, cap: int = BUCKET_ELEMENTS) -> list[list[int]]:
    """Parameters of each bucket: in reverse order, as backward finishes them, up to ``cap``.

    A parameter larger than ``cap`` has a bucket of its own.
    """
    buckets: list[list[int]] = []
    filled = 0
    for i in reversed(range(len(numels))):
        if not buckets or filled + numels[i] > cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += numels[i]
    return buckets


def bucket_elements(numels: Sequence[int], *, cap: int = BUCKET_ELEMENTS) -> tuple[int, ...]:
    """Elements that travel for each bucket: its gradients, and a flag per parameter."""
    return tuple(
        sum(numels[i] for i in bucket) + len(bucket)
        for bucket in bucket_parameters(numels, cap=cap)
    )
