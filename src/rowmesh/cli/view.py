"""What a training run prints."""

import math
import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rowmesh.errors import printable
from rowmesh.placement import Plan
from rowmesh.placement.text import MAX_TABLES, render
from rowmesh.train.stop import Stop
from rowmesh.train.tally import StepRecord

__all__ = ["View"]

_LINE_EVERY_S = 3.0


class View:
    """What a run prints: the plan, a bar (lines if stdout is no terminal), the result.

    When nobody reads stdout any more, as in ``rowmesh train | head``, it asks for a stop.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        world: int,
        first_step: int,
        stop: Stop,
        rule: str,
        max_tables: int | None = MAX_TABLES,
    ) -> None:
        self._max_tables = max_tables
        self._num_steps, self._world, self._stop, self._rule = num_steps, world, stop, rule
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=4,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=num_steps, text="", completed=first_step)
        self._shown, self._loss = -math.inf, math.nan
        self._steps, self._samples, self._seconds = 0, 0, 0.0
        self._sent = {"host": 0, "cross": 0}

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show_plan(self, plan: Plan) -> None:
        """The plan, then the bar."""
        self.say(render(plan, max_tables=self._max_tables, rule=self._rule))
        self._bar.start()

    def show_step(self, record: StepRecord) -> None:
        """Move the bar, or print a line now and then."""
        smooth = 0.95 * self._loss + 0.05 * record.loss
        self._loss = record.loss if math.isnan(smooth) else smooth
        self._steps += 1
        self._samples += record.samples
        self._seconds += record.seconds
        for link, amount in record.by_link().items():
            self._sent[link] += amount
        now, last = time.perf_counter(), record.step == self._num_steps
        pause = _LINE_EVERY_S if self._bar.disable else 0.25
        if now - self._shown < pause and not last:
            return
        self._shown = now
        if self._bar.disable:
            self.say(f"step {record.step}/{self._num_steps}  {self._text()}")
        else:
            self._bar.update(self._task, completed=record.step, text=self._text())

    def show_evaluation(self, step: int, found: dict[str, Any]) -> None:
        """One line; the last evaluation is part of the result."""
        if step < self._num_steps:
            self.say(f"step {step}/{self._num_steps}  {_metrics(found)}")

    def show_result(self, found: dict[str, Any]) -> None:
        """What the whole run came to."""
        if found["is_stopped"]:
            return
        lines = [f"{n} steps {what}" for n, what in _not_finite(found) if n]
        lines += [f"held-out samples {found['count']:,.0f}: {_metrics(found)}"]
        if not math.isnan(found["bayes_auc"]):
            lines.append(
                f"a perfect model would get AUC {found['bayes_auc']:.4f}, "
                f"NE {found['bayes_ne']:.4f} (the data is planted)"
            )
        if self._steps:
            lines.append(
                f"{self._steps} steps on {found['ranks']} ranks in {found['train_s']:.1f} s, "
                f"{found['samples_per_s']:,.0f} samples/s"
            )
            lines.append(self._beside_forecast(found))
        self.say("\n".join(lines))

    def _beside_forecast(self, found: dict[str, Any]) -> str:
        """What a step took and sent, and what it should have."""
        expected = found["forecast"]
        step = "run rowmesh calibrate for a forecast"
        if expected["step_s"] is not None:
            step = f"expected {expected['step_s'] * 1e3:.1f}"
        return (
            f"a step took {found['step_s'] * 1e3:.1f} ms ({step}); a rank sent "
            f"{self._mb('host'):.2f} MB inside its host (expected "
            f"{expected['host_bytes'] / 1e6:.2f}), {self._mb('cross'):.2f} MB across (expected "
            f"{expected['cross_bytes'] / 1e6:.2f})"
        )

    def say(self, text: str) -> None:
        """Print plain text, above the bar if there is one."""
        text = printable(text)
        try:
            if self._bar.disable:
                print(text, flush=True)
            else:
                self._console.print(text, markup=False)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # for what is still in its buffer
            os.close(nowhere)
            self._stop.request("stdout, which was closed")

    def _text(self) -> str:
        speed = self._samples / max(self._seconds, 1e-9)
        return (
            f"loss {self._loss:.4f}  {speed:,.0f} samples/s  "
            f"MB/step {self._mb('host'):.2f} in host, {self._mb('cross'):.2f} across"
        )

    def _mb(self, link: str) -> float:
        """Mean MB that a rank sent a step."""
        return self._sent[link] / max(self._steps, 1) / self._world / 1e6


def _not_finite(found: dict[str, Any]) -> list[tuple[int, str]]:
    skipped = found["skipped_steps"]
    return [
        (skipped, "had a loss that is not finite, and were left out"),
        (found["not_finite_steps"] - skipped, "had a loss that is not finite"),
    ]


def _metrics(found: dict[str, Any]) -> str:
    text = f"AUC {found['auc']:.4f}, NE {found['ne']:.4f}, logloss {found['logloss']:.4f}"
    if found.get("nan_predictions"):
        text += f" ({found['nan_predictions']:,.0f} of {found['count']:,.0f} predictions are nan)"
    if math.isnan(found["auc"]) and found["click_rate"] in (0.0, 1.0):
        text += f" (every label is {found['click_rate']:.0f}: AUC and NE have no meaning)"
    if "groups" not in found:
        return text
    ranked = f"HR@10 {found['hr_at_10']:.4f}, NDCG@10 {found['ndcg_at_10']:.4f}"
    return f"{ranked} of {found['groups']:,.0f} groups, {text}"
