"""Where autograd meets the mesh."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rowmesh.runtime.tickets import Ticket

if TYPE_CHECKING:
    from rowmesh.runtime.embeddings import ShardedEngine

__all__ = ["Lookup"]


class Lookup(torch.autograd.Function):
    """The vectors as they are; backward sends their gradients.

    What comes out is the memory that came in, under a name of its own: of an input handed on,
    autograd makes a view that a model may not change in place. No one else reads that memory.
    """

    @staticmethod
    def forward(
        ctx: Any, engine: "ShardedEngine", ticket: Ticket, anchor: Tensor, *vectors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.engine, ctx.ticket = engine, ticket
        found = tuple(v.detach() for v in vectors)
        ctx.mark_non_differentiable(
            *(v for v, s in zip(found, engine.stacks, strict=True) if not s.layout.trainable)
        )
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with ctx.engine.mesh.trace.phase("send gradients"):
            ctx.engine.send_gradients(ctx.ticket, grads)
        return None, None, torch.zeros_like(ctx.engine.anchor), *(None for _ in grads)
