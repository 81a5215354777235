"""Rows as whole steps of a scale each."""

import torch
from torch import Tensor

from rowmesh.native.library import library, pointer, takes

__all__ = ["decode_int8", "encode_int8"]

_FLOAT, _BYTE = (torch.float32,), (torch.int8,)


def encode_int8(block: Tensor, scales: Tensor, steps: Tensor) -> bool:
    """Fill ``scales`` [n] and ``steps`` [n * D] from ``block`` [n, D]; False if nothing was done.

    What a number of a row with a NaN or an infinity becomes is not defined.
    """
    lib = library()
    if lib is None or not _fit(block, scales, steps):
        return False
    lib.rm_int8_encode(*block.shape, pointer(block), pointer(scales), pointer(steps))
    return True


def decode_int8(scales: Tensor, steps: Tensor, block: Tensor) -> bool:
    """Fill ``block`` with steps times scale; False if nothing was done."""
    lib = library()
    if lib is None or not _fit(block, scales, steps):
        return False
    lib.rm_int8_decode(*block.shape, pointer(scales), pointer(steps), pointer(block))
    return True


def _fit(block: Tensor, scales: Tensor, steps: Tensor) -> bool:
    is_known = takes(block, scales, dtypes=_FLOAT) and takes(steps, dtypes=_BYTE)
    return is_known and len(scales) == len(block) and steps.numel() == block.numel()
