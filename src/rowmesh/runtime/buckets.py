"""A bucket of dense gradients: what travels in it, and the sums that come back."""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor, nn

from rowmesh.comm.codecs import Codecs
from rowmesh.comm.exchange import ChannelPool, Handle
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime.rings import Ring

__all__ = ["Bucket", "Rider"]

_MOST_HELD_S = 2.0  # a matter of order alone: what is not released goes all the same


class Rider(Protocol):
    """Numbers that travel in a bucket besides parameters' gradients.

    ``on_ready`` is for the bucket to set and for the rider to call when it could be packed.
    """

    on_ready: Callable[[], None] | None

    @property
    def size(self) -> int:
        """How many."""

    @property
    def num_flags(self) -> int:
        """And how many that no codec may change."""

    def pack(self, out: Tensor, flags: Tensor) -> None:
        """Write this rank's into ``out`` and ``flags``."""

    def take(self, sums: Tensor, flags: Tensor) -> None:
        """Keep the sums over ranks; the memory is used again in the next step."""


class Bucket:
    """Parameters whose gradients travel together, with a flag for each that has one, and riders.

    Flags of both come last. ``span`` ranks, next to each other, are added up first; then the sums
    of such groups.

    Attributes:
        is_held: Sums made from now on wait for `release` before they travel.
        is_late: Its sums are under way while the loop has gone on to the next step.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        riders: Sequence[Rider],
        mesh: Mesh,
        number: int,
        span: int,
        pool: ChannelPool,
        codecs: Codecs,
    ) -> None:
        self.parameters, self.mesh, self.number = list(parameters), mesh, number
        self.riders = list(riders)
        self.is_stale = self.is_held = self.is_late = False
        self._sequence = 0
        self._released = threading.Event()
        self._sum: Future[Handle] | None = None
        own = sum(p.numel() for p in self.parameters)
        sizes = [own, *(r.size for r in self.riders)]
        flags = [len(self.parameters), *(r.num_flags for r in self.riders)]
        self._flat = torch.empty(sum(sizes) + sum(flags), device=mesh.device)
        parts = self._flat.split([*sizes, *flags])
        self._own, self._has_grad = parts[0], parts[len(sizes)]
        self._rides = list(zip(parts[1 : len(sizes)], parts[len(sizes) + 1 :], strict=True))
        self.reset()
        place = mesh.rank % span
        group = list(range(mesh.rank - place, mesh.rank - place + span))
        name = f"dense bucket {number}" if self.parameters else "dense sums of hot rows"
        edge = "dense" if self.parameters else "hot gradients"
        codec = codecs[edge]
        self._near = Ring(name, mesh, group, self._flat, sum(sizes), edge, pool, codec)
        chunk, num_coded = self._near.chunks[place], self._near.num_coded[place]
        peers = list(range(place, mesh.world, span))
        self._far = Ring(f"{name}, groups", mesh, peers, chunk, num_coded, edge, pool, codec)

    def reset(self) -> None:
        """Wait for every gradient anew."""
        self.missing = len(self.parameters) + len(self.riders)

    @property
    def is_launched(self) -> bool:
        return self._sum is not None

    def launch(self) -> None:
        """Send this rank's gradients to the ranks that add them up."""
        with self.mesh.trace.phase("dense buckets"):
            self._launch()

    def _launch(self) -> None:
        mesh, grads = self.mesh, [p.grad for p in self.parameters]
        flags = torch.tensor([float(g is not None) for g in grads], device=mesh.device)
        pieces = [
            p.new_zeros(p.numel()) if g is None else g.reshape(-1)
            for p, g in zip(self.parameters, grads, strict=True)
        ]
        if self.parameters:
            torch.cat([p.float() for p in pieces], out=self._own)
            self._has_grad.copy_(flags)
        for rider, (out, marks) in zip(self.riders, self._rides, strict=True):
            rider.pack(out, marks)
        self._sequence += 1
        self._released = threading.Event()
        if not self.is_held:
            self.release()
        for ring in (self._near, self._far):
            ring.record()
        work = functools.partial(
            self._add_up,
            self._sequence,
            self._near.send_parts(self._sequence),
            self._released,
        )
        # A thread a bucket: ranks may launch them in different orders, and each waits for peers.
        self._sum = mesh.later(f"dense {self.number}", work)
        self.is_stale = False

    def _add_up(self, sequence: int, parts: Handle, released: threading.Event) -> Handle:
        with self.mesh.trace.phase("dense buckets"):
            parts.wait()  # from here on the bucket may be overwritten with the sums
            self._near.add_up()
            if len(self._far.ranks) > 1:
                self._far.send_parts(sequence).wait()
                self._far.add_up()
                released.wait(_MOST_HELD_S)
                self._far.send_sums(sequence).wait()
            released.wait(_MOST_HELD_S)
            return self._near.send_sums(sequence)

    def release(self) -> None:
        """Let the sums travel."""
        self._released.set()

    def finish(self, *, keep: bool) -> None:
        """Wait for the sums and, if ``keep``, make them the parameters' gradients."""
        if self._sum is not None:
            with self.mesh.trace.phase("dense buckets"):
                self._finish(self._sum, keep=keep)

    def _finish(self, sums: Future[Handle], *, keep: bool) -> None:
        self.release()
        with self.mesh.trace.wait(f"dense {self.number}"):
            handle = sums.result()
        handle.wait()
        self._sum, self.is_late = None, False
        self.reset()
        if not keep:
            return
        for rider, (sums_of, marks) in zip(self.riders, self._rides, strict=True):
            rider.take(sums_of, marks)
        at, has_grad = 0, (self._has_grad > 0).tolist()
        for parameter, present in zip(self.parameters, has_grad, strict=True):
            grad = self._own[at : at + parameter.numel()].view_as(parameter)
            if not present:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = grad.to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(grad)
            at += parameter.numel()
