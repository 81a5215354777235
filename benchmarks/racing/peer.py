"""Environments of other people's packages, whose pins and ours differ: TorchRec's, and more."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PUBLIC_MODELS", "TORCHREC", "Packages", "default_folder", "ensure"]

TORCHREC = "1.8.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packages:
    """What is installed, by name, and the module whose version says that it is there."""

    module: str
    version: str
    installs: tuple[list[str], ...]

    @property
    def stamp(self) -> str:
        """The file that says that a folder is complete; with ``.part``, that it is not."""
        return f".rowmesh-{self.module}"


_TORCHREC = Packages(
    module="torchrec",
    version=TORCHREC,
    installs=(
        ["torch==2.13.0", "fbgemm-gpu-cpu==1.8.0", "numpy"],
        ["--no-deps", f"torchrec=={TORCHREC}"],
        ["tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions", "iopath"],
    ),
)
PUBLIC_MODELS = Packages(
    module="recbole",
    version="1.2.1",
    installs=(
        ["torch==2.13.0", "numpy", "pandas", "scipy", "scikit-learn", "tqdm"],
        ["--no-deps", "torch-rechub==0.9.0", "deepctr-torch==0.3.0", "recbole==1.2.1"],
        ["requests", "colorlog", "colorama", "texttable", "psutil", "thop", "tensorboard"],
    ),
)


def default_folder(packages: Packages = _TORCHREC) -> Path:
    """``XDG_CACHE_HOME/rowmesh/torchrec-1.8.0``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rowmesh" / f"{packages.module}-{packages.version}"


def ensure(folder: Path, packages: Packages = _TORCHREC) -> str:
    """The interpreter of ``folder``, which is made if it is absent, empty or was left half made.

    A folder that has something else in it is used if the packages can be imported from it and
    is never changed. The stamp is written last, so an interrupted set-up starts again.

    Raises:
        SystemExit: With one sentence, if it is neither.
    """
    python = folder / "bin" / "python"
    if _may_make(folder, packages):
        _make(folder, packages)
    found = version(python, packages) if python.exists() else f"there is no {python}"
    if found != packages.version:
        sys.exit(
            f"--peer-env {folder} does not give {packages.module} {packages.version} ({found}): "
            f"name another folder, or one that does not exist yet"
        )
    return str(python)


def version(python: Path, packages: Packages = _TORCHREC) -> str:
    """What importing it in that environment says: a version, or the error's last line."""
    code = f"import {packages.module}; print({packages.module}.__version__)"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    return (done.stdout.split() or done.stderr.strip().splitlines() or ["no output"])[-1]


def _may_make(folder: Path, packages: Packages) -> bool:
    if (folder / packages.stamp).exists():
        return False
    half_made = folder / f"{packages.stamp}.part"
    return not folder.exists() or half_made.exists() or not any(folder.iterdir())


def _make(folder: Path, packages: Packages) -> None:
    what = f"{packages.module} {packages.version}"
    print(f"installing {what} into {folder} (large; once)", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    half_made = folder / f"{packages.stamp}.part"
    half_made.touch()
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    for names in packages.installs:
        _run([*pip, "--quiet", *names])
    (folder / packages.stamp).touch()
    half_made.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, timeout=1800, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: its message is above; run the race again to go on")
