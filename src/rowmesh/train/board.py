"""TensorBoard, where it is installed."""

from pathlib import Path
from typing import Any

from rowmesh.extras import require_extra
from rowmesh.placement import Plan
from rowmesh.placement.text import render
from rowmesh.train.tally import StepRecord

__all__ = ["Board", "open_board"]


class Board:
    """Writes loss, learning rate, samples/s, MB a step and metrics as TensorBoard scalars."""

    def __init__(self, writer: Any, *, log_every: int, rule: str) -> None:
        self._writer, self._log_every, self._rule = writer, log_every, rule

    def show_plan(self, plan: Plan) -> None:
        """The plan as text."""
        self._writer.add_text("plan", f"```\n{render(plan, max_tables=None, rule=self._rule)}\n```")

    def show_step(self, record: StepRecord) -> None:
        """A step that is due."""
        if record.step % self._log_every:
            return
        scalars = {
            "train/loss": record.loss,
            "train/lr": record.lr,
            "train/samples_per_s": record.samples / max(record.seconds, 1e-9),
            **{f"MB_per_step/{link}": b / 1e6 for link, b in record.by_link().items()},
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, record.step)

    def show_evaluation(self, step: int, found: dict[str, Any]) -> None:
        """AUC, logloss and NE; HR and NDCG where candidates were ranked."""
        for name in ("auc", "logloss", "ne", "hr_at_10", "ndcg_at_10"):
            if name not in found:
                continue
            self._writer.add_scalar(f"eval/{name}", found[name], step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def open_board(
    folder: Path, *, log_every: int, rule: str, after: int = 0, is_needed: bool = False
) -> Board | None:
    """A board in ``folder`` that hides points after step ``after``; None without TensorBoard.

    Memory of the plan is told with the state of the update rule ``rule``.

    Raises:
        InputError: If it ``is_needed`` and not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        if is_needed:
            require_extra("tensorboard", "torch.utils.tensorboard")
        return None
    writer = SummaryWriter(str(folder), purge_step=after + 1)
    return Board(writer, log_every=log_every, rule=rule)
