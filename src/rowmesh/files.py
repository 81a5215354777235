"""Files that are written whole or not at all, and read without trust in what they say.

Note: nothing read is believed. Whatever somebody else wrote ends in a sentence: too long, nested
too deep, numbers of thousands of digits, sizes beyond the bytes that are there. Every reader of
documents and arrays goes through this file, so that none has to know how its parser fails.
"""

import json
import math
import os
import tomllib
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError, RowmeshError

__all__ = [
    "check_target",
    "parse_json",
    "parse_toml",
    "read_array",
    "read_json",
    "read_text",
    "write_whole",
]

_MOST_BYTES: Final = 1 << 30  # of a document: the plan of 65,536 ranks is far below
_MOST_LEVELS: Final = 64  # of lists and objects in each other
_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_text(path: str | Path, *, what: str = "", fault: type[RowmeshError] = InputError) -> str:
    """The text of a file.

    Args:
        path: The file.
        what: As in "cannot read WHAT PATH", if it needs a name.
        fault: The error to raise.

    Raises:
        fault: If it cannot be read, is not UTF-8 or longer than any document.
    """
    try:
        with Path(path).open("rb") as stream:  # not read_text: a device would never end
            content = stream.read(_MOST_BYTES + 1)
        reason = "it has over 1 GiB, as no document has" if len(content) > _MOST_BYTES else ""
        text = "" if reason else content.decode()
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "it is no text"
    except ValueError as error:  # a name with a zero byte
        reason = str(error)
    if reason:
        raise fault(f"cannot read {what}{' ' if what else ''}{path}: {reason}")
    return text


def read_json(path: str | Path, *, what: str = "", fault: type[RowmeshError] = InputError) -> Any:
    """The document in a JSON file; raises as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, what=what, fault=fault), where=str(path), fault=fault)


def parse_json(text: str | bytes, *, where: str, fault: type[RowmeshError] = InputError) -> Any:
    """The document in a JSON text.

    Raises:
        fault: If it is no JSON, or nested deeper than 64 levels.
    """
    return _parse(json.loads, text, where, "JSON", fault)


def parse_toml(text: str, *, where: str, fault: type[RowmeshError] = InputError) -> dict[str, Any]:
    """The document in a TOML text; raises as `parse_json` does."""
    document: dict[str, Any] = _parse(tomllib.loads, text, where, "TOML", fault)
    return document


def _parse(parser: Any, text: str | bytes, where: str, kind: str, fault: type[RowmeshError]) -> Any:
    try:
        document = parser(text)
        _check_levels(document)
    except RecursionError:
        raise fault(f"{where} is nested deeper than {_MOST_LEVELS} levels") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]  # beyond it: Python's advice on long numbers
        raise fault(f"{where} is not {kind}: {reason}") from None
    return document


def _check_levels(document: Any) -> None:
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(_MOST_LEVELS):
        inside = (v.values() if isinstance(v, dict) else v for v in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
    if level:
        raise RecursionError


def read_array(stream: IO[bytes], *, num_bytes: int) -> NDArray[Any]:
    """The array of a ``.npy`` stream of ``num_bytes``, read-only.

    What its header asks for is compared with the bytes that are there before memory is.

    Raises:
        ValueError: If it is none, is damaged, or holds objects.
    """
    try:
        shape, by_columns, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
    except OSError:
        raise
    except Exception:  # whatever a broken header makes numpy's parser raise
        raise ValueError("its header is no numpy header") from None
    size, left = math.prod(shape) * dtype.itemsize, num_bytes - stream.tell()
    if dtype.hasobject:
        raise ValueError("it holds objects, which are not read")
    if size != left or min(shape, default=0) < 0:
        raise ValueError(f"its header speaks of {size:,} bytes, but {left:,} follow")
    if not size:
        return np.empty(shape, dtype=dtype)
    found = np.frombuffer(stream.read(size), dtype=dtype)
    return found.reshape(shape, order="F" if by_columns else "C")


def check_target(path: str | Path, *, what: str, way_out: str) -> None:
    """Whether `write_whole` could write to ``path``, before hours are spent on what goes there.

    Args:
        path: The file.
        what: As in "cannot write WHAT to PATH".
        way_out: The end of the sentence.

    Raises:
        InputError: If its folder is not there or takes no file, or ``path`` is a folder, a device
            or anything else that is no file and would be lost.
    """
    path = Path(path)
    folder, problem = path.absolute().parent, None
    try:
        if not folder.is_dir():
            problem = f"{folder} is no folder"
        elif path.is_dir():
            problem = "it is a folder"
        elif path.exists() and not path.is_file():
            problem = "it is no regular file"
        else:
            _partial(path).touch()
            _partial(path).unlink()
    except OSError as error:
        problem = str(error.strerror)
    if problem is not None:
        raise InputError(f"cannot write {what} to {path}: {problem}; {way_out}")


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write ``content`` to ``path``; a reader sees all of it or what was there before.

    Raises:
        OSError: If it cannot be written; what was there before is then still there.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(None, "it is no regular file", str(path))
    partial = _partial(path)
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as stream:  # anew: a link of that name is not followed
            stream.write(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{os.getpid()}")
