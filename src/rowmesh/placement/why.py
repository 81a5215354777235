"""Why a planner placed a table as it did, and made the rows hot that it did."""

from dataclasses import dataclass

__all__ = ["HotChoice", "Why"]


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
            return (
                f"hot rows: {self.rows:,}{per_host} ({self.num_bytes / 1e6:,.1f} MB a rank) take "
                f"{self.coverage:.0%} of requests; expected ms of a step {step:,.1f}, without "
                f"{cold:,.1f}"
            )
        if self.best_rows:
            return (
                f"hot rows: none, which is best: {self.best_rows:,} would make a step "
                f"{self.best_step_s * 1e3:,.1f} ms instead of {cold:,.1f}"
            )
        return "hot rows: none; no table that can have any was asked for a row"
