"""TorchRec's own environment: its pins and ours differ."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["TORCHREC", "default_folder", "ensure"]

TORCHREC = "1.8.0"
STAMP, HALF_MADE = ".rowmesh-torchrec", ".rowmesh-torchrec.part"
INSTALLS = (
    ["torch==2.13.0", "fbgemm-gpu-cpu==1.8.0", "numpy"],
    ["--no-deps", f"torchrec=={TORCHREC}"],
    ["tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions", "iopath"],
)


def default_folder() -> Path:
    """``XDG_CACHE_HOME/rowmesh/torchrec-1.8.0``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rowmesh" / f"torchrec-{TORCHREC}"


def ensure(folder: Path) -> str:
    """The interpreter of ``folder``, which is made if it is absent, empty or was left half made.

    A folder that has something else in it is used if TorchRec 1.8.0 can be imported from it and
    is never changed. The stamp is written last, so an interrupted set-up starts again.

    Raises:
        SystemExit: With one sentence, if it is neither.
    """
    python = folder / "bin" / "python"
    if _may_make(folder):
        _make(folder)
    found = version(python) if python.exists() else f"there is no {python}"
    if found != TORCHREC:
        sys.exit(
            f"--peer-env {folder} does not give torchrec {TORCHREC} ({found}): name another "
            f"folder, or one that does not exist yet"
        )
    return str(python)


def version(python: Path) -> str:
    """What ``import torchrec`` in that environment says: a version, or the error's last line."""
    code = "import torchrec; print(torchrec.__version__)"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    return (done.stdout.split() or done.stderr.strip().splitlines() or ["no output"])[-1]


def _may_make(folder: Path) -> bool:
    if (folder / STAMP).exists():
        return False
    return not folder.exists() or (folder / HALF_MADE).exists() or not any(folder.iterdir())


def _make(folder: Path) -> None:
    print(f"installing TorchRec {TORCHREC} into {folder} (large; once)", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HALF_MADE).touch()
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    for packages in INSTALLS:
        _run([*pip, "--quiet", *packages])
    (folder / STAMP).touch()
    (folder / HALF_MADE).unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, timeout=1800, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: its message is above; run the race again to go on")
