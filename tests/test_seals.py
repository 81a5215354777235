"""Objects of other ranks are loaded only if a rank of the mesh has sent them."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import rowmesh as rm
from rowmesh.comm.seals import seal, unseal
from tests.ranks import run_on_ranks


class Touch:
    """Runs code where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_was_sealed_with_the_same_secret_comes_back() -> None:
    value = {"a": [1, 2.5], "b": None}
    assert unseal(bytes(seal(value, b"secret")), b"secret", rank=1) == value


@pytest.mark.parametrize("place", [0, 31, 40, -1])
def test_changed_bytes_are_not_loaded(place: int, tmp_path: Path) -> None:
    data = seal(Touch(tmp_path / "loaded"), b"secret")
    data[place] ^= 1
    with pytest.raises(rm.PeerError, match="what came from rank 3 was not sent by a rank of this"):
        unseal(bytes(data), b"secret", rank=3)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize("secret", [b"", b"another"])
def test_bytes_of_somebody_without_the_secret_are_not_loaded(secret: bytes, tmp_path: Path) -> None:
    value = Touch(tmp_path / "loaded")
    for data in (bytes(seal(value, secret)), pickle.dumps(value), b""):
        with pytest.raises(rm.PeerError):
            unseal(data, b"secret", rank=0)
    assert not (tmp_path / "loaded").exists()


def gather(mesh: rm.Mesh, folder: str) -> Any:
    mesh.wire.secret = b"mine" if mesh.rank == 0 else b"ours"
    value = Touch(Path(folder) / "loaded") if mesh.rank == 0 else 1
    try:
        return mesh.gather_objects(value)
    except rm.PeerError as error:
        return str(error)


def test_ranks_load_nothing_that_is_not_their_meshs(tmp_path: Path) -> None:
    zero, one = run_on_ranks(2, gather, str(tmp_path))
    assert one.startswith("what came from rank 0 was not sent by a rank of this mesh")
    assert zero.startswith("what came from rank 1 was not sent by a rank of this mesh")
