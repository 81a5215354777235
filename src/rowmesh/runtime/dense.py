"""Dense gradients: our own buckets, summed over ranks in the plan's order, under the backward.

From its backward to the step a parameter's ``grad`` is this rank's part, and may be on its way to
other ranks; then it becomes the sum (`rowmesh.runtime.ring`).
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from rowmesh.comm.codecs import PLAIN, Codecs
from rowmesh.comm.exchange import ChannelPool, Handle, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.comm.tasks import Task
from rowmesh.errors import StepError
from rowmesh.placement.dense import bucket_parameters
from rowmesh.runtime.ring import Ring

__all__ = ["DenseBuckets", "Rider", "broadcast_dense"]


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


class _Bucket:
    """Parameters whose gradients travel together, with a flag for each that has one, and riders.

    Flags of both come last. ``span`` ranks, next to each other, are added up first; then the sums
    of such groups.
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
        self.riders, self._pool = list(riders), pool
        self._sequence = 0
        self._sum: Task[Handle] | None = None
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
        self._missing = len(self.parameters) + len(self.riders)
        self._backwards: set[int] = set()
        self._given: dict[Tensor, tuple[Tensor, int]] = {}

    def saw(self, parameter: Tensor) -> None:
        """A backward has written this parameter's gradient."""
        self._given[parameter] = _version(parameter)

    def changed(self) -> list[Tensor]:
        """Parameters whose gradients are not as their last backward left them."""
        return _changed(self._given)

    def note(self, backward: int) -> bool:
        """A parameter or rider got its gradient: whether all have, and in one backward.

        If in several, nothing tells before the step which is the last.
        """
        self._missing -= 1
        self._backwards.add(backward)
        return self._missing == 0 and len(self._backwards) == 1

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
        work = functools.partial(
            self._add_up, self._sequence, self._near.send_parts(self._sequence)
        )
        # A thread a bucket: ranks may launch them in different orders, and each waits for peers.
        self._sum = mesh.later(f"dense {self.number}", work, of=self._pool)

    def _add_up(self, sequence: int, parts: Handle) -> Handle:
        with self.mesh.trace.phase("dense buckets"):
            parts.wait()  # from here on the bucket may be overwritten with the sums
            self._near.add_up()
            if len(self._far.ranks) > 1:
                self._far.send_parts(sequence).wait()
                self._far.add_up()
                self._far.send_sums(sequence).wait()
            return self._near.send_sums(sequence)

    def finish(self, *, keep: bool) -> None:
        """Wait for the sums and, if ``keep``, make them the parameters' gradients."""
        if self._sum is not None:
            with self.mesh.trace.phase("dense buckets"):
                self._finish(self._sum, keep=keep)

    def _finish(self, sums: Task[Handle], *, keep: bool) -> None:
        sums.result().wait()
        self._sum = None
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


class DenseBuckets:
    """Sums the gradients of dense parameters over all ranks.

    Args:
        parameters: In the model's order.
        mesh: Of the model.
        span: `Plan.span`.
        riders: Travel in the bucket that backward completes last.
        own: Travel in a bucket of their own.
        codecs: Of the plan.

    Attributes:
        is_held: Whether more than one backward may come before the step: then buckets leave in the
            step, else with the backward that completes them. The same on all ranks.
        mesh: Of the model.
        has_optimizer: Whether an optimiser takes the sums.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        span: int,
        *,
        riders: Sequence[Rider] = (),
        own: Sequence[Rider] = (),
        codecs: Codecs = PLAIN,
    ) -> None:
        self.parameters = list(parameters)
        self.is_held: Callable[[], bool] = lambda: False
        self._is_active = self.has_optimizer = False
        self.mesh, self._span, self._pool = mesh, span, ChannelPool(mesh.wire)
        self._codecs = codecs
        self._buckets: list[_Bucket] = []
        self._members: list[list[nn.Parameter]] = []
        self._alone: dict[Tensor, tuple[Tensor, int]] = {}  # of one rank: as `_Bucket` has it
        if mesh.world == 1:
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), 0))
            return
        sizes = [p.numel() for p in parameters]
        self._members = [[parameters[i] for i in bucket] for bucket in bucket_parameters(sizes)]
        for number, chosen in enumerate(self._members):
            for parameter in chosen:
                parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))
        self.set_riders(riders, own)

    def set_riders(self, riders: Sequence[Rider], own: Sequence[Rider]) -> None:
        """Take these aboard from now on, instead of others.

        Collective:
            All ranks, between steps.
        """
        if self.mesh.world == 1:
            return
        loads: list[tuple[list[nn.Parameter], Sequence[Rider]]] = [(m, ()) for m in self._members]
        if loads:
            loads[-1] = (self._members[-1], riders)
        else:
            own = [*own, *riders]
        loads += [([], own)] if own else []
        self._pool.begin_anew()
        self._buckets = []
        for number, (chosen, aboard) in enumerate(loads):
            bucket = _Bucket(
                chosen, aboard, self.mesh, number, self._span, self._pool, self._codecs
            )
            self._buckets.append(bucket)
            for rider in aboard:
                rider.on_ready = functools.partial(self._ready, number)

    def _ready(self, number: int, parameter: Tensor | None = None) -> None:
        if self.mesh.world == 1:
            assert parameter is not None
            self._alone[parameter] = _version(parameter)
            return
        bucket = self._buckets[number]
        self._is_active = True
        if bucket.is_launched:
            raise StepError(
                "gradients of dense parameters changed while on their way to other ranks, by a "
                "second backward or a reentrant checkpoint: add the losses and call backward "
                "once, or run what changes them inside opt.accumulate()"
            )
        if parameter is not None:
            bucket.saw(parameter)
        if not self.is_held() and bucket.note(torch._C._current_graph_task_id()):
            bucket.launch()

    def launch(self) -> None:
        """Send every bucket that backward did not complete; other ranks may wait for it.

        Raises:
            StepError: If a gradient has been changed since its backward: what was sent, or will be
                added to those of other ranks, is no gradient that a caller could have meant.

        Collective:
            All ranks, before any of them waits for anything else of this step.
        """
        if _changed(self._alone):
            self.mesh.say_once(
                "gradients of layers changed between backward and step, as by torch's "
                "clip_grad_norm_: those of tables are not among them, and on several ranks it is "
                "an error: use opt.clip_grad_norm_(max_norm), or opt.sum_gradients() before"
            )
        self._alone.clear()
        if changed := [p for bucket in self._buckets for p in bucket.changed()]:
            raise StepError(
                f"the grad of {len(changed)} dense parameters, the first of shape "
                f"{list(changed[0].shape)}, changed between backward and step, but until the step "
                f"it is this rank's part of a sum over ranks: clip with "
                f"opt.clip_grad_norm_(max_norm), or call opt.sum_gradients() on all ranks first "
                f"and change the sums"
            )
        self._launch()

    def _launch(self) -> None:
        for bucket in self._buckets:
            if not bucket.is_launched:
                bucket.launch()

    def reduce(self) -> None:
        """Make every ``grad`` the sum over ranks; None where no rank has one.

        Collective:
            All ranks, after `launch`.
        """
        for bucket in self._buckets:
            bucket.finish(keep=True)
        self._is_active = False

    def discard(self, *, is_active: bool) -> None:
        """Drop sums under way; a parameter may have had its gradient on some ranks only.

        Args:
            is_active: Whether a backward has run on any rank, even if it had none of these
                gradients here.
        """
        self._alone.clear()
        if is_active or self._is_active:
            self._launch()
        for bucket in self._buckets:
            bucket.finish(keep=False)
            bucket.reset()
        self._is_active = False


def _version(parameter: Tensor) -> tuple[Tensor, int]:
    """A parameter's gradient, and how often it has been changed in place."""
    assert parameter.grad is not None
    return parameter.grad, parameter.grad._version


def _changed(given: Mapping[Tensor, tuple[Tensor, int]]) -> list[Tensor]:
    """Parameters whose gradients are others now, or have been changed."""
    return [
        parameter
        for parameter, (grad, version) in given.items()
        if parameter.grad is not grad or grad._version != version
    ]


def _hook(buckets: "weakref.ref[DenseBuckets]", number: int) -> Callable[[Tensor], None]:
    """Tells the buckets that a parameter of one of them has its gradient.

    Weakly: the collector does not look into hooks, and would never free a model that was dropped.
    """

    def ready(parameter: Tensor) -> None:
        found = buckets()
        if found is not None:
            found._ready(number, parameter)

    return ready


def broadcast_dense(tensors: Sequence[Tensor], mesh: Mesh) -> None:
    """Copy rank 0's dense parameters and buffers to all ranks.

    Collective:
        All ranks.
    """
    pool = ChannelPool(mesh.wire)
    channel = pool.channel("dense broadcast", Lane.ROWS)
    for sequence, tensor in enumerate(tensors):
        data = tensor.detach().contiguous()
        first = mesh.rank == 0
        channel.post(
            sequence,
            sends=[(p, data) for p in mesh.peers()] if first else (),
            receives=() if first else [(0, data)],
            edge="dense",
        ).wait()
        if not first and data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
