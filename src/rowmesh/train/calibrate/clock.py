"""The time on a device, once it has done what it was given."""

import time

import torch

__all__ = ["now"]


def now(device: torch.device) -> float:
    """Seconds, from an arbitrary start, after all work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
