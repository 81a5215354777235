"""What a rank holds of a stack, what it relays or merges, and the tickets of training forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rowmesh.comm.exchange import Handle
from rowmesh.errors import StepError
from rowmesh.runtime.requests import Request
from rowmesh.runtime.routes import Route
from rowmesh.runtime.stacks import StackLayout

__all__ = ["Merged", "Relayed", "Stack", "Ticket", "Together"]


@dataclass(kw_only=True, slots=True)
class Stack:
    """A layout, and this rank's rows of it with their optimiser state."""

    layout: StackLayout
    home: Tensor
    copies: Tensor
    home_state: dict[str, Tensor] = field(default_factory=dict)
    copies_state: dict[str, Tensor] = field(default_factory=dict)

    def host_copies(self, rank: int, tensor: Tensor | None = None) -> Tensor:
        """This rank's copies for its host: of the weights, or of one of ``home_state``."""
        return (self.home if tensor is None else tensor)[self.layout.home_slots[rank] :]


@dataclass(frozen=True, kw_only=True, slots=True)
class Relayed:
    """One forward through a relay.

    Args:
        rows: Rows fetched from the owners beside this rank, owner after owner, and for each
            owner asker after asker.
        requests: ``[W]`` what this rank was asked, with positions in ``rows`` for slots.
        bounds: Where each owner's part of ``rows`` begins, and the end.
        owned: ``[W]`` what this rank, as an owner, was asked on behalf of every rank.
        received: ``[L][H]`` how many rows each relay asked of this rank, by asker's host.
    """

    rows: Tensor
    requests: Sequence[Request]
    bounds: Sequence[int]
    owned: Sequence[Request]
    received: Sequence[Sequence[int]]


@dataclass(kw_only=True, slots=True)
class Merged:
    """One forward's rows of a stack that this rank asks its peers for, or has, for its host.

    Args:
        slots: What ranks of its host ask of it, distinct and ascending.
        cuts: ``[H + 1]`` where the rows of the peer on each host begin among them; copies for the
            host follow the last.
        positions: ``[L]`` where each rank's requests are among them.
        wanted: ``[H]`` this rank's home rows that each host asks for, its own among them.
        rows: The rows of ``slots``, as far as they are here.
        place: Where each of ``slots`` lies in ``rows``.
        late: Of ``slots``, which were not sent ahead; None before, or if nothing was.
        sent: ``[H]`` of ``wanted``, which were not sent ahead; likewise.
        num_clean: ``[H]`` rows that each peer sent ahead.
    """

    slots: Tensor
    cuts: Sequence[int]
    positions: Sequence[Tensor]
    wanted: Sequence[Tensor]
    rows: Tensor
    place: Tensor
    late: Tensor | None = None
    sent: Sequence[Tensor] = ()
    num_clean: Sequence[int] = ()


@dataclass(kw_only=True, slots=True)
class Arrivals:
    """Gradients of one kind for a ticket, per stack.

    Source r's gradients of stack i begin at row ``firsts[i][r]`` of ``grads[i]``.
    """

    grads: list[Tensor] = field(default_factory=list)
    firsts: list[list[int]] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)

    def append(self, grads: Tensor, firsts: list[int], handle: Handle | None) -> None:
        """Add the next stack's."""
        self.grads.append(grads)
        self.firsts.append(firsts)
        self.handles += [] if handle is None else [handle]

    def wait(self) -> None:
        """Return when all are here and ours have left. One thread only."""
        for handle in self.handles:
            handle.wait()


@dataclass(kw_only=True, slots=True)
class Ticket:
    """One training forward, from its routes to the gradients that come back for it.

    Args:
        number: The same on all ranks.
        place: Tells apart the buffers of tickets under way together.
        routes: One per stack.
        asked: ``[stack][source]``, what every rank asked of this one.
        relayed: By stack, what this rank fetched for others.
        merged: By stack, what it asked for its host.
        num_means: `Mesh.num_means` at that time.
        is_marked: Look-ahead knows its rows.
        is_sent: Its backward has run.
        home: Gradients of home rows; the thread that steps waits for them.
        copied: Gradients of copied rows; the communication thread waits for them.
        shared: Gradients, from ranks of this host, of its copies; likewise.
        beside: Messages of ``home`` that are merged: another thread waits for these.
        dense: ``[stack]`` this rank's gradients of `Route.dense_slots`.
    """

    number: int
    place: int
    routes: Sequence[Route]
    asked: list[Sequence[Request]]
    relayed: dict[int, Relayed]
    merged: dict[int, Merged]
    num_means: int = 0
    is_marked: bool = False
    is_sent: bool = False
    home: Arrivals = field(default_factory=Arrivals)
    copied: Arrivals = field(default_factory=Arrivals)
    shared: Arrivals = field(default_factory=Arrivals)
    beside: list[Handle] = field(default_factory=list)
    dense: list[Tensor] = field(default_factory=list)

    def check_backward(self, open_tickets: "Sequence[Ticket]", path: str) -> None:
        """Raise if no step would take the gradients of a backward now."""
        if self.is_sent:
            raise StepError(
                "backward ran twice through one forward: add the losses and call backward once"
            )
        if not any(ticket is self for ticket in open_tickets):
            raise StepError(
                f"backward through a forward of {path!r} from before the last step, which dropped "
                f"it: run every backward before opt.step()"
            )


class Together(Protocol):
    """What keeps the replicas of an engine's rows together (`rowmesh.runtime.replicas`)."""

    def finish(self) -> None:
        """Wait for what is under way: before rows are read."""

    def wait(self) -> None:
        """As `finish`, for another thread that is about to read rows."""

    def bring_together(self) -> bool:
        """Make them alike now; whether rows changed."""

    @property
    def is_under_way(self) -> bool:
        """Whether rows are being changed."""

    @property
    def num_syncs(self) -> int:
        """How many times rows became alike."""

    def late_stacks(self, num_steps: int) -> frozenset[int]:
        """Stacks whose rows other groups change before so many more steps are done."""
