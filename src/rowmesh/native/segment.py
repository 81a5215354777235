"""One rank's end of the memory that the ranks of a host share; segment.c does the work."""

import ctypes
import functools
import mmap
import os
import weakref
from enum import IntEnum

from torch import Tensor

from rowmesh.native.library import load

__all__ = ["Endpoint", "Outcome", "describe_segment", "segment_bytes"]

_I32, _I64, _U32, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
_INTERFACE = 1  # of segment.c: rm_segment_interface
_SENT, _FULL = -1, -2
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "rm_segment_bytes": (_I64, [_I32, _I64]),
    "rm_segment_open": (_P, [_P, _I32, _I32, _I64]),
    "rm_segment_close": (None, [_P]),
    "rm_segment_send": (_I64, [_P, _I32, _U32, _P, _I64]),
    "rm_segment_is_settled": (_I32, [_P, _I32, _I64]),
    "rm_segment_receive": (
        _I32,
        [_P, _I32, _U32, _P, _I64, _I64, _I64, ctypes.POINTER(_I64)],
    ),
    "rm_segment_release": (None, [_P, _I32, _I64]),
    "rm_segment_hold": (_I32, [_I32, _I64]),
    "rm_segment_is_held": (_I32, [_I32, _I64]),
}


class Outcome(IntEnum):
    """Of a receive."""

    RECEIVED = 0
    LATE = 1  # nothing yet, or a signal came
    BY_GLOO = 2
    OTHER_SIZE = 3


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    """The library, and where it is or why there is none."""
    return load(
        "_segment", version="rm_segment_interface", interface=_INTERFACE, functions=_FUNCTIONS
    )


def _library() -> ctypes.CDLL:
    found, reason = _find()
    if found is None:
        raise OSError(f"no native code to share memory with: {reason}")
    return found


def describe_segment() -> tuple[bool, str]:
    """Whether there is a library, and which, or why none is."""
    found, text = _find()
    return found is not None, text


def segment_bytes(num_ranks: int, arena_bytes: int) -> int:
    """Size of a segment: slots for every pair of ranks, an arena for every rank."""
    return int(_library().rm_segment_bytes(num_ranks, arena_bytes))


class Endpoint:
    """One rank's end of a segment. All methods may be called by several threads at once.

    The memory is unmapped with the last reference, so that a thread which still waits never reads
    what is gone. Calls release the GIL.

    Args:
        file: Descriptor of the segment, all of it reserved; zeros before the first use. It is
            the endpoint's from now on.
        num_ranks: Of the host.
        rank: This one, among them.
        arena_bytes: For what a rank has sent and nobody has received yet.
    """

    def __init__(self, file: int, *, num_ranks: int, rank: int, arena_bytes: int) -> None:
        self._library, self._file, self.rank = _library(), file, rank
        self.num_ranks, self.arena_bytes = num_ranks, arena_bytes
        self._memory = mmap.mmap(file, segment_bytes(num_ranks, arena_bytes))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._end = self._library.rm_segment_open(base, num_ranks, rank, arena_bytes)
        if not self._end or self._library.rm_segment_hold(file, rank):
            raise OSError("no memory, or no locks on files, for an end of the segment")
        closing = weakref.finalize(self, self._library.rm_segment_close, self._end)
        closing.atexit = False  # threads that still wait end with the process

    def send(self, peer: int, tag: int, tensor: Tensor) -> int | None:
        """Copy ``tensor``, CPU and contiguous, for ``peer``. Never waits.

        Returns:
            None if it is there; a ticket >= 0 if the arena is full: the receiver is told that it
            comes by gloo; -1 if the peer has 1,024 messages it has not received: nothing was done.
        """
        found: int = self._library.rm_segment_send(
            self._end, peer, tag, tensor.data_ptr(), tensor.numel() * tensor.element_size()
        )
        return None if found == _SENT else -1 if found == _FULL else found

    def is_settled(self, peer: int, ticket: int) -> bool:
        """Whether ``peer`` has what was sent by gloo under this ticket."""
        return bool(self._library.rm_segment_is_settled(self._end, peer, ticket))

    def receive(
        self, peer: int, tag: int, tensor: Tensor, *, spin_s: float, limit_s: float
    ) -> tuple[Outcome, int]:
        """Wait for a message of this tag and copy it into ``tensor``.

        Returns:
            What happened, and the size in bytes of a message of another size, or the number with
            which to `release` one that comes by gloo.
        """
        number = _I64()
        outcome = self._library.rm_segment_receive(
            *(self._end, peer, tag, tensor.data_ptr(), tensor.numel() * tensor.element_size()),
            *(int(spin_s * 1e9), int(limit_s * 1e9), ctypes.byref(number)),
        )
        return Outcome(outcome), number.value

    def release(self, peer: int, number: int) -> None:
        """Say that a message that came by gloo is here."""
        self._library.rm_segment_release(self._end, peer, number)

    def is_alive(self, peer: int) -> bool:
        """Whether the process of ``peer`` has this segment open; true if that cannot be told."""
        return self._file < 0 or self._library.rm_segment_is_held(self._file, peer) != 0

    def close(self) -> None:
        """Let go of the file: peers that wait for this rank will see that it left."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
