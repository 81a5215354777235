"""Point-to-point exchanges on lanes: receives posted first, matched by tag, never by order.

Ranks of one host use memory they share, where there is a segment (comm/shared.py); all others gloo.
gloo's own all-to-all is half duplex between two ranks, it accepts a short message silently, and
two exchanges of one tag may be swapped. So every exchange here has a tag of its own, and in
debug mode a header that is checked.
"""

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.comm.codecs import Message
from rowmesh.comm.leaving import let_leave
from rowmesh.comm.ledger import Ledger
from rowmesh.comm.listening import cut_sockets
from rowmesh.comm.numbers import MOST_CHANNELS, Loan, Numbers
from rowmesh.comm.shared import Arrival, Segment, Waitable
from rowmesh.comm.status import Bulletin
from rowmesh.errors import PeerError, StepError
from rowmesh.trace import Flight, Recorder

__all__ = ["DTYPES", "Channel", "ChannelPool", "Handle", "Lane", "Wire"]

_SEQUENCES = 1 << 15  # tag = sequence * MOST_CHANNELS + number of the channel
_SPILLED_BIT = 1 << 29  # shared memory was full: received later than what goes by gloo anyway
_HEADER_BIT = 1 << 30
_MOST_LEAVING = 32
_WATCHERS = 64  # threads, at most; an exchange that finds none free is timed by its own wait
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16, torch.bool),
]


class Lane(StrEnum):
    """World-wide process groups, so that small messages never queue behind large ones."""

    CONTROL = "control"
    ROWS = "rows"
    GRADS = "grads"


Parcel = tuple[int, Tensor | Message]
"""A peer, and what goes to it or comes from it: a tensor as it is, or a message with codecs."""


class Wire:
    """Posts messages on the lanes and counts their bytes. Posting never blocks.

    Args:
        rank: This rank.
        lanes: A process group per lane; empty for a world of one.
        ledger: Counts what is sent.
        bulletin: Where peers leave the reason for their end.
        trace: Notes exchanges in flight, when it is on.
        debug: Send and check a header with every message.

    Attributes:
        segment: What this host's ranks share, or None: `open_segment`.
        sockets: The connections of the lanes: `open_sockets`.
        secret: Of this mesh's ranks, which seals objects.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        lanes: Mapping[Lane, dist.ProcessGroup],
        ledger: Ledger,
        bulletin: Bulletin,
        trace: Recorder,
        debug: bool = False,
    ) -> None:
        self.rank, self.world, self.trace = rank, world, trace
        self.lanes, self.ledger, self.bulletin, self.debug = lanes, ledger, bulletin, debug
        self.segment: Segment | None = None
        self.sockets: Mapping[int, int] = {}
        self.secret = b""
        self.numbers = Numbers()
        self._process, self._is_closed = os.getpid(), False
        self._posting = threading.Lock()
        self._watchers: ThreadPoolExecutor | None = None
        # With messages to others that nobody has waited for, the latest: their models may be gone.
        self.leaving: dict[Handle, None] = {}

    def peers(self) -> list[int]:
        """All other ranks, starting with the next one, so that not all send to rank 0 first."""
        return [(self.rank + i) % self.world for i in range(1, self.world)]

    def check_open(self) -> None:
        """Raise if nothing can be sent any more."""
        if os.getpid() != self._process:
            raise StepError(
                f"this process was forked from rank {self.rank}, whose mesh it cannot use: only "
                f"the rank itself can"
            )
        if self._is_closed:
            raise StepError(
                "the mesh is closed: use it, and what was sharded on it, before mesh.close() or "
                "inside its with block"
            )

    def channel(self, name: str, lane: Lane, *, loan: Loan | None = None) -> "Channel":
        """A new exchange with its own tags. All ranks make the same channels in one order.

        Args:
            name: In errors.
            lane: Of its messages.
            loan: What its number is part of; without one it is never given back.
        """
        number, first = self.numbers.take()
        channel = Channel(self, name, lane, number, first)
        if loan is not None:
            loan.channels.append(channel)
        return channel

    def start(
        self, lane: Lane, peer: int, tag: int, tensor: Tensor, *, incoming: bool
    ) -> Waitable | None:
        """Start one message: what there is to wait for, if anything."""
        segment = self.segment
        if segment is None or not segment.takes(peer, tensor):
            return self._by_gloo(lane, peer, tag, tensor, incoming)
        spilled = functools.partial(self._by_gloo, lane, peer, tag | _SPILLED_BIT)
        if incoming:
            return segment.receive(peer, tag, tensor, lambda: spilled(tensor, True))
        segment.send(peer, tag, tensor, lambda copy: spilled(copy, False))
        return None

    def _by_gloo(self, lane: Lane, peer: int, tag: int, tensor: Tensor, incoming: bool) -> Waitable:
        group = self.lanes[lane]
        with self._posting:
            if incoming:
                work = dist.irecv(tensor, group_src=peer, group=group, tag=tag)
            else:
                work = dist.isend(tensor, group_dst=peer, group=group, tag=tag)
        assert work is not None
        return work

    def watch(self, handle: "Handle") -> None:
        """Note when ``handle`` is complete, which is before its wait if that comes late.

        gloo's work objects have no time, no future and cannot be polled: so a thread waits for
        them, and the handle's own wait for that thread.
        """
        with self._posting:
            if self._watchers is None:
                self._watchers = ThreadPoolExecutor(_WATCHERS, thread_name_prefix="rowmesh-watch")
            handle.watcher = self._watchers.submit(handle.complete)

    def keep(self, handle: "Handle") -> None:
        """Let its messages leave before this rank ends, unless many come after it."""
        self.leaving[handle] = None
        if len(self.leaving) > _MOST_LEAVING:
            with contextlib.suppress(StopIteration, RuntimeError):  # another thread was first
                self.leaving.pop(next(iter(self.leaving)), None)

    def cut(self) -> None:
        """Make every wait of this rank raise: a rank has failed, and may be the one waited for."""
        if self.segment is not None:
            self.segment.is_cut = True
        cut_sockets(self.sockets)

    def close(self) -> None:
        """Wait for messages to ranks that have not left, end the threads and leave the segment."""
        if self.leaving:
            sends = [send for handle in list(self.leaving) for send in handle.leaving()]
            let_leave(sends, self.bulletin.has_left)
            self.leaving.clear()
        if self._watchers is not None:
            self._watchers.shutdown(wait=False, cancel_futures=True)
            self._watchers = None
        if self.segment is not None:
            self.segment.close(self.bulletin.has_left)
            self.segment = None
        self._is_closed, self.lanes = True, {}


class ChannelPool:
    """Channels of one model, which it makes anew when its rows move, and which are used again.

    All ranks take the same channels in one order, and begin anew at the same time, when no message
    is under way. When the pool is gone on all ranks, its channels are others' (`Numbers`).
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._loan = wire, wire.numbers.lend(self)
        self._made: dict[tuple[str, Lane], list[Channel]] = {}
        self._taken: Counter[tuple[str, Lane]] = Counter()

    def channel(self, name: str, lane: Lane) -> "Channel":
        """The next channel of that name: one of before, or a new one."""
        made, number = self._made.setdefault((name, lane), []), self._taken[name, lane]
        if number == len(made):
            made.append(self._wire.channel(name, lane, loan=self._loan))
        self._taken[name, lane] += 1
        return made[number]

    def begin_anew(self) -> None:
        """Give out the channels from the first on again."""
        self._taken.clear()


class Channel:
    """One exchange of a step: its lane, its tag, its name in errors."""

    def __init__(self, wire: Wire, name: str, lane: Lane, number: int, first: int = 0) -> None:
        self.wire, self.name, self.lane, self.number = wire, name, lane, number
        self.first = self.last = first  # its sequences count from here

    def post(
        self,
        sequence: int,
        *,
        sends: Iterable[Parcel],
        receives: Iterable[Parcel],
        edge: str | None,
    ) -> "Handle":
        """Start sending and receiving; empty tensors do not travel.

        Args:
            sequence: Number of this use, the same on all ranks.
            sends: Contiguous tensors that must not change until the handle is waited for; what
                messages were made of may.
            receives: Contiguous tensors to fill, and messages, which fill theirs in the wait.
            edge: The ledger's edge, or None if the caller records the bytes itself.

        Collective:
            Both ends of every non-empty parcel, with the same sequence, shape and dtype.
        """
        wire, at = self.wire, self.first + sequence
        self.last = max(self.last, at)
        tag = (at % _SEQUENCES) * MOST_CHANNELS + self.number
        receives = list(receives)
        parcels = [(p, t if isinstance(t, Tensor) else t.received(), True) for p, t in receives]
        parcels += [(p, t if isinstance(t, Tensor) else t.sent(), False) for p, t in sends]
        parcels = [parcel for parcel in parcels if parcel[1].numel()]
        if not parcels:
            return Handle(self, sequence, [], [], [])
        wire.check_open()
        flight = self._begin_flight(sequence, parcels) if wire.trace.is_on else None
        works: list[tuple[int, Waitable]] = []
        sending: list[tuple[int, Waitable]] = []
        headers: list[tuple[int, Tensor, Tensor]] = []
        for peer, tensor, incoming in parcels:
            assert tensor.is_contiguous(), "only contiguous tensors travel"
            try:
                if wire.debug:
                    headers.append(self._header(sequence, peer, tensor, incoming))
                    header = wire.start(
                        self.lane, peer, tag | _HEADER_BIT, headers[-1][2], incoming=incoming
                    )
                    (works if incoming else sending).extend(_some(peer, header))
                work = wire.start(self.lane, peer, tag, tensor, incoming=incoming)
            except RuntimeError as error:  # the connection was already gone
                raise wire.bulletin.explain(error, peer=peer, where=self.where(sequence)) from None
            if edge is not None and not incoming:
                wire.ledger.record(edge, peer, tensor.numel() * tensor.element_size())
            (works if incoming else sending).extend(_some(peer, work))
        buffers = [t for _, t, _ in parcels]
        handle = Handle(self, sequence, [*works, *sending], headers, buffers, flight)
        if sending:
            handle.sends = sending
            wire.keep(handle)
        handle.messages = [t for _, t in receives if isinstance(t, Message)]
        # On CUDA a wait belongs to its thread's stream: the handle's own gives an upper bound.
        if flight is not None and parcels[0][1].device.type == "cpu":
            if works or sending:
                wire.watch(handle)
            else:
                handle.complete()
        return handle

    def where(self, sequence: int) -> str:
        """This exchange in a message."""
        return f"exchange {self.name!r}, step {sequence}"

    def _begin_flight(self, sequence: int, parcels: Sequence[tuple[int, Tensor, bool]]) -> Flight:
        sizes = [(t.numel() * t.element_size(), incoming) for _, t, incoming in parcels]
        return self.wire.trace.post(
            lane=self.lane.value,
            exchange=self.name,
            sequence=sequence,
            num_messages=len(parcels),
            sent_bytes=sum(size for size, incoming in sizes if not incoming),
            received_bytes=sum(size for size, incoming in sizes if incoming),
        )

    def _header(
        self, sequence: int, peer: int, tensor: Tensor, incoming: bool
    ) -> tuple[int, Tensor, Tensor]:
        """The peer, what its header must be, and what is sent or received: kept until the wait."""
        ours = torch.tensor(
            [sequence, self.number, DTYPES.index(tensor.dtype), tensor.numel()],
            device=tensor.device,
        )
        return peer, ours, torch.zeros_like(ours) if incoming else ours


def _some(peer: int, work: Waitable | None) -> list[tuple[int, Waitable]]:
    return [] if work is None else [(peer, work)]


class Handle:
    """An exchange under way."""

    def __init__(
        self,
        channel: Channel,
        sequence: int,
        works: Sequence[tuple[int, Waitable]],
        headers: Sequence[tuple[int, Tensor, Tensor]],
        buffers: Sequence[Tensor],
        flight: Flight | None = None,
    ) -> None:
        self._channel, self._sequence, self._flight = channel, sequence, flight
        self.watcher: Future[None] | None = None
        self.messages: list[Message] = []  # to decode
        self.sends: list[tuple[int, Waitable]] = []
        self._works, self._headers = list(works), list(headers)
        self._buffers = list(buffers)  # alive until they have been sent

    def wait(self) -> None:
        """Return when everything is sent, received and, by the first wait, decoded.

        Raises:
            PeerError: With the failed rank's sentence, or naming the silent peer.
        """
        if self._works:
            self._channel.wire.check_open()  # gloo would wait for ever for what `close` waited for
            with self._channel.wire.trace.wait(self._channel.name):
                if self.watcher is None or self.watcher.cancel():
                    self.complete()
                else:
                    self.watcher.result()
        self._check()
        for message in self.messages:
            message.decode()
        self._works, self._headers, self._buffers, self.messages = [], [], [], []
        self._channel.wire.leaving.pop(self, None)

    def leaving(self) -> list[tuple[int, Callable[[], object]]]:
        """Of every message to another rank, whose it is and what waits for it."""
        watched = None if self.watcher is None else self.watcher.result
        return [(peer, watched or work.wait) for peer, work in self.sends]

    def complete(self) -> None:
        """Wait for the transport. Once only, and by one thread: gloo forgets what was waited for.

        Raises:
            PeerError: As `wait`.
        """
        wire, where = self._channel.wire, self._channel.where(self._sequence)
        for peer, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                self._check(arrived_only=True)
                raise wire.bulletin.explain(error, peer=peer, where=where) from None
        if self._flight is not None:
            wire.trace.land(self._flight)

    def _check(self, *, arrived_only: bool = False) -> None:
        """Whether every message was the one expected, as far as can be told."""
        where = self._channel.where(self._sequence)
        for peer, expected, found in self._headers:
            if not torch.equal(expected, found) and not (arrived_only and not found.any()):
                raise PeerError(
                    f"{where}: rank {peer} sent (step, channel, dtype, numel) = {found.tolist()}, "
                    f"but {expected.tolist()} was expected"
                )
        for peer, work in self._works:
            if isinstance(work, Arrival) and work.other_bytes is not None:
                raise PeerError(
                    f"{where}: rank {peer} sent {work.other_bytes} bytes, but {work.num_bytes} "
                    f"were expected"
                )
