"""Objects as bytes that only ranks of one mesh can have made: loading others could run any code."""

import hmac
import pickle
from typing import Any

from rowmesh.errors import PeerError

__all__ = ["seal", "unseal"]

_DIGEST, _DIGEST_BYTES = "sha256", 32


def seal(value: Any, secret: bytes) -> bytearray:
    """``value`` pickled, after a digest of it that needs ``secret``."""
    data = pickle.dumps(value)
    return bytearray(hmac.digest(secret, data, _DIGEST) + data)


def unseal(data: bytes, secret: bytes, *, rank: int) -> Any:
    """What was sealed with the same secret.

    Args:
        data: From `seal`.
        secret: Of the mesh.
        rank: Who is said to have sent it.

    Raises:
        PeerError: If it was made without the secret, or changed since. Nothing of it was loaded.
    """
    digest, pickled = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, hmac.digest(secret, pickled, _DIGEST)):
        raise PeerError(
            f"what came from rank {rank} was not sent by a rank of this mesh, or is damaged: see "
            f"docs/security.md"
        )
    return pickle.loads(pickled)
