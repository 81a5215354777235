"""The folders of checkpoints: their names, how one appears at once, which are kept.

``step_000123.partial`` is being written or deleted; ``step_000123`` is complete. A complete one
that is saved anew is ``step_000123.replaced`` for the moment between two renames, and counts as
long as its successor is not there.
"""

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from rowmesh.errors import InputError
from rowmesh.train.checkpoint.document import METADATA, DamagedError, read_document

__all__ = ["Folders"]

_NAME: Final = re.compile(r"step_(\d+)(\.partial|\.replaced)?")


class Folders:
    """Checkpoint folders below ``root``. One run at a time may write there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> list[int]:
        """Of all complete checkpoints, the oldest step first."""
        return sorted(self._complete())

    def of(self, step: int) -> Path:
        """The folder of a complete checkpoint.

        Raises:
            InputError: If there is none.
        """
        found = self._complete()
        if step not in found:
            known = f"there are {self.steps()}" if found else "there is none at all"
            raise InputError(f"no checkpoint of step {step} in {self.root}: {known}")
        return found[step]

    def latest(self) -> int | None:
        """The newest step whose metadata.json is as it was written, also by a newer version."""
        for step in reversed(self.steps()):
            try:
                read_document(self.of(step))
            except (DamagedError, OSError):
                continue
            except InputError:
                pass
            return step
        return None

    def partial(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is written."""
        return self.root / f"step_{step:06d}.partial"

    def start(self, step: int) -> None:
        """Clear away what an earlier run left half done, and make the partial folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        complete = self._complete().values()
        for path in self._named():
            if path not in complete:
                shutil.rmtree(path)
        self.partial(step).mkdir()

    def drop(self, step: int) -> None:
        """Remove the partial folder, if it can be."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def finish(self, step: int, metadata: bytes) -> None:
        """Write metadata.json, then give the partial folder its name: it is complete at once."""
        partial, final = self.partial(step), self.root / f"step_{step:06d}"
        with (partial / METADATA).open("wb") as stream:
            stream.write(metadata)
            stream.flush()
            os.fsync(stream.fileno())
        _sync(partial)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
        _sync(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def keep(self, number: int, *, spared: Collection[int | None]) -> None:
        """Delete all complete checkpoints but the newest ``number`` and those ``spared``."""
        for step in [s for s in self.steps()[:-number] if s not in spared]:
            path = self.of(step)
            gone = self.partial(step)
            os.rename(path, gone)  # nobody may take a half deleted folder for a complete one
            shutil.rmtree(gone, ignore_errors=True)

    def free_bytes(self) -> int:
        """Of the file system the folder is on."""
        root = next(p for p in (self.root, *self.root.absolute().parents) if p.exists())
        return shutil.disk_usage(root).free

    def _named(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return sorted(p for p in self.root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())

    def _complete(self) -> dict[int, Path]:
        found: dict[int, Path] = {}
        for path in self._named():  # sorted: the plain name comes before the replaced one
            match = _NAME.fullmatch(path.name)
            assert match is not None
            if match[2] != ".partial":
                found.setdefault(int(match[1]), path)
        return found


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` last through a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
