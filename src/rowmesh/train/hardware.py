"""What the machine gives: cores, memory, shared memory, descriptors, network.

Every check reads below ``root``, the file system's root, and never fails: a file that is missing
or unreadable makes its part "unknown".
"""

import mmap
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rowmesh.train.machine import available_bytes

__all__ = [
    "Finding",
    "check_compiler",
    "check_cores",
    "check_descriptors",
    "check_huge_pages",
    "check_memory",
    "check_shared_memory",
]

GIB, MIB = 1 << 30, 1 << 20
ROOT = Path("/")
_RANK_BYTES = GIB // 2  # what a rank takes before any table, torch's libraries mostly
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number about 2^63 for "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One answer of `rowmesh doctor`.

    Args:
        name: Of what was looked at.
        value: What was found.
        ok: Whether it is as it should be; None where it is unknown or a matter of taste.
        advice: What to do about it, or what it is for; may be empty.
    """

    name: str
    value: str
    ok: bool | None
    advice: str = ""


def read(path: Path) -> str | None:
    """The text of a small file, or None."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def check_cores(root: Path = ROOT) -> Finding:
    """Cores this process may run on, and the share of them its control group allows."""
    total = os.cpu_count() or 1
    # not on every system: macOS pins no process
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    value = f"{cores} of {total} ({platform.machine()})"
    quota = min(_quotas(root), default=None)
    if quota is None:
        return Finding(name="cores", value=value, ok=True)
    advice = ""
    if quota < cores:
        advice = f"more than {max(1, int(quota))} ranks share the {quota:.1f} cores allowed"
    return Finding(
        name="cores", value=f"{value}, control group allows {quota:.1f}", ok=True, advice=advice
    )


def _quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        quota, period = (read(folder / f"cpu.cfs_{w}_us") for w in ("quota", "period"))
        words = (read(folder / "cpu.max") or f"{quota} {period}").split()
        if len(words) == 2 and all(w.isdigit() for w in words) and int(words[1]):
            yield int(words[0]) / int(words[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, innermost first, under either version."""
    base = root / "sys/fs/cgroup"
    for line in (read(root / "proc/self/cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0":
            top = base
        elif controller in names.split(","):
            top = next((p for p in (base / controller, base / names) if p.is_dir()), base)
        else:
            continue
        inner = Path(path.lstrip("/"))
        yield from (top / p for p in (inner, *inner.parents))


def check_memory(root: Path = ROOT) -> Finding:
    """Memory that can be had, and the control group's limit where there is one."""
    values = _meminfo(root)
    available, total = values.get("MemAvailable"), values.get("MemTotal")
    parts = []
    if available is not None and total is not None:
        parts.append(f"{available / GIB:.1f} GiB available of {total / GIB:.1f}")
    limits = list(_memory_limits(root))
    if limits:
        parts.append(f"control group allows {min(limits) / GIB:.1f}")
    usable = available_bytes(root=root)
    if usable is None:
        return Finding(name="memory", value="unknown", ok=None)
    ok = usable >= _RANK_BYTES
    advice = "" if ok else f"a rank takes about {_RANK_BYTES / GIB:.1f} GiB before any table"
    value = f"{', '.join(parts)}; {usable / GIB:.1f} free to use"
    return Finding(name="memory", value=value, ok=ok, advice=advice)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (read(root / "proc/meminfo") or "").splitlines()
    found = (re.match(r"(\w+):\s+(\d+) kB", line) for line in lines)
    return {m[1]: int(m[2]) * 1024 for m in found if m}


def _memory_limits(root: Path) -> Iterator[int]:
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read(folder / name) or ""
            if limit.isdigit() and int(limit) < _NO_LIMIT:
                yield int(limit)


def check_shared_memory(root: Path = ROOT) -> Finding:
    """Whether a segment in /dev/shm can be reserved, mapped and written."""
    folder, name = root / "dev/shm", "shared memory"
    try:
        stat = os.statvfs(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="rowmesh-") as file:
            file.truncate(MIB)
            if hasattr(os, "posix_fallocate"):  # a write beyond the space would be a SIGBUS
                os.posix_fallocate(file.fileno(), 0, MIB)
            with mmap.mmap(file.fileno(), MIB) as segment:
                segment[-1] = 1
    except OSError as error:
        advice = "loaders with workers need it: mount a tmpfs there"
        return Finding(name=name, value=f"/dev/shm: {error.strerror}", ok=None, advice=advice)
    size = stat.f_blocks * stat.f_frsize
    value = f"/dev/shm of {size / MIB:,.0f} MiB, {stat.f_bavail * stat.f_frsize / MIB:,.0f} free"
    small = "a container's is 64 MiB unless started with --shm-size=1g" if size < GIB // 4 else ""
    return Finding(name=name, value=value, ok=True, advice=small)


def check_descriptors(root: Path = ROOT) -> Finding:
    """Open files allowed, and the ranks they suffice for."""
    name = "file descriptors"
    line = re.search(
        r"^Max open files\s+(\S+)\s+(\S+)", read(root / "proc/self/limits") or "", re.M
    )
    if line is None:
        return Finding(name=name, value="unknown", ok=None)
    soft, hard = line[1], line[2]
    value = f"soft limit {soft}, hard {hard}"
    if not soft.isdigit():
        return Finding(name=name, value=value, ok=True)
    ranks = max(0, (int(soft) - 64) // 6)  # measured: 21 + 6 a rank; 64 leaves some for data
    enough = ranks >= 2
    advice = "" if ranks >= 256 else f"for more ranks: ulimit -n {hard}"
    value += f", enough for {ranks:,} ranks" if enough else ", too few for two ranks"
    return Finding(name=name, value=value, ok=enough, advice=advice)


def check_huge_pages(root: Path = ROOT) -> Finding:
    """Whether large tables can lie on huge pages, which makes random reads cheaper."""
    name = "huge pages"
    found = read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    word = re.search(r"\[(\w+)\]", found)
    if word is None:
        return Finding(name=name, value="unknown", ok=None)
    if word[1] == "never":
        advice = "set transparent_hugepage/enabled to madvise: large tables read faster"
        return Finding(name=name, value="never", ok=None, advice=advice)
    return Finding(name=name, value=word[1], ok=True)


def check_compiler() -> Finding:
    """A C compiler, which torch.compile needs; rowmesh uses one at installation, if it is there."""
    wanted = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    found = next((path for word in wanted if word and (path := shutil.which(word))), None)
    if found is None:
        return Finding(name="C compiler", value="none", ok=None, advice="torch.compile needs one")
    return Finding(name="C compiler", value=found, ok=True)
