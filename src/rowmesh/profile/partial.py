"""Finished chunks in a folder, so that a pass that was stopped goes on where it was."""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rowmesh.errors import InputError
from rowmesh.files import read_text, write_whole
from rowmesh.profile.archive import pack, unpack
from rowmesh.profile.chunks import Chunk, ProfileConfig

__all__ = ["Partial", "fingerprint", "remove_partial"]

_VERSION: Final = 1
_SETTINGS: Final = "settings.sha256"


def fingerprint(config: ProfileConfig, *, source: str) -> str:
    """A digest of all that chunks depend on: the settings, and the data that ``source`` names."""
    facts = {
        "version": _VERSION,
        "source": source,
        "tables": [[t.name, t.num_embeddings, list(t.feature_names)] for t in config.tables],
        "numbers": [config.world, config.num_steps, config.rows_kept, config.chunk_steps],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def remove_partial(folder: Path) -> None:
    """Remove a folder of chunks; what is not of a profile stays, and then the folder too."""
    if folder.is_dir():
        for file in [*folder.glob("chunk-*.npz"), folder / _SETTINGS]:
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's file is in it
            folder.rmdir()


class Partial:
    """A folder of finished chunks, all of one fingerprint.

    Args:
        folder: Made when it is opened.
        digest: What the chunks must be of.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self._digest = folder, digest

    def open(self) -> None:
        """Make the folder, or check that it is of the same settings.

        Raises:
            InputError: If it holds the chunks of other settings, or cannot be made.
        """
        try:
            self.folder.mkdir(exist_ok=True)
            if not self._settings.exists():
                if any(self.folder.iterdir()):
                    raise self._foreign()
                write_whole(self._settings, self._digest)
            elif read_text(self._settings) != self._digest:
                raise self._foreign()
        except OSError as error:
            raise InputError(f"cannot use the folder {self.folder}: {error.strerror}") from None

    def done(self, numbers: Iterable[int]) -> list[int]:
        """Those of ``numbers`` whose chunk is finished."""
        return [number for number in numbers if self._file(number).exists()]

    def save(self, number: int, chunk: Chunk) -> None:
        """Keep a finished chunk.

        Raises:
            InputError: If it cannot be written.
        """
        facts = {
            "num_batches": chunk.num_batches,
            "num_samples": chunk.num_samples,
            "first_batch": chunk.first_batch,
        }
        try:
            write_whole(self._file(number), pack(facts, chunk.tables))
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror}") from None

    def load(self, number: int) -> Chunk:
        """A finished chunk.

        Raises:
            InputError: If its file is damaged.
        """
        try:
            facts, tables = unpack(self._file(number))
            return Chunk(tables=tables, **facts)
        except (InputError, TypeError) as error:
            raise InputError(f"{error}; begin anew with --again") from None

    @property
    def _settings(self) -> Path:
        return self.folder / _SETTINGS

    def _file(self, number: int) -> Path:
        return self.folder / f"chunk-{number:08d}.npz"

    def _foreign(self) -> InputError:
        return InputError(
            f"{self.folder} holds a pass with other settings that was stopped: repeat its "
            f"settings to go on with it, or begin anew with --again"
        )
