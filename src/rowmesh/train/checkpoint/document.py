"""metadata.json: everything of a checkpoint that is not a tensor, and where each tensor lies.

Its first line holds the SHA-256 of all bytes after that line, so that no damaged byte is believed.

Compatibility rule: a reader accepts exactly its own ``version``. A new field that readers may
ignore keeps the version; any other change raises it, and this module then converts the older one.
The first line never changes, so a newer checkpoint is told from a damaged one.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from rowmesh.errors import InputError, shown
from rowmesh.files import parse_json

__all__ = [
    "DTYPES",
    "METADATA",
    "DamagedError",
    "StoredChunk",
    "check_jsonable",
    "decode",
    "encode",
    "is_shape",
    "read_document",
]

FORMAT_VERSION: Final = 1
METADATA: Final = "metadata.json"
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
_HEAD: Final = '{"sha256": "%s",\n'
_TABLE: Final = {"rows", "dim", "dtype", "shards"}
_TENSOR: Final = {"shape", "dtype", "chunks"}
_FIELDS: Final = {
    "step": int,
    "world": int,
    "tables": dict,
    "rule": str | None,
    "sparse_group": dict | None,
    "dense_optimizer": dict | None,
    "plan": str | None,
    "extra": dict,
    "files": list,
    "tensors": dict,
}


class DamagedError(InputError):
    """Bytes of a checkpoint are missing or not those that were written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """Where the bytes of one box are: plain elements in row-major order, little-endian.

    Args:
        offsets, sizes: The box within its tensor.
        file: Name within the checkpoint's folder.
        at: First byte.
        crc32: Of the bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    crc32: int


def encode(document: dict[str, Any]) -> bytes:
    """The bytes of metadata.json."""
    text = json.dumps({"version": FORMAT_VERSION} | document, separators=(",", ":"))
    body = (text[1:] + "\n").encode()
    return (_HEAD % hashlib.sha256(body).hexdigest()).encode() + body


def decode(data: bytes, where: Path) -> dict[str, Any]:
    """The document that `encode` wrote.

    Raises:
        DamagedError: If a byte of it is not as written.
        InputError: If it is of another version.
    """
    line, newline, body = data.partition(b"\n")
    if line + newline != (_HEAD % hashlib.sha256(body).hexdigest()).encode():
        raise DamagedError(f"{where} is damaged: its SHA-256 is not the one in its first line")
    document = parse_json(data, where=str(where))
    if not isinstance(document, dict):
        raise InputError(f"{where} must be an object, got {shown(document)}")
    if document.get("version") != FORMAT_VERSION:
        raise InputError(
            f"{where} is of checkpoint version {document.get('version')!r}, but this rowmesh reads "
            f"version {FORMAT_VERSION}: load it with the rowmesh that wrote it"
        )
    for name, kind in _FIELDS.items():
        if not isinstance(document.get(name), kind):
            raise InputError(f"{where}: field {name!r} is {shown(document.get(name))}, not {kind}")
    for name, table in document["tables"].items():
        if not isinstance(table, dict) or not table.keys() >= _TABLE:
            raise InputError(f"{where}: table {name!r} is {shown(table)}, without {sorted(_TABLE)}")
    for key, entry in document["tensors"].items():
        if not isinstance(entry, dict) or not entry.keys() >= _TENSOR:
            raise InputError(
                f"{where}: tensor {key!r} is {shown(entry)}, without {sorted(_TENSOR)}"
            )
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise InputError(f"{where}: tensor {key!r} is of unknown type {shown(entry['dtype'])}")
        if not is_shape(entry["shape"]) or not isinstance(entry["chunks"], list):
            raise InputError(f"{where}: tensor {key!r} is described wrongly: {shown(entry)}")
    for name in document["files"]:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"{where}: file {shown(name)} is not in the folder")
    return dict(document)


def is_shape(value: Any) -> bool:
    """Whether these are sizes that a tensor may have."""
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        return False
    elements: int = math.prod(max(n, 1) for n in value)
    return elements < 1 << 58


def read_document(folder: Path) -> dict[str, Any]:
    """metadata.json of ``folder``; raises as `decode` does."""
    path = folder / METADATA
    try:
        return decode(path.read_bytes(), path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None


def check_jsonable(value: Any, where: str) -> None:
    """Refuse what JSON would not give back: tuples come back as lists, everything else as it is.

    Raises:
        InputError: Names the place and the type.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"{where}: key {key!r} is no string, as keys in JSON must be")
            check_jsonable(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_jsonable(item, f"{where}[{i}]")
    elif not isinstance(value, str | int | float | bool | None):
        raise InputError(
            f"{where} is of type {type(value).__name__}, which a checkpoint does not hold: give "
            f"numbers, strings, lists and dicts"
        )
