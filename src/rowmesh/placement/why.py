"""Why a planner placed a table as it did."""

from dataclasses import dataclass

__all__ = ["Why"]


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
