"""Restarts by ``torchrun --max-restarts``: an attempt goes on in the folder of the one before.

torchrun's agent keeps one store as long as it lives. A folder named there was begun by this very
launch, whatever else it is called; a folder that is not belongs to somebody else.
"""

import os
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from rowmesh.comm.joining import open_store

__all__ = ["earlier_folder", "remember_folder"]

_KEY = "rowmesh/run-folder"
_TIMEOUT_S = 60.0


def earlier_folder() -> Path | None:
    """The folder in which an earlier attempt of this launch began; None for the first attempt."""
    store = _kept_store()
    if store is None or not store.check([_KEY]):
        return None
    return Path(store.get(_KEY).decode())


def remember_folder(path: Path) -> None:
    """Tell later attempts of this launch, if there will be any, that ``path`` is its folder."""
    store = _kept_store()
    if store is not None:
        store.set(_KEY, str(path.absolute()))


def _kept_store() -> Store | None:
    """The store that outlives an attempt, if there is one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return open_store(timeout_s=_TIMEOUT_S)[0]
