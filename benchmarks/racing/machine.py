"""What a benchmark ran on, for its report."""

from pathlib import Path

__all__ = ["cpu_name"]


def cpu_name() -> str:
    """As Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")
