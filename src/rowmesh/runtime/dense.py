"""Dense gradients: our own buckets, summed over ranks in the plan's order, under the backward.

Flat: each rank adds up one chunk of a bucket and sends the sum to all: 2 (W - 1) / W of the
bucket leaves a rank, the least possible. Host-first: the ranks of a host add up a chunk each, peers
on different hosts add up their chunk, and the sums go back the same way: only 2 (H - 1) / H of a
bucket's L-th part leaves a rank's host. Not torch's DDP, which averages. With a codec gradients are
coded in chunks and flags are not; whoever sends a sum keeps what its receivers decode.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from rowmesh.comm.codecs import PLAIN, Codecs
from rowmesh.comm.exchange import ChannelPool, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import StepError
from rowmesh.placement.dense import bucket_parameters
from rowmesh.runtime.buckets import Bucket, Rider

__all__ = ["DenseBuckets", "broadcast_dense"]


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
        step_late: Steps these parameters, whose gradients are the sums now; None if no sum is left
            for later (`defer`).
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
        self.is_accumulating = False
        self._is_active = False
        self._mesh, self._span, self._pool = mesh, span, ChannelPool(mesh.wire)
        self._codecs = codecs
        self.step_late: Callable[[Sequence[nn.Parameter]], None] | None = None
        self._buckets: list[Bucket] = []
        self._members: list[list[nn.Parameter]] = []
        if mesh.world == 1:
            return
        sizes = [p.numel() for p in parameters]
        self._members = [[parameters[i] for i in bucket] for bucket in bucket_parameters(sizes)]
        for number, chosen in enumerate(self._members):
            for parameter in chosen:
                parameter.register_post_accumulate_grad_hook(lambda _, n=number: self._ready(n))
        self.set_riders(riders, own)

    def set_riders(self, riders: Sequence[Rider], own: Sequence[Rider]) -> None:
        """Take these aboard from now on, instead of others.

        Collective:
            All ranks, between steps.
        """
        if self._mesh.world == 1:
            return
        self.settle()
        loads: list[tuple[list[nn.Parameter], Sequence[Rider]]] = [(m, ()) for m in self._members]
        if loads:
            loads[-1] = (self._members[-1], riders)
        else:
            own = [*own, *riders]
        loads += [([], own)] if own else []
        self._pool.begin_anew()
        self._buckets = []
        for number, (chosen, aboard) in enumerate(loads):
            bucket = Bucket(
                chosen, aboard, self._mesh, number, self._span, self._pool, self._codecs
            )
            bucket.is_held = self.step_late is not None and not aboard
            self._buckets.append(bucket)
            for rider in aboard:
                rider.on_ready = functools.partial(self._ready, number)

    def _ready(self, number: int) -> None:
        bucket = self._buckets[number]
        self._is_active = True
        if bucket.is_late:
            raise StepError(
                "a dense parameter got a gradient before the step before was applied to it: it is "
                "read outside the forward of the module that owns it, which late_dense does not "
                "allow; make the rm.Optimizer without late_dense"
            )
        if bucket.is_launched:
            bucket.is_stale = True  # a second backward added to what was sent
            return
        bucket.missing -= 1
        if bucket.missing == 0 and not self.is_accumulating:
            bucket.launch()

    def launch(self) -> None:
        """Send every bucket that backward did not complete; other ranks may wait for it.

        Collective:
            All ranks, before any of them waits for anything else of this step.
        """
        self.settle()
        for bucket in self._buckets:
            if bucket.is_stale:
                bucket.finish(keep=False)
            if not bucket.is_launched:
                bucket.launch()

    def step_parameters_late(
        self, model: nn.Module, step: Callable[[Sequence[nn.Parameter]], None]
    ) -> None:
        """From now on `defer` may be called, and leaves the step of parameters to ``step``.

        It is made, bucket by bucket, when a module that owns one of the bucket's parameters runs
        its forward or gives its state dict.
        """
        if self._mesh.world == 1:
            return
        self.step_late = step
        of_bucket = {id(p): n for n, members in enumerate(self._members) for p in members}
        for bucket in self._buckets:
            bucket.is_held = not bucket.riders
        for module in model.modules():
            owned = [of_bucket[id(p)] for p in module.parameters(False) if id(p) in of_bucket]
            if owned:
                module.register_forward_pre_hook(Settler(self, sorted(set(owned))))
            module.register_state_dict_pre_hook(Settler(self, None))

    def defer(self) -> None:
        """Go on while sums are under way: `Settler` takes them up.

        Buckets with riders are waited for. Their parameters have their sums as gradients, all
        others none.

        Collective:
            All ranks, after `launch`.
        """
        for bucket in self._buckets:
            bucket.release()
        for bucket in self._buckets:
            if bucket.riders:
                bucket.finish(keep=True)
            else:
                bucket.is_late = True
                for parameter in bucket.parameters:
                    parameter.grad = None
        self._is_active = False

    def settle(self, numbers: Iterable[int] | None = None) -> None:
        """Step the parameters of these buckets, or of all, whose sums were left for later."""
        for number in range(len(self._buckets)) if numbers is None else numbers:
            bucket = self._buckets[number]
            if bucket.is_late:
                assert self.step_late is not None
                bucket.finish(keep=True)
                self.step_late(bucket.parameters)

    def reduce(self) -> None:
        """Make every ``grad`` the sum over ranks; None where no rank has one.

        Collective:
            All ranks, after `launch`.
        """
        for bucket in self._buckets:
            bucket.release()
        for bucket in self._buckets:
            bucket.finish(keep=True)
        self._is_active = False

    def discard(self) -> None:
        """Drop sums under way; a parameter may have had its gradient on some ranks only."""
        if self._is_active:
            self.launch()
        for bucket in self._buckets:
            if bucket.is_late:
                continue
            bucket.finish(keep=False)
            bucket.is_stale = False
            bucket.reset()
        self._is_active = False


class Settler:
    """A module's hook: before its parameters are read they get the step that was left for later.

    A copy of the module, which is not sharded, has nothing to wait for.
    """

    def __init__(self, buckets: DenseBuckets | None, numbers: Sequence[int] | None) -> None:
        self._buckets, self._numbers = buckets, numbers

    def __call__(self, *_: object) -> None:
        """As torch calls its hooks."""
        if self._buckets is not None:
            # Not inference mode: what an optimiser makes in its first step must outlive it.
            with torch.inference_mode(False), torch.no_grad():
                self._buckets.settle(self._numbers)

    def __deepcopy__(self, memo: object) -> "Settler":
        return Settler(None, None)


def broadcast_dense(tensors: Sequence[Tensor], mesh: Mesh) -> None:
    """Copy rank 0's dense parameters and buffers to all ranks.

    Collective:
        All ranks.
    """
    channel = mesh.wire.channel("dense broadcast", Lane.ROWS)
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
