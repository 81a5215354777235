"""Buffers that keep their memory from step to step.

The C library gives large blocks back to the system and takes them anew every step, and the
system fills the fresh pages with zeros each time.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

__all__ = ["Scratch"]


class Scratch:
    """Named buffers; the next `take` of a name may overwrite what the last one returned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[Hashable, Tensor] = {}

    def take(
        self, name: Hashable, num_rows: int, dim: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """``[num_rows, dim]`` of uninitialised memory."""
        size = num_rows * dim
        kept = self._kept.get((name, dtype))
        if kept is None or len(kept) < size:
            with torch.inference_mode(False):  # the buffer outlives an evaluation
                kept = torch.empty(size + size // 4, dtype=dtype, device=self._device)
            self._kept[name, dtype] = kept
        return kept[:size].view(num_rows, dim)
