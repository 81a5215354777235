"""Files that are written whole or not at all."""

import os
from pathlib import Path

from rowmesh.errors import InputError

__all__ = ["check_target", "write_whole"]


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
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{os.getpid()}")
