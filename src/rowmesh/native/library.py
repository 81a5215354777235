"""The shared library of the kernels: found once, its interface checked, or not there."""

import ctypes
import functools
import os
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["describe", "is_available", "is_wide", "library", "load", "pointer", "ready", "takes"]

_INTERFACE = 4  # of kernels.c: rm_interface
_MOST_IDS = (1 << 31) - 1  # places are int32
_I32, _I64, _F32, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_INTEGERS = (torch.int32, torch.int64)
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "rm_sort": (_I32, [_I64, _P, _I32, _P, _P]),
    "rm_run_starts": (_I64, [_I64, _P, _I32, _P]),
    "rm_run_numbers": (None, [_I64, _P, _I64, _P, _P]),
    "rm_move_runs": (None, [_I64, _P, _I64, _P, _P, _P, _P]),
    "rm_flatten": (_I32, [_I64, _P, _P, _I64, _P, _I32, _P, _I64, _I64, _P, _P, _P, _P]),
    "rm_ids_fit": (_I32, [_I64, _P, _P, _P]),
    "rm_keys": (_I32, [_P, _I64, _P, _P, _P, _I32, _P, _I32, _P]),
    "rm_mark_pooled": (None, [_I64, _P, _I64, _P, _P, _P, _P, _I32, _P, _P, _P]),
    "rm_keep_terms": (_I64, [_I64, _P, _P, _P, _I64, _P, _P, _P, _P]),
    "rm_mark_tree": (None, [_I64, _P, _I32, _P, _I32, _I32, _P, _P, _P]),
    "rm_add_tree": (
        _I32,
        [_I64, _P, _I32, _P, _P, _P, _I64, _P, _I64, _P, _I32, _P, _P, _P, _P],
    ),
    "rm_dots": (_I32, [_I64, _I64, _I64, _P, _P, _P]),
    "rm_dots_backward": (_I32, [_I64, _I64, _I64, _P, _P, _P, _I64, _P, _P]),
    "rm_int8_encode": (None, [_I64, _I64, _P, _P, _P]),
    "rm_int8_decode": (None, [_I64, _I64, _P, _P, _P]),
    "rm_block_squares": (_I32, [_I64, _P, _I64, _I64, _P]),
    "rm_rowwise_adagrad": (
        _I32,
        [_I64, _P, _I32, _P, _I64, _I64, _P, _F32, _F32, _F32, _I64, _P, _P],
    ),
}


Functions = Mapping[str, tuple[type | None, list[type]]]
"""Result and arguments of each."""


def load(
    module: str, *, version: str, interface: int, functions: Functions
) -> tuple[ctypes.CDLL | None, str]:
    """A library of this folder, and where it is or why there is none.

    Args:
        module: Its name, without what the platform adds.
        version: The function that tells the interface it was built from.
        interface: The one wanted.
        functions: All others.
    """
    if os.environ.get("ROWMESH_NATIVE", "") == "0":
        return None, "turned off by ROWMESH_NATIVE=0"
    here = Path(__file__).parent
    path = next((p for s in EXTENSION_SUFFIXES if (p := here / f"{module}{s}").exists()), None)
    if path is None:
        return None, "not built"
    try:
        found = ctypes.CDLL(str(path))
        number = int(getattr(found, version)())
        if number != interface:
            return None, f"built from interface {number}, this is {interface}"
        for name, (result, arguments) in functions.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}"
    return found, path.name


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    """The library, and where it is or why there is none."""
    return load("_kernels", version="rm_interface", interface=_INTERFACE, functions=_FUNCTIONS)


def library() -> ctypes.CDLL | None:
    """The compiled functions, or None; calls release the GIL."""
    return _find()[0]


def is_available() -> bool:
    """Whether there is a library to call."""
    return library() is not None


def describe() -> str:
    """Which library is used, or why none is."""
    return _find()[1]


def ready(tensor: Tensor | None, *dtypes: torch.dtype) -> bool:
    """Whether C may read it: a contiguous CPU tensor of one of these dtypes, or nothing."""
    return tensor is None or (
        tensor.dtype in dtypes
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() <= _MOST_IDS * 64
    )


def takes(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = _INTEGERS) -> bool:
    """Whether all are `ready`; integers unless said otherwise."""
    return all(ready(tensor, *dtypes) for tensor in tensors)


def is_wide(tensor: Tensor) -> bool:
    """int64, not int32."""
    return tensor.dtype == torch.int64


def pointer(tensor: Tensor | None) -> int | None:
    """Of its first element. The caller holds the tensor until the call is over."""
    return None if tensor is None else tensor.data_ptr()
