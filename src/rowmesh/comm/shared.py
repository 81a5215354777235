"""Messages between ranks of one host through memory they share; gloo where that cannot be.

docs/notes/shared_memory.md has the protocol, and why nothing waits for ever.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from torch import Tensor

from rowmesh.native.segment import Endpoint, Outcome, describe_segment, segment_bytes
from rowmesh.topology import Topology

__all__ = ["Arrival", "Segment", "Waitable", "open_segment", "why_not_shared"]

_FOLDER: Final = Path("/dev/shm")
_ARENAS: Final = tuple(m << 20 for m in (64, 32, 16, 8))  # bytes for what a rank has sent
_LARGEST: Final = 4  # parts of an arena that the largest message may not exceed one of
_SLICE_S: Final = 0.1  # between two looks at whether a peer lives
_SPIN_S: Final = 5e-6  # if there is a core for each rank; longer is slower on busy machines
_PAUSE_S: Final = 1e-3
_SWEEP: Final = 256  # posted receives that are a reason to look which have arrived


class Waitable(Protocol):
    """Something under way: a work object of torch's, or an `Arrival`."""

    def wait(self) -> object:
        """Return when it is there."""


class Segment:
    """This rank's end of its host's segment. Several threads may use it at once.

    Args:
        end: Counts ranks from the first of the host.
        first: That rank in the mesh.
        timeout_s: How long a wait may last.
        spin_s: How long a wait may use a core.
    """

    def __init__(
        self, end: Endpoint, *, first: int, timeout_s: float, spin_s: float = _SPIN_S
    ) -> None:
        self.end, self.first, self.timeout_s, self.spin_s = end, first, timeout_s, spin_s
        self.largest_bytes = end.arena_bytes // _LARGEST
        self.num_by_gloo = 0  # messages that found the arena full
        self.is_cut = False  # nothing is worth a wait any more
        self._unsettled: list[tuple[int, int, Waitable, Tensor]] = []
        self._settling = threading.Lock()
        self._posted: dict[tuple[int, int], list[Arrival]] = {}
        self._num_posted, self._sweep_at = 0, _SWEEP
        self._posting = threading.Lock()

    def takes(self, peer: int, tensor: Tensor) -> bool:
        """Whether this tensor travels here: both ends come to the same answer."""
        return (
            0 <= peer - self.first < self.end.num_ranks
            and tensor.device.type == "cpu"
            and tensor.numel() * tensor.element_size() <= self.largest_bytes
        )

    def send(
        self, peer: int, tag: int, tensor: Tensor, by_gloo: Callable[[Tensor], Waitable]
    ) -> None:
        """Copy ``tensor`` for ``peer``, which may change when this returns.

        Waits only if the peer has 1,024 messages from this rank that it has not waited for.

        Args:
            peer: In the mesh.
            tag: Of the message.
            tensor: What `takes` accepts.
            by_gloo: Sends it when the arena is full. What it is given is a copy, so that nobody
                has to wait until the receiver asks for it.

        Raises:
            RuntimeError: The peer is gone, or did not receive in time.
        """
        if self._unsettled:
            self._settle()
        to, deadline = peer - self.first, None
        while (ticket := self.end.send(to, tag, tensor)) == -1:
            deadline = deadline or time.monotonic() + self.timeout_s
            self.check(to, deadline)
            self._sweep()  # the peer may be waiting for a slot of ours
            time.sleep(_PAUSE_S)
        if ticket is not None:
            copied = tensor.clone()
            work = by_gloo(copied)
            with self._settling:
                self.num_by_gloo += 1
                self._unsettled.append((to, ticket, work, copied))

    def receive(
        self, peer: int, tag: int, tensor: Tensor, by_gloo: Callable[[], Waitable]
    ) -> "Arrival":
        """What fills ``tensor`` when it is waited for, or before.

        As with gloo, receives of one tag get messages in the order in which they were posted, also
        those that nobody waits for (batches begun in vain): they are filled by the wait for the
        next one, or when many have been posted.
        """
        arrival = Arrival(self, peer - self.first, tag, tensor, by_gloo)
        with self._posting:
            self._posted.setdefault(arrival.key, []).append(arrival)
            self._num_posted += 1
        if self._num_posted >= self._sweep_at:
            self._sweep()
            self._sweep_at = 2 * self._num_posted + _SWEEP
        return arrival

    def posted_until(self, arrival: "Arrival") -> "list[Arrival]":
        """What must arrive before it from the same peer with the same tag, and itself."""
        with self._posting:
            queue = self._posted.get(arrival.key, [])
            return queue[: queue.index(arrival) + 1] if arrival in queue else []

    def forget(self, arrival: "Arrival") -> None:
        """It is here."""
        with self._posting:
            queue = self._posted[arrival.key]
            queue.remove(arrival)
            self._num_posted -= 1
            if not queue:
                del self._posted[arrival.key]

    def close(self, has_left: Callable[[int], bool]) -> None:
        """Wait until what went by gloo is received, then leave; peers see that this rank left.

        Args:
            has_left: Whether a rank of the mesh waits for nothing more.
        """
        deadline = time.monotonic() + self.timeout_s
        with contextlib.suppress(RuntimeError):
            while not all(has_left(self.first + to) for to in self._settle()):
                for to, *_ in self._unsettled:
                    self.check(to, deadline)
                self._sweep()  # a peer may be leaving too, and this rank posted what it sent
                time.sleep(_PAUSE_S)
        self.end.close()

    def _sweep(self) -> None:
        """Fill what has been posted and is there."""
        with self._posting:
            queues = [list(queue) for queue in self._posted.values()]
        for queue in queues:
            all(arrival.try_fill() for arrival in queue)  # up to the first that is not there

    def _settle(self) -> set[int]:
        """Let go of copies that have been received: for whom others are left."""
        with self._settling:
            settled = [self.end.is_settled(to, ticket) for to, ticket, *_ in self._unsettled]
            parts = list(zip(self._unsettled, settled, strict=True))
            self._unsettled = [entry for entry, is_settled in parts if not is_settled]
        for (_, _, work, _), is_settled in parts:
            if is_settled:
                work.wait()
        return {to for (to, *_), is_settled in parts if not is_settled}

    def check(self, peer: int, deadline: float) -> None:
        """Raise a RuntimeError if the peer is gone, a rank has failed, or it is too late."""
        if not self.end.is_alive(peer):
            raise RuntimeError("the process has ended")
        if self.is_cut:
            raise RuntimeError("a rank has failed")
        if time.monotonic() > deadline:
            raise RuntimeError("timed out")


class Arrival:
    """A message to come.

    Attributes:
        key: The peer, in the host, and the tag.
        num_bytes: The size of the tensor.
        other_bytes: That of what came, if it is another; the tensor is then as it was.
    """

    def __init__(
        self, segment: Segment, peer: int, tag: int, tensor: Tensor, by_gloo: Callable[[], Waitable]
    ) -> None:
        self._segment, self._tensor, self._by_gloo = segment, tensor, by_gloo
        self.key = (peer, tag)
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.other_bytes: int | None = None
        self._is_here = False
        self._filling = threading.Lock()

    def wait(self) -> None:
        """Return when the tensor is filled, or a message of another size came.

        A message that was published is received even if its sender has ended since.

        Raises:
            RuntimeError: The peer is gone, or it took too long.
        """
        for arrival in self._segment.posted_until(self):
            with arrival._filling:
                arrival._fill()

    def try_fill(self) -> bool:
        """Fill the tensor if the message is there, without waiting for it: whether it is."""
        if not self._filling.acquire(blocking=False):
            return False  # somebody waits for it
        try:
            return self._is_here or self._receive(0.0)
        finally:
            self._filling.release()

    def _fill(self) -> None:
        deadline = time.monotonic() + self._segment.timeout_s
        while not self._is_here and not self._receive(_SLICE_S):
            try:
                self._segment.check(self.key[0], deadline)
            except RuntimeError:
                if not self._receive(0.0):  # once more
                    raise

    def _receive(self, limit_s: float) -> bool:
        """Whether it came within so many seconds."""
        segment, peer = self._segment, self.key[0]
        spin_s = min(limit_s, segment.spin_s)
        outcome, number = segment.end.receive(
            *self.key, self._tensor, spin_s=spin_s, limit_s=limit_s
        )
        if outcome == Outcome.LATE:
            return False
        if outcome == Outcome.BY_GLOO:
            self._by_gloo().wait()
            segment.end.release(peer, number)
        elif outcome == Outcome.OTHER_SIZE:
            self.other_bytes = number
        self._is_here = True
        segment.forget(self)
        return True


def why_not_shared() -> str | None:
    """What keeps ranks that are not told from sharing memory, whatever /dev/shm has room for."""
    if os.environ.get("ROWMESH_SHARED_MEMORY", "") == "0":
        return "ROWMESH_SHARED_MEMORY=0"
    has_library, text = describe_segment()
    return None if has_library else text


def open_segment(
    gather: Callable[[Any], list[Any]],
    *,
    topology: Topology,
    rank: int,
    timeout_s: float,
    is_wanted: bool = True,
    arenas: tuple[int, ...] = _ARENAS,
) -> Segment | None:
    """The segment of this rank's host, if every rank of the host has mapped it; else None.

    Its file has a name only in here: whatever happens later, nothing is left behind.

    Args:
        gather: Every rank's value, in rank order.
        topology: Says which ranks share a host, not the hostname: emulated hosts share that.
        rank: This one.
        timeout_s: How long a wait may last.
        is_wanted: On this rank; None for the host if any of its ranks does not want it.
        arenas: Sizes to try, the first that fits into half of what is free.

    Collective:
        All ranks of the mesh.
    """
    local, me = topology.local, rank % topology.local
    first = rank - me
    is_wanted = is_wanted and local > 1 and describe_segment()[0]
    created = _create(rank // local, local, arenas) if is_wanted and me == 0 else None
    with _unlinked(created):
        file = gather(created)[first]
        with _unlinked(file):
            end = _map(file, local, me) if is_wanted and file is not None else None
            is_mapped = gather(end is not None)[first : first + local]
    sees_peers = end is not None and all(end.is_alive(peer) for peer in range(local) if peer != me)
    is_seen = gather(sees_peers)[first : first + local]
    if end is None or not all(is_mapped) or not all(is_seen):
        if end is not None:
            end.close()
        return None
    has_cores = len(os.sched_getaffinity(0)) >= local
    return Segment(end, first=first, timeout_s=timeout_s, spin_s=_SPIN_S if has_cores else 0.0)


@dataclass(frozen=True, slots=True)
class _File:
    """Where a segment is to be found, and the arena it was made for."""

    path: Path
    arena_bytes: int


def _create(host: int, num_ranks: int, arenas: tuple[int, ...]) -> _File | None:
    """A new file of zeros with all its space reserved; None if no size fits.

    Space that is not reserved would be missed by a write to memory, which kills the process.
    """
    run = "".join(c for c in os.environ.get("TORCHELASTIC_RUN_ID", "") if c.isalnum())[:32]
    path = _FOLDER / f"rowmesh-{run or 'run'}-{host}-{secrets.token_hex(8)}"
    try:
        found = os.statvfs(_FOLDER)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        for arena in arenas:
            size = segment_bytes(num_ranks, arena)
            if 2 * size <= found.f_bavail * found.f_frsize:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(descriptor, 0, size)
                    return _File(path, arena)
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
    path.unlink()
    return None


def _map(file: _File, num_ranks: int, rank: int) -> Endpoint | None:
    """This rank's end, or None."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            arena = file.arena_bytes
            return Endpoint(descriptor, num_ranks=num_ranks, rank=rank, arena_bytes=arena)
        except (OSError, ValueError):
            os.close(descriptor)
    return None


@contextlib.contextmanager
def _unlinked(file: _File | None) -> Iterator[None]:
    """Without that file afterwards, whichever rank is first to remove it."""
    try:
        yield
    finally:
        if file is not None:
            file.path.unlink(missing_ok=True)
