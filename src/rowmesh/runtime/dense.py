"""Dense gradients: our own buckets, summed over ranks in rank order, under the backward.

Each rank adds up one chunk of a bucket and sends the sum to all: 2 (W - 1) / W of the bucket
leaves a rank, the least possible. Not torch's DDP, which averages.
"""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from rowmesh.comm.exchange import Handle, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.placement.dense import bucket_parameters

__all__ = ["DenseBuckets", "broadcast_dense"]


class _Bucket:
    """Parameters whose gradients travel together, with a flag for each that has one."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: Mesh, number: int) -> None:
        self.parameters, self.mesh = list(parameters), mesh
        self.missing = len(self.parameters)
        self.is_stale = False
        self._sequence = 0
        self._sum: Future[tuple[Tensor, Handle]] | None = None
        self._parts = mesh.wire.channel(f"dense bucket {number}", Lane.GRADS)
        self._sums = mesh.wire.channel(f"dense sums {number}", Lane.GRADS)
        size = sum(p.numel() for p in self.parameters) + len(self.parameters)
        self._flat = torch.empty(size, device=mesh.device)
        self._chunks = self._flat.split(-(-size // mesh.world))
        self._chunks += (self._flat[:0],) * (mesh.world - len(self._chunks))
        self._parts_of = torch.empty((mesh.world, len(self._chunks[mesh.rank])), device=mesh.device)

    @property
    def is_launched(self) -> bool:
        return self._sum is not None

    def launch(self) -> None:
        """Send this rank's gradients to the ranks that add them up."""
        mesh, grads = self.mesh, [p.grad for p in self.parameters]
        flags = torch.tensor([float(g is not None) for g in grads], device=mesh.device)
        pieces = [
            p.new_zeros(p.numel()) if g is None else g.reshape(-1)
            for p, g in zip(self.parameters, grads, strict=True)
        ]
        flat, chunks, parts = self._flat, self._chunks, self._parts_of
        torch.cat([*(p.float() for p in pieces), flags], out=flat)
        mine = chunks[mesh.rank]
        self._sequence += 1
        sequence = self._sequence
        handle = self._parts.post(
            sequence,
            sends=[(p, chunks[p]) for p in mesh.peers()],
            receives=[(p, parts[p]) for p in mesh.peers()],
            edge="dense",
        )

        def add_up() -> tuple[Tensor, Handle]:
            handle.wait()  # from here on ``flat`` may be overwritten with the sums
            parts[mesh.rank] = mine
            total = parts[0]
            for part in parts[1:]:
                total += part
            mine.copy_(total)
            return flat, self._sums.post(
                sequence,
                sends=[(p, mine) for p in mesh.peers()],
                receives=[(p, chunks[p]) for p in mesh.peers()],
                edge="dense",
            )

        self._sum = mesh.later("dense", add_up)
        self.is_stale = False

    def finish(self, *, keep: bool) -> None:
        """Wait for the sums and, if ``keep``, make them the parameters' gradients."""
        if self._sum is None:
            return
        flat, handle = self._sum.result()
        handle.wait()
        self._sum, self.missing = None, len(self.parameters)
        if not keep:
            return
        at = 0
        has_grad = (flat[-len(self.parameters) :] > 0).tolist()
        for parameter, present in zip(self.parameters, has_grad, strict=True):
            grad = flat[at : at + parameter.numel()].view_as(parameter)
            if not present:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = grad.to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(grad)
            at += parameter.numel()


class DenseBuckets:
    """Sums the gradients of dense parameters over all ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
        self.parameters = list(parameters)
        self.is_accumulating = False
        self._is_active = False
        self._buckets: list[_Bucket] = []
        if mesh.world == 1:
            return
        for number, members in enumerate(bucket_parameters([p.numel() for p in parameters])):
            bucket = _Bucket([parameters[i] for i in members], mesh, number)
            self._buckets.append(bucket)
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: _Bucket):  # type: ignore[no-untyped-def]
        def ready(parameter: Tensor) -> None:
            self._is_active = True
            if bucket.is_launched:
                bucket.is_stale = True  # a second backward added to what was sent
                return
            bucket.missing -= 1
            if bucket.missing == 0 and not self.is_accumulating:
                bucket.launch()

        return ready

    def launch(self) -> None:
        """Send every bucket that backward did not complete; other ranks may wait for it.

        Collective:
            All ranks, before any of them waits for anything else of this step.
        """
        for bucket in self._buckets:
            if bucket.is_stale:
                bucket.finish(keep=False)
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

    def discard(self) -> None:
        """Drop sums under way; a parameter may have had its gradient on some ranks only."""
        if self._is_active:
            self.launch()
        for bucket in self._buckets:
            bucket.finish(keep=False)
            bucket.missing, bucket.is_stale = len(bucket.parameters), False
        self._is_active = False


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
