"""Who multiplies matrices on the CPU: torch's library, or numpy's where that is faster.

torch comes with MKL, numpy with OpenBLAS, which is faster on AMD's CPUs (docs/kernels.md). Which
one it is follows from the machine and the environment, never from a timing: all ranks and the
oracle must come to the same bits.
"""

import functools
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from rowmesh.errors import InputError

__all__ = ["multiply", "takes_numpy", "why_torch"]

_LEAST: Final = 32  # features in and out; below, a product is not worth leaving torch for
_CHOICES: Final = ("auto", "numpy", "torch")


def takes_numpy(x: Tensor, weight: Tensor) -> bool:
    """Whether numpy multiplies ``[B, in]`` by a weight ``[out, in]``, and their gradients."""
    return (
        x.dim() == 2
        and x.layout == torch.strided
        and x.shape[1] == weight.shape[1]
        and min(weight.shape) >= _LEAST
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and why_torch() is None
    )


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` by numpy, without a gradient of its own."""
    try:
        arrays = a.detach().numpy(), b.detach().numpy()
    except RuntimeError:  # inside torch.func's transforms tensors have no memory of their own
        return a @ b
    out = a.new_empty(a.shape[0], b.shape[1])
    with np.errstate(all="ignore"):  # as torch does
        np.matmul(*arrays, out=out.numpy())
    return out


def why_torch(*, num_threads: int | None = None) -> str | None:
    """Why products are torch's, or None if large ones are numpy's.

    Args:
        num_threads: Of torch and numpy; default what they have.

    Raises:
        InputError: If ROWMESH_PRODUCTS is none of auto, numpy, torch.
    """
    choice = os.environ.get("ROWMESH_PRODUCTS", "auto")
    if choice not in _CHOICES:
        raise InputError(
            f"ROWMESH_PRODUCTS is {choice!r}, but must be one of {', '.join(_CHOICES)}"
        )
    if choice != "auto":
        return "ROWMESH_PRODUCTS=torch" if choice == "torch" else None
    if (num_threads or torch.get_num_threads()) > 1:
        return "it has more than one thread"
    if num_threads is None and not _numpy_has_one_thread():
        return "numpy may use several threads: OMP_NUM_THREADS is not 1"
    return _why_not_faster()


def _numpy_has_one_thread() -> bool:
    """As the environment told its library when that was loaded."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    return next((os.environ[n] for n in names if os.environ.get(n)), "") == "1"


@functools.cache
def _why_not_faster() -> str | None:
    if not torch.backends.mkl.is_available():
        return "it has no MKL"
    if "AuthenticAMD" not in _cpu():
        return "MKL is at its best unless the CPU is AMD's"
    config: Any = np.show_config(mode="dicts")
    blas = str(config["Build Dependencies"]["blas"]["name"])
    return None if "openblas" in blas else f"numpy multiplies by {blas}"


def _cpu() -> str:
    """What the kernel says of the first CPUs; empty where it says nothing."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            return file.read(4096)
    except OSError:
        return ""
