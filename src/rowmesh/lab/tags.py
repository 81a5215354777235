"""The name all parts of a lab carry: it says who made the lab, so that left-overs can be told."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MARK", "Tag", "new_tag"]

MARK = "ROWMESH_LAB"  # in the environment of every process of a lab: its tag
_PATTERN = re.compile(r"rowmesh-lab-(\d+)-(\d+)-(\d+)")
_FOLDERS = Path("/tmp")  # not TMPDIR: `rowmesh lab clean` may run in another environment


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """Names one lab after the process that made it.

    Args:
        pid: Of that process.
        start: When it started, in clock ticks since boot: a later process may get the same pid,
            but not the same start.
        number: Of the lab, among those of the process.
    """

    pid: int
    start: int
    number: int

    def __str__(self) -> str:
        return f"rowmesh-lab-{self.pid}-{self.start}-{self.number}"

    @staticmethod
    def parse(name: str) -> "Tag | None":
        """The tag that ``name`` begins with, or None."""
        match = re.match(rf"{_PATTERN.pattern}(?!\d)", name)
        return match and Tag(pid=int(match[1]), start=int(match[2]), number=int(match[3]))

    @property
    def folder(self) -> Path:
        """The lab's only folder: host files, and logs nobody asked to keep."""
        return _FOLDERS / str(self)

    @property
    def switch(self) -> str:
        """Namespace of the switch."""
        return f"{self}-switch"

    def host(self, host: int) -> str:
        """Namespace of a host."""
        return f"{self}-host{host}"

    def is_alive(self) -> bool:
        """Whether the process that made the lab still runs."""
        return start_time(self.pid) == self.start


def new_tag() -> Tag:
    """A tag of this process that no lab has, with its folder made."""
    pid, number = os.getpid(), 0
    start = start_time(pid) or 0  # no /proc, no namespaces: a tag of a lab on loopback
    while True:
        tag = Tag(pid=pid, start=start, number=number)
        with contextlib.suppress(FileExistsError):
            tag.folder.mkdir(mode=0o700)
            return tag
        number += 1


def tags_of_folders() -> set[Tag]:
    """Tags of all folders of labs that belong to this user."""
    mine = (p for p in _FOLDERS.glob("rowmesh-lab-*") if p.lstat().st_uid == os.geteuid())
    return {tag for p in mine if (tag := Tag.parse(p.name)) is not None and str(tag) == p.name}


def start_time(pid: int) -> int | None:
    """Clock ticks since boot when process ``pid`` started; None if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])
