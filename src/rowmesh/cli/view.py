"""What a training run prints."""

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rowmesh.comm.mesh import Mesh
from rowmesh.placement import Plan
from rowmesh.train.trainer import RunConfig

__all__ = ["View"]

_LINE_EVERY_S = 3.0


class View:
    """What a run prints: the plan, a bar (lines if stdout is no terminal), the result."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
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
        self._task = self._bar.add_task("train", total=config.steps, text="")
        self._start, self._shown = 0.0, -math.inf
        self._loss = math.nan

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show_plan(self, plan: Plan) -> None:
        self._console.print(str(plan), markup=False)
        self._bar.start()
        self._start = time.perf_counter()

    def show_step(self, step: int, loss: float) -> None:
        self._loss = loss if math.isnan(self._loss) else 0.95 * self._loss + 0.05 * loss
        now, last = time.perf_counter(), step == self._config.steps
        if self._bar.disable:
            if now - self._shown >= _LINE_EVERY_S or last:
                self._shown = now
                print(f"step {step}/{self._config.steps}  {self._text(step, now)}", flush=True)
        elif now - self._shown >= 0.25 or last:
            self._shown = now
            self._bar.update(self._task, completed=step, text=self._text(step, now))

    def _text(self, step: int, now: float) -> str:
        samples = step * self._config.data.batch_size * self._mesh.world
        sent = {link: b / step / 1e6 for link, b in self._mesh.ledger.by_link().items()}
        return (
            f"loss {self._loss:.4f}  {samples / (now - self._start):,.0f} samples/s  "
            f"MB/step {sent['host']:.2f} in host, {sent['cross']:.2f} across"
        )

    def show_result(self, found: dict[str, Any]) -> None:
        sent = {k: b / found["steps"] / found["ranks"] / 1e6 for k, b in found["bytes"].items()}
        print(
            f"held-out samples {found['count']:,.0f}: AUC {found['auc']:.4f}, "
            f"NE {found['ne']:.4f}, logloss {found['logloss']:.4f}\n"
            f"a perfect model would get AUC {found['bayes_auc']:.4f}, NE {found['bayes_ne']:.4f}"
            f" (the data is planted)\n"
            f"{found['steps']} steps on {found['ranks']} ranks in {found['train_s']:.1f} s, "
            f"{found['samples_per_s']:,.0f} samples/s; a rank sent {sent['host']:.2f} MB a step "
            f"inside the host, {sent['cross']:.2f} MB across hosts",
            flush=True,
        )
