"""What this machine has: the memory its ranks may use, measured."""

from collections.abc import Iterator
from pathlib import Path

from rowmesh.errors import InputError

__all__ = ["RESERVE_SHARE", "available_bytes", "measure_memory"]

RESERVE_SHARE = 0.2  # for activations, messages in flight and everything else that runs here
_KIB = 1024


def measure_memory(local: int, *, root: Path | str = "/") -> int | None:
    """Bytes that tables and optimiser state of one of ``local`` ranks may use on this machine.

    (1 - `RESERVE_SHARE`) of what is available now, divided by ``local``; None where the system
    does not tell. Ranks and moments differ: to plan on every rank, agree on the smallest first.

    Args:
        local: Ranks of this host.
        root: Of the file system that is asked.
    """
    if local < 1:
        raise InputError(f"local is {local}, but must be at least 1")
    available = available_bytes(root=root)
    return None if available is None else int(available * (1.0 - RESERVE_SHARE)) // local


def available_bytes(*, root: Path | str = "/") -> int | None:
    """Memory this process could still take: MemAvailable, or what its control groups leave.

    The least of ``MemAvailable`` in /proc/meminfo and, for the process's group and all groups
    above it, limit less usage (version 2: memory.max and memory.current; version 1:
    memory.limit_in_bytes and memory.usage_in_bytes). The page cache of a group counts as used
    except for what it can drop (``inactive_file``).
    """
    root = Path(root)
    found = list(_left_in_groups(root))
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * _KIB)
    return max(0, min(found)) if found else None


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left in every control group that limits this process."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, limit, used = top / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            base, limit, used = top, "memory.max", "memory.current"
        else:
            continue
        group = base / path.strip("/")
        # Inside a container the path is often that of the host: the mounted top is ours then.
        for folder in (group, *group.parents):
            left = _left(folder, limit, used)
            if left is not None:
                yield left
            if folder == base:
                break


def _left(folder: Path, limit: str, used: str) -> int | None:
    most, now = _read(folder / limit).strip(), _read(folder / used).strip()
    if not (most.isdigit() and now.isdigit()):  # no such file, or "max"
        return None
    droppable = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            droppable = int(value)
    return int(most) - int(now) + droppable


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
