"""What a user calls the program of the ranks, made into words a rank can be started with."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rowmesh.errors import InputError

__all__ = ["rank_words"]

_PYTHON = re.compile(r"python[\d.]*")


def rank_words(command: Sequence[str], *, python: str) -> list[str]:
    """The words that start one rank of ``command`` under the interpreter ``python``.

    ``script.py ...`` and ``-m module ...`` run under it, as do ``python script.py ...`` and a
    console command beside it such as ``rowmesh train ...``; any other program of PATH runs as
    it is.

    Raises:
        InputError: If there is no such file or program, or no command at all.
    """
    if not command:
        raise InputError("there is no command: give script.py, -m module or a program after --")
    first, rest = command[0], list(command[1:])
    if _PYTHON.fullmatch(os.path.basename(first)):
        if not rest:
            raise InputError(f"{first} alone runs nothing: give a script, or -m module")
        if rest[0] not in ("-m", "-c") and rest[0].startswith("-"):
            return [first if os.sep in first else python, "-u", *rest]
        first, rest = rest[0], rest[1:]
    if first in ("-m", "-c"):
        if not rest:
            raise InputError(f"{first} stands alone: name what it runs")
        return [python, "-u", first, *rest]
    return [*_program(first, python), *rest]


def _program(word: str, python: str) -> list[str]:
    if Path(word).is_file():
        path = str(Path(word).absolute())
        return [python, "-u", path] if _is_python(Path(word)) else [path]
    beside = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    found = None if word.endswith(".py") else shutil.which(word, path=beside)
    if found is None:
        kind = "file" if word.endswith(".py") or os.sep in word else "file or program"
        raise InputError(f"the command's first word is {word!r}, but there is no such {kind}")
    is_ours = Path(found).parent == Path(python).parent and _is_python(Path(found))
    return [python, "-u", found] if is_ours else [found]


def _is_python(path: Path) -> bool:
    """A script that the ranks' interpreter runs: by its name, or by its first line."""
    if path.suffix == ".py":
        return True
    with path.open("rb") as file:
        line = file.readline(256)
    return not os.access(path, os.X_OK) or (line.startswith(b"#!") and b"python" in line)
