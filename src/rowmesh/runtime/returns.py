"""The way back: gradients of one ticket's vectors to the owners of their rows."""

from itertools import accumulate

import torch
from torch import Tensor

from rowmesh.comm.codecs import PLAIN, Codecs, coded
from rowmesh.comm.exchange import Channel
from rowmesh.runtime.scratch import Scratch
from rowmesh.runtime.stacks import StackLayout
from rowmesh.runtime.tickets import Ticket

__all__ = ["send_back"]


def send_back(
    ticket: Ticket,
    number: int,
    grad: Tensor,
    channels: tuple[Channel, Channel, Channel],
    layout: StackLayout,
    scratch: Scratch,
    codecs: Codecs,
) -> None:
    """Post the gradients of stack ``number``: of home, of copied and of its hosts' copied rows.

    What this rank owns itself is not copied about: one buffer holds its own vectors and then
    what arrives, and the ticket notes where each source's gradients begin in it.

    Args:
        ticket: Whose backward it is.
        number: Of the stack.
        grad: ``[bags, D]`` gradient of the stack's bags.
        channels: For home rows, for copied rows, and for copies per host.
        layout: Of the stack.
        scratch: Keeps the buffers.
        codecs: Of the plan; what this rank owns itself stays as it is.
    """
    route, asked = ticket.routes[number], ticket.asked[number]
    rank, peers = channels[0].wire.rank, channels[0].wire.peers()
    bounds, ends, shared = route.vector_bounds, route.host_starts, [0] * len(asked)
    if layout.host_copies:
        shared = [len(r.rows) - r.num_home(layout.asked_homes[rank]) for r in asked]
    home = [r.num_vectors - n for r, n in zip(asked, shared, strict=True)]
    copied, cuts = [len(r.copied) for r in asked], route.copy_bounds
    kinds = (
        (channels[0], "backward", bounds[:-1], ends, home, ticket.home),
        (channels[1], "hot gradients", cuts[:-1], cuts[1:], copied, ticket.copied),
        (channels[2], "backward", ends, bounds[1:], shared, ticket.shared),
    )
    arriving = sum(sizes[p] for *_, sizes, _ in kinds for p in peers)
    selected = route.backward.is_selection
    num_own = route.num_vectors if selected else sum(sizes[rank] for *_, sizes, _ in kinds)
    buffer = scratch.take(("returns", number, ticket.place), num_own + arriving, grad.shape[1])
    if selected:
        vectors = buffer[:num_own]
        torch.index_select(grad, 0, route.backward.positions, out=vectors)
    else:
        vectors = route.backward.of(grad)
    ticket.dense.append(vectors[route.copy_bounds[-1] :])
    at, own = num_own, 0
    for channel, edge, begins, ends, sizes, arrivals in kinds:
        firsts = dict(zip(peers, accumulate((sizes[p] for p in peers), initial=at), strict=False))
        at += sum(sizes[p] for p in peers)
        firsts[rank] = begins[rank] if selected else own
        beside = layout.is_merged and edge == "backward"  # these stay inside the host
        codec = (PLAIN if beside else codecs)[edge]
        arrived = {p: slice(firsts[p], firsts[p] + sizes[p]) for p in peers}
        handle = channel.post(
            ticket.number,
            sends=[(p, coded(vectors[begins[p] : ends[p]], codec)) for p in peers],
            receives=[(p, coded(buffer[arrived[p]], codec)) for p in peers],
            edge=edge,
        )
        if not selected:
            buffer[own : own + sizes[rank]] = vectors[begins[rank] : ends[rank]]
            own += sizes[rank]
        starts = [firsts[source] for source in range(len(asked))]
        is_merged = layout.is_merged and arrivals is ticket.home
        arrivals.append(buffer, starts, None if is_merged else handle)
        ticket.beside += [handle] * is_merged
