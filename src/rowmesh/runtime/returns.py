"""The way back: gradients of one ticket's vectors to the owners of their rows."""

from itertools import accumulate

import torch
from torch import Tensor

from rowmesh.comm.exchange import Channel
from rowmesh.runtime.scratch import Scratch
from rowmesh.runtime.tickets import Ticket

__all__ = ["send_back"]


def send_back(
    ticket: Ticket,
    number: int,
    grad: Tensor,
    channels: tuple[Channel, Channel],
    scratch: Scratch,
) -> None:
    """Post the gradients of stack ``number``: of home rows, and of copied rows.

    What this rank owns itself is not copied about: one buffer holds its own vectors and then
    what arrives, and the ticket notes where each source's gradients begin in it.

    Args:
        ticket: Whose backward it is.
        number: Of the stack.
        grad: ``[bags, D]`` gradient of the stack's bags.
        channels: For home rows and for copied rows.
        scratch: Keeps the buffers.
    """
    route, asked = ticket.routes[number], ticket.asked[number]
    rank, peers = channels[0].wire.rank, channels[0].wire.peers()
    kinds = (
        (channels[0], "backward", route.vector_bounds, [r.num_vectors for r in asked], ticket.home),
        (
            channels[1],
            "hot gradients",
            route.copy_bounds,
            [len(r.copied) for r in asked],
            ticket.copied,
        ),
    )
    arriving = sum(sizes[p] for _, _, _, sizes, _ in kinds for p in peers)
    selected = route.backward.is_selection
    num_own = route.num_vectors if selected else sum(sizes[rank] for _, _, _, sizes, _ in kinds)
    buffer = scratch.take(("returns", number, ticket.place), num_own + arriving, grad.shape[1])
    if selected:
        vectors = buffer[:num_own]
        torch.index_select(grad, 0, route.backward.positions, out=vectors)
    else:
        vectors = route.backward.of(grad)
    ticket.dense.append(vectors[route.copy_bounds[-1] :])
    at, own = num_own, 0
    for channel, edge, bounds, sizes, arrivals in kinds:
        firsts = dict(zip(peers, accumulate((sizes[p] for p in peers), initial=at), strict=False))
        at += sum(sizes[p] for p in peers)
        firsts[rank] = bounds[rank] if selected else own
        handle = channel.post(
            ticket.number,
            sends=[(p, vectors[bounds[p] : bounds[p + 1]]) for p in peers],
            receives=[(p, buffer[firsts[p] : firsts[p] + sizes[p]]) for p in peers],
            edge=edge,
        )
        if not selected:
            buffer[own : own + sizes[rank]] = vectors[bounds[rank] : bounds[rank + 1]]
            own += sizes[rank]
        arrivals.append(buffer, [firsts[source] for source in range(len(asked))], handle)
