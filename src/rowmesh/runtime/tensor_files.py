"""Named tensors in files: safetensors and torch's own, read without loading them whole.

safetensors writes a file from tensors that are all in memory, so a large model is several files
and an index of them, in the form that Hugging Face's libraries read.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.comm.status import sentence_of
from rowmesh.errors import InputError, shown
from rowmesh.extras import require_extra
from rowmesh.files import read_json

__all__ = ["INDEX_NAME", "open_array", "open_tensors", "require_safetensors", "write_tensors"]

INDEX_NAME = "model.safetensors.index.json"
_TORCH = (".pt", ".pth", ".bin")


def require_safetensors() -> Any:
    """The optional library.

    Raises:
        InputError: Saying how to install it.
    """
    require_extra("safetensors", "safetensors.torch")
    return require_extra("safetensors")


def open_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file or folder by name, mapped into memory: a page is read when touched.

    Args:
        path: A ``.safetensors`` file, an ``.index.json`` file, a folder that holds either, or a
            state dict by ``torch.save`` (``.pt``, ``.pth``, ``.bin``).

    Raises:
        InputError: If it is none of these or cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            path = _file_in(path)
        if path.name.endswith(".index.json"):
            return _open_indexed(path)
        if path.suffix == ".safetensors":
            return _open_safetensors(path)
        if path.suffix in _TORCH:
            found = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
            if isinstance(found, Mapping):
                return dict(found)
            raise InputError(f"{path} holds a {type(found).__name__}, not a state dict")
    except InputError:
        raise
    except Exception as error:  # whatever a broken file makes its reader raise
        raise InputError(f"cannot read {path}: {sentence_of(error)}") from None
    raise InputError(
        f"{path} is no .safetensors, .index.json, {', '.join(_TORCH)} file and no folder of one"
    )


def open_array(path: str | os.PathLike[str], *, name: str) -> Tensor:
    """One tensor of a ``.npy`` or ``.safetensors`` file, mapped into memory.

    A safetensors file must hold one tensor, or one called ``name`` or ``weight``.

    Raises:
        InputError: If it does not, or cannot be read.
    """
    path = Path(path)
    if path.suffix == ".npy":
        try:  # copy on write: torch warns of arrays it must not write to
            return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        except Exception as error:
            raise InputError(f"cannot read {path}: {sentence_of(error)}") from None
    if path.suffix != ".safetensors":
        raise InputError(f"{path} is no .npy or .safetensors file")
    found = open_tensors(path)
    key = (
        next(iter(found))
        if len(found) == 1
        else next((k for k in (name, "weight") if k in found), "")
    )
    if not key:
        raise InputError(
            f"{path} holds {len(found)} tensors, none called {name!r} or 'weight': give the one "
            f"to take as a tensor"
        )
    return found[key]


def _file_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.index.json")) or sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(f"folder {folder} must hold one {INDEX_NAME} or one .safetensors file")
    return files[0]


def _open_indexed(path: Path) -> dict[str, Tensor]:
    document = read_json(path)
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise InputError(f"{path} has no weight_map of tensors to files")
    for name in set(files.values()):
        if Path(name).name != name or len(name) > 255:
            raise InputError(f"{path} names {shown(name)}, which is no file beside it")
    opened = {name: _open_safetensors(path.parent / name) for name in set(files.values())}
    for key, name in files.items():
        if key not in opened[name]:
            raise InputError(f"{path} says that {shown(key)} is in {name}, which does not hold it")
    return {key: opened[name][key] for key, name in files.items()}


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    with require_safetensors().safe_open(str(path), framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file that is there whole or not at all, also after a crash.

    Raises:
        OSError: If it cannot be written.
    """
    library = require_safetensors()
    seen: set[int] = set()
    plain = {}
    for key, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        # the format has no aliases: a tensor known by two keys is written twice
        plain[key] = tensor.clone() if pointer in seen else tensor.contiguous()
        seen.add(pointer)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".rowmesh-") as folder:
        file = Path(folder) / path.name
        try:
            library.torch.save_file(plain, file, metadata={"format": "pt"})
        except library.SafetensorError as error:
            raise OSError(str(error)) from None
        with file.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(file, path)
