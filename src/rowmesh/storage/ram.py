"""Rows in main memory, on huge pages where the system gives them."""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

__all__ = ["allocate_rows", "keep_freed_memory"]

_HUGE_PAGE_BYTES = 1 << 21
_MADV_HUGEPAGE = 14
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def allocate_rows(num_rows: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[num_rows, dim]`` of uninitialised memory.

    On Linux the memory of a CPU table is advised to use huge pages: rows are read at random, and
    with 4 KiB pages most reads also miss the address cache. Advice only: nothing fails without.
    """
    rows = torch.empty((num_rows, dim), dtype=dtype, device=device)
    size = rows.numel() * rows.element_size()
    if device.type == "cpu" and sys.platform == "linux" and size >= 2 * _HUGE_PAGE_BYTES:
        start = -(-rows.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = rows.data_ptr() + size - start
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return rows


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for the next step instead of returning them.

    A step frees and takes tens of megabytes; fresh pages must be filled with zeros each time.
    For whole programs only (the command line, benchmarks): it is a setting of the process.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
