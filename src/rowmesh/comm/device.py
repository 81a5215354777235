"""Where a rank's tensors live: the CPU, unless CUDA is asked for."""

import os
import warnings

import torch

from rowmesh.errors import InputError

__all__ = ["choose_device"]


def choose_device(asked: torch.device | str | None) -> torch.device:
    """The device that was asked for, by argument or by ROWMESH_DEVICE; else the CPU.

    Raises:
        InputError: If rowmesh does not run there, or this machine has no such device.
    """
    name = str(asked or os.environ.get("ROWMESH_DEVICE") or "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r}: rowmesh runs on 'cpu', or on 'cuda' if asked to")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise InputError(f"device {name!r}: torch finds no CUDA device here; say 'cpu'")
    warnings.warn(
        "rowmesh on CUDA has not been run by its authors: prove your plan with rm.verify first",
        stacklevel=3,  # the caller of init_mesh
    )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank if device.index is None else device.index)
