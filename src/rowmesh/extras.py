"""Optional packages: what each is for, and the one sentence that asks for it."""

import importlib
from typing import Any, Final, NamedTuple

from rowmesh.errors import InputError, did_you_mean

__all__ = ["EXTRAS", "Extra", "require_extra"]


class Extra(NamedTuple):
    """What pip installs, the extra of rowmesh that holds it, and what needs it."""

    requirement: str
    extra: str
    purpose: str


EXTRAS: Final = {
    "safetensors": Extra(
        "safetensors>=0.4", "export", "rm.export_safetensors, and reading such files"
    ),
    "pyarrow": Extra("pyarrow>=16", "parquet", "training on Parquet files and Arrow columns"),
    "tensorboard": Extra("tensorboard>=2.16", "tensorboard", "curves in TensorBoard"),
}


def require_extra(package: str, module: str | None = None) -> Any:
    """An optional package, imported; call it where a program begins that needs it at its end.

    Args:
        package: ``safetensors``, ``pyarrow`` or ``tensorboard``.
        module: The module of it to import; default the package itself.

    Raises:
        InputError: If it cannot be imported, with the line that installs it.
    """
    if package not in EXTRAS:
        raise InputError(f"unknown extra {package!r}{did_you_mean(package, EXTRAS)}")
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        extra = EXTRAS[package]
        raise InputError(
            f"{package} is needed for {extra.purpose}, but is not there ({error}): pip install "
            f"'{extra.requirement}'"
        ) from None
