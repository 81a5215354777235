"""What a rank has recorded: plain values, in nanoseconds of that rank's clock."""

from dataclasses import dataclass, field

__all__ = ["PHASES", "STEP", "Clock", "Flight", "Recording", "Span"]

STEP = "step"  # the track of the thread that runs the steps, and of autograd's

PHASES = (
    *("data", "route", "counts", "ids", "relay", "lookup", "vectors", "pool", "dense forward"),
    *("backward", "send gradients", "dense buckets", "wait gradients", "coalesce", "hot sums"),
    *("column squares", "update", "dense update", "tally"),
)
"""The phases that rowmesh marks, in the order of a step (docs/trace.md says what each is)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one thread.

    Args:
        kind: ``step``, ``phase`` or ``wait`` (blocked on a message or a communication thread).
        name: Of the phase, of what is waited for, or the step's number.
        track: The thread: `STEP`, or the owner of a communication thread.
        start: When it began.
        end: When it ended.
    """

    kind: str
    name: str
    track: str
    start: int
    end: int


@dataclass(slots=True)
class Flight:
    """One exchange of this rank, under way from its post until all its messages are complete.

    A receive is complete when its tensor is filled, a send when the transport has taken its last
    byte. A posted receive is under way even while the peer has not begun to send.

    Args:
        lane: control, rows or grads.
        exchange: Name of its channel.
        sequence: Number of this use of it.
        num_messages: Sends and receives.
        sent_bytes: Payload.
        received_bytes: Payload.
        start: When it was posted.
        end: When it was complete; None while under way.
    """

    lane: str
    exchange: str
    sequence: int
    num_messages: int
    sent_bytes: int
    received_bytes: int
    start: int
    end: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """This rank's clock against rank 0's: rank 0's time = this rank's time + ``offset_ns``.

    Args:
        offset_ns: When tracing began.
        error_ns: Most by which the offset was wrong then.
        drift_ns: How much the offset had changed when tracing ended, within twice that error.
    """

    offset_ns: int = 0
    error_ns: int = 0
    drift_ns: int = 0


@dataclass(kw_only=True, slots=True)
class Recording:
    """The traced steps of one rank.

    Args:
        rank: Whose.
        host: Of the rank.
        steps: In order; ``name`` is the step's number.
        spans: Phases and waits of all threads, in the order they ended.
        flights: In the order they were posted.
        sent: ``{edge: {link: bytes}}`` that the rank sent in these steps.
        clock: Against rank 0's.
        is_full: Whether events were dropped because there were too many.
    """

    rank: int
    host: int
    steps: list[Span]
    spans: list[Span]
    flights: list[Flight]
    sent: dict[str, dict[str, int]] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    is_full: bool = False
