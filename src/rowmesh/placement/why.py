"""Why a planner placed tables as it did, made the rows hot that it did, and chose its groups."""

from dataclasses import dataclass

__all__ = ["GroupCandidate", "GroupsChoice", "HotChoice", "Why"]

_WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Why:
    """The option a planner chose for a table beside the best other one, all else as planned.

    Args:
        chosen: Split and exchange, e.g. ``row_wise rows`` or ``column_wise(4) pooled``.
        runner_up: The best other option; none if the table had no other, or none that fits.
        bytes_saved: Bytes that leave a rank in a step under the runner-up, less those under the
            chosen option; mean over ranks.
        seconds_saved: Predicted seconds of a step under the runner-up, less those of the plan. A
            little less than 0 for small tables that are data-parallel all the same.
    """

    chosen: str
    runner_up: str | None = None
    bytes_saved: float = 0.0
    seconds_saved: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HotChoice:
    """The hot rows a planner chose over all tables, and what it expects of them.

    Args:
        rows: Hot rows of all tables on every rank; 0 if none are worth it.
        host_rows: Those with one copy per host.
        num_bytes: Their copies on every rank, with optimiser state.
        coverage: Share of all requests that go to hot rows.
        step_s: Expected seconds of a step.
        step_s_cold: Without hot rows.
        best_rows: Where ``rows`` is 0: the best number above it, and what it would make of a
            step; 0 if there were no candidates.
        best_step_s: See ``best_rows``.
    """

    rows: int
    num_bytes: int
    coverage: float
    step_s: float
    step_s_cold: float
    best_rows: int = 0
    best_step_s: float = 0.0
    host_rows: int = 0

    def __str__(self) -> str:
        cold, step = self.step_s_cold * 1e3, self.step_s * 1e3
        if self.rows or self.host_rows:
            per_host = f" and {self.host_rows:,} per host" if self.host_rows else ""
            rows = (
                f"hot rows: {self.rows:,}{per_host} ({self.num_bytes / 1e6:,.1f} MB a rank) take "
                f"{self.coverage:.0%} of requests;"
            )
            steps = f"expected ms of a step {step:,.1f}, without {cold:,.1f}"
            return f"{rows} {steps}" if len(rows) + len(steps) < _WIDTH else f"{rows}\n  {steps}"
        if self.best_rows:
            return (
                f"hot rows: none, which is best: {self.best_rows:,} would make a step "
                f"{self.best_step_s * 1e3:,.1f} ms instead of {cold:,.1f}"
            )
        return "hot rows: none; no table that can have any was asked for a row"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCandidate:
    """Shard groups of one size and layout, and what a planner expects of its plan in them.

    Args:
        size: N, ranks in a group.
        layout: contiguous or strided.
        host_bytes, cross_bytes: Sent by a rank in a step inside its host and across, for tables
            and dense layers; mean over ranks.
        sync_host_bytes, sync_cross_bytes: The same of the sync of replicas; mean over steps.
        work_imbalance, bytes_imbalance: Largest over mean, over ranks: seconds of work on ids and
            rows, bytes sent.
        memory_bytes: Rows and state on the fullest rank.
        step_s: Seconds of a step.
        note: Why it could not be planned, if so.
        is_chosen: Whether the plan is this one.
    """

    size: int
    layout: str
    host_bytes: float = 0.0
    cross_bytes: float = 0.0
    sync_host_bytes: float = 0.0
    sync_cross_bytes: float = 0.0
    work_imbalance: float = 1.0
    bytes_imbalance: float = 1.0
    memory_bytes: int = 0
    step_s: float = 0.0
    note: str = ""
    is_chosen: bool = False

    def line(self) -> str:
        """A row of the table of a `GroupsChoice`."""
        first = f"{'*' if self.is_chosen else ' '} {self.size:>5} {self.layout:<10}"
        if self.note:
            room = _WIDTH - len(first) - 1
            return (
                f"{first} {self.note if len(self.note) <= room else self.note[: room - 3] + '...'}"
            )
        exchange = f"{self.host_bytes / 1e6:>10.2f} {self.cross_bytes / 1e6:>9.2f}"
        sync = f"{self.sync_host_bytes / 1e6:>9.2f} {self.sync_cross_bytes / 1e6:>9.2f}"
        even = f"{self.work_imbalance:>6.2f} {self.bytes_imbalance:>6.2f}"
        gib, ms = self.memory_bytes / (1 << 30), self.step_s * 1e3
        return f"{first} {exchange} {sync} {even} {gib:>9.4f} {ms:>10.3f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsChoice:
    """Why a plan has shard groups of its size: every candidate; the least ms win."""

    candidates: tuple[GroupCandidate, ...]

    def __str__(self) -> str:
        lines = [
            "why this N: MB sent by a rank and step inside hosts and across, by exchange and by "
            "sync;",
            "largest over mean of work and of bytes; GiB of the fullest rank; ms of a step",
            f"{'N':>7} {'layout':<10} {'exchange':>10} {'across':>9} {'sync':>9} {'across':>9} "
            f"{'work':>6} {'bytes':>6} {'GiB':>9} {'ms':>10}",
        ]
        return "\n".join([*lines, *(one.line() for one in self.candidates)])
