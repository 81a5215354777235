"""What a lab consists of on this machine, found by its tag, and how it is removed.

A lab is its processes, its namespaces and its folder; nothing else is ever made. A process
belongs to it if it lives in one of the namespaces or carries the tag in its environment.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rowmesh.errors import LabError
from rowmesh.lab.ending import end_processes
from rowmesh.lab.iproute import call
from rowmesh.lab.tags import MARK, Tag, tags_of_folders

__all__ = ["Removed", "clean", "find_tags", "processes_marked", "processes_of", "remove"]

_NAMESPACES = Path("/run/netns")  # where `ip netns` keeps their names


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """What `remove` found of one lab.

    Args:
        tag: Of the lab.
        processes: Ended.
        namespaces: Deleted.
        folders: Deleted, 0 or 1.
    """

    tag: Tag
    processes: int
    namespaces: int
    folders: int


def find_tags() -> list[Tag]:
    """Tags of every lab of which anything is left, be it in use or not."""
    names = {tag for name in _namespaces() if (tag := Tag.parse(name)) is not None}
    return sorted(names | tags_of_folders() | _marks(), key=str)


def clean(*, include_alive: bool = False) -> list[Removed]:
    """Remove the labs whose process has ended; with ``include_alive`` those in use too."""
    return [remove(tag) for tag in find_tags() if include_alive or not tag.is_alive()]


def remove(tag: Tag, *, grace_s: float = 0.0, children: Callable[[], set[int]] = set) -> Removed:
    """End the processes of a lab, then delete its namespaces and its folder.

    May be called again, and on a lab only half built.

    Args:
        tag: Of the lab.
        grace_s: How long processes may take to end after a SIGTERM; 0 kills them at once.
        children: The caller's own processes of the lab that have not ended: one that is only being
            started has no environment yet that tells whose it is.

    Raises:
        LabError: If a process outlives SIGKILL by 10 s, or ``ip`` fails.
    """
    processes = end_processes(lambda: processes_of(tag) | children(), grace_s=grace_s)
    namespaces = [name for name in _namespaces() if Tag.parse(name) == tag]
    for name in namespaces:
        try:
            call("ip", "netns", "del", name)
        except LabError:
            if (_NAMESPACES / name).exists():  # else another `clean` was first
                raise
    had_folder = tag.folder.is_dir()
    shutil.rmtree(tag.folder, ignore_errors=True)
    return Removed(
        tag=tag, processes=processes, namespaces=len(namespaces), folders=int(had_folder)
    )


def _namespaces() -> list[str]:
    try:
        return sorted(os.listdir(_NAMESPACES))
    except OSError:
        return []


def processes_of(tag: Tag) -> set[int]:
    """Processes of a lab, save this one and those that started it."""
    names = [_NAMESPACES / name for name in _namespaces() if Tag.parse(name) == tag]
    inside = {key for path in names if (key := _identity(path)) is not None}
    found = {p for p in _pids() if _identity(Path(f"/proc/{p}/ns/net")) in inside}
    return (found | processes_marked(MARK, str(tag))) - _ancestors()


def processes_marked(name: str, value: str) -> set[int]:
    """Processes in whose first environment the variable ``name`` is ``value``."""
    wanted = f"{name}={value}".encode()
    return {pid for pid in _pids() if wanted in _environment(pid)}


def _marks() -> set[Tag]:
    prefix = f"{MARK}=".encode()
    words = (w for pid in _pids() for w in _environment(pid) if w.startswith(prefix))
    tags = {Tag.parse(w.removeprefix(prefix).decode(errors="replace")) for w in words}
    return {tag for tag in tags if tag is not None}


def _pids() -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):  # no /proc: nothing can be found
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return []


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _ancestors() -> set[int]:
    pid, found = os.getpid(), set[int]()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found
