"""One batch on its way from its ids to vectors: what is known of it at each stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rowmesh.comm.exchange import Handle
from rowmesh.comm.tasks import Task
from rowmesh.errors import RowmeshError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.runtime.following import Following
from rowmesh.runtime.requests import Request
from rowmesh.runtime.routes import Route
from rowmesh.runtime.tickets import Merged, Relayed

__all__ = ["BAD_INPUT", "LAST_BATCH", "TRAINING", "Early", "Fetch"]

BAD_INPUT, LAST_BATCH, TRAINING = 1, 2, 4  # bits of the status word


@dataclass(frozen=True, kw_only=True, slots=True)
class Early:
    """What of a stack's rows was sent ahead.

    Args:
        late: ``[W]`` of the rows that each rank asked of this one, which were not; None for none
            asked.
        num_clean: ``[W]`` rows that each owner sent this rank ahead: the first of its slice.
    """

    late: Sequence[Tensor | None]
    num_clean: Sequence[int]


@dataclass(kw_only=True, slots=True, eq=False)
class Fetch:
    """One batch on its way.

    Args:
        number: Of the forward, the same on all ranks.
        place: Tells apart the buffers of fetches under way together.
        source: The features as the caller gave them.
        features: The same, checked.
        routes: One per stack; none if there is an error.
        error: What is wrong with this rank's batch.
        status: This rank's status word.
        owner: Whose loop it was begun for.
        num_syncs: Of replicas, when it was begun.
        version: Of its ids, likewise.
        is_ahead: It was begun before its forward, and that has not come yet.
        under_way: What another thread does for it ahead.
        counts: ``[W]`` status, samples and counts of every rank.
        asked: ``[stack][source]``, what every rank asked of this one.
        buffers: ``[stack]`` of vectors.
        early: By stack, what was sent ahead.
        late_stacks: Stacks whose rows other ranks may change before the forward.
        arriving: Messages to wait for before vectors are read.
        is_answered: The last stage has begun.
        answering: What another thread still does of it.
        sent: Edge, peer and bytes of messages that the ledger has not been told of.
        before: The batch in front, if that was begun ahead too: of its rows this one's ids tell
            which gradients may follow its step. None when they have.
        about: Its number, or 0.
        told: By stack and host, of the rows that this rank asked for ``before``, those; its own.
        follows: By stack and host, of the rows that this rank was asked for, those.
        sent_bits: Peer and bytes of the messages that told it, not in ``sent``: they are of
            the step of ``before``.
        needs: What an earlier step has left to do before this rank tells which rows are late.
    """

    number: int
    place: int
    source: Any
    features: KeyedJaggedTensor
    routes: list[Route]
    error: RowmeshError | None
    status: int
    owner: object = None
    num_syncs: int = 0
    version: int = 0
    is_ahead: bool = False
    under_way: Task[None] | None = None
    hearing: tuple[Tensor, Handle] | None = None
    counts: list[list[int]] = field(default_factory=list)
    asked: list[Sequence[Request]] = field(default_factory=list)
    relayed: dict[int, Relayed] = field(default_factory=dict)
    merged: dict[int, Merged] = field(default_factory=dict)
    buffers: list[Tensor] = field(default_factory=list)
    early: dict[int, Early] = field(default_factory=dict)
    late_stacks: frozenset[int] = frozenset()
    arriving: list[Handle] = field(default_factory=list)
    is_answered: bool = False
    answering: Task[None] | None = None
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    before: "Fetch | None" = None
    about: int = 0
    told: dict[int, list[Tensor]] = field(default_factory=dict)
    follows: dict[int, list[Tensor]] = field(default_factory=dict)
    sent_bits: list[tuple[int, int]] = field(default_factory=list)
    needs: Following | None = None

    @property
    def is_training(self) -> bool:
        """Whether gradients will follow."""
        return bool(self.status & TRAINING)

    @property
    def trains_everywhere(self) -> bool:
        """Whether they will on all ranks; else its forward will say that they disagree."""
        return all(row[0] & TRAINING for row in self.counts)

    def wait(self) -> None:
        """Return when other threads have done what they do ahead."""
        if self.needs is not None:
            self.needs.go()  # no forward may come that says so
        for work in (self.under_way, self.answering):
            if work is not None:
                work.result()

    @property
    def bad_ranks(self) -> list[int]:
        """Ranks whose batch is wrong."""
        return [rank for rank, row in enumerate(self.counts) if row[0] & BAD_INPUT]

    @property
    def is_last(self) -> bool:
        """Whether every rank is at its last batch."""
        return all(row[0] & LAST_BATCH for row in self.counts)
