"""The file of a profile.

Compatibility rule: a reader accepts exactly its own ``version``, and fields it does not know are
errors. Figures are not stored; they are made anew from the counts.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from rowmesh.errors import InputError, shown
from rowmesh.files import write_whole
from rowmesh.profile.archive import pack, unpack
from rowmesh.profile.chunks import TableSummary
from rowmesh.profile.counts import PHASES
from rowmesh.profile.result import Profile, TableProfile
from rowmesh.typed import build

__all__ = ["batches_by_phase", "load_profile", "save_profile"]

_VERSION: Final = 1
_AGAIN = "make it anew with rowmesh profile"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    name: str
    num_embeddings: int
    feature_names: tuple[str, ...]
    marks: tuple[tuple[int, float], ...]
    further: int
    unseen: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    version: int
    world: int
    num_steps: int
    num_samples: int
    batch_size: int
    rows_kept: int
    chunk_steps: int
    tables: tuple[_Table, ...]


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the profile; a reader never sees half of it, and equal profiles are equal files.

    Raises:
        InputError: If it cannot be written.
    """
    tables = [
        _Table(**{f.name: getattr(table, f.name) for f in dataclasses.fields(_Table)})
        for table in profile.tables
    ]
    names = [f.name for f in dataclasses.fields(_Header) if f.name not in ("version", "tables")]
    facts = {name: getattr(profile, name) for name in names}
    header = _Header(version=_VERSION, tables=tuple(tables), **facts)
    content = pack(dataclasses.asdict(header), [table.summary for table in profile.tables])
    try:
        write_whole(path, content)
    except OSError as error:
        raise InputError(f"cannot write the profile to {path}: {error.strerror}") from None


def load_profile(path: str | Path) -> Profile:
    """Read a profile that `save_profile` wrote.

    Raises:
        InputError: Names the file and what is wrong with it.
    """
    document, summaries = unpack(path)
    if document.get("version") != _VERSION:
        version = document.get("version")
        raise InputError(f"{path}: version {shown(version)} is not {_VERSION}: {_AGAIN}")
    try:
        header = cast(_Header, build(_Header, document, "header"))
    except InputError as error:
        raise InputError(f"{path}: {error}; {_AGAIN}") from None
    is_whole = min(header.world, header.num_steps) >= 1 and len(header.tables) == len(summaries)
    if not is_whole or not all(map(_fits, header.tables, summaries)):
        raise InputError(f"{path}: its header does not fit its counts; {_AGAIN}")
    batches = batches_by_phase(header.world, header.num_steps)
    tables = [
        TableProfile(
            **{f.name: getattr(table, f.name) for f in dataclasses.fields(_Table)},
            summary=summary,
            num_batches=batches,
        )
        for table, summary in zip(header.tables, summaries, strict=True)
    ]
    names = [f.name for f in dataclasses.fields(_Header) if f.name not in ("version", "tables")]
    return Profile(tables=tuple(tables), **{name: getattr(header, name) for name in names})


def batches_by_phase(world: int, num_steps: int) -> tuple[int, int, int, int]:
    """Batches of steps 0, 1, 2, 3 mod 4, of all ranks."""
    p0, p1, p2, p3 = (world * len(range(p, num_steps, PHASES)) for p in range(PHASES))
    return p0, p1, p2, p3


def _fits(table: _Table, summary: TableSummary) -> bool:
    rows = summary.counts.rows
    return not len(rows) or bool(rows[-1] < table.num_embeddings)
