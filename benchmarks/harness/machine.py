"""What a benchmark ran on and of which code, for its report; no path of this machine."""

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["REPOSITORY", "code_hash", "commit", "cpu_name", "describe_code", "describe_run", "say"]

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def cpu_name() -> str:
    """As Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def commit() -> str | None:
    """Of the checkout, if it is one."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def code_hash() -> str:
    """Of package, benchmarks and papers as they are, so that a commit of a page changes nothing."""
    digest = hashlib.sha256()
    folders = [REPOSITORY / name for name in ("src", "benchmarks", "papers")]
    code = (".py", ".c", ".h")
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in code):
        digest.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    for name, value in sorted(os.environ.items()):
        if name.startswith("ROWMESH_"):  # switches of the code
            digest.update(f"{name}={value}\n".encode())
    return digest.hexdigest()[:12]


def describe_code() -> dict[str, str]:
    """What makes two results of the same settings one: code and machine."""
    machine = f"{platform.machine()}, {cpu_name()}, {os.cpu_count()} cores"
    return {"code": code_hash(), "machine": machine}


def describe_run() -> dict[str, Any]:
    """When, and of which commit."""
    return {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d")}


def say(line: str) -> None:
    """A line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)
