"""Reports: Markdown tables, verdicts in words, and the files of a page."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rowmesh.errors import InputError
from rowmesh.files import check_target, write_whole

__all__ = ["check_out", "percent", "table", "word", "write_page"]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> list[str]:
    """Lines of a Markdown table; after the ``left`` first columns numbers are set to the right."""
    rule = ["---"] * left + ["--:"] * (len(heads) - left)
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in (heads, rule, *rows)]


def word(holds: bool) -> str:
    """A verdict that fails must not be overlooked."""
    return "yes" if holds else "NO"


def percent(share: float | None) -> str:
    """As ``12.5%``; a dash for what is not known."""
    return "-" if share is None else f"{share:.1%}"


def check_out(out: Path) -> None:
    """Make the folder of ``out``.

    Raises:
        InputError: If it cannot be made, or OUT.md or OUT.json cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {out.parent}: {error.strerror}; name another by --out"
        ) from None
    for suffix in (".md", ".json"):
        check_target(_file(out, suffix), what="the report", way_out="give --out another name")


def write_page(
    out: Path, page: str, document: Any, *, header: str | None = None, picture: str | None = None
) -> None:
    """``OUT.json``, ``OUT.svg`` if there is a picture, and ``OUT.md``, each whole or not at all.

    Args:
        out: The path without a suffix.
        page: Markdown, its first line the title.
        document: All figures, as JSON.
        header: What ran; a line below the title.
        picture: An SVG.
    """
    if header is not None:
        title, _, rest = page.partition("\n")
        page = f"{title}\n\n{header}\n{rest}"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(_file(out, ".json"), json.dumps(document, indent=1) + "\n")
    if picture is not None:
        write_whole(_file(out, ".svg"), picture)
    write_whole(_file(out, ".md"), page)


def _file(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)
