"""The command line: `rowmesh train` and `rowmesh plan`."""

import contextlib
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rowmesh.comm.mesh import Mesh
from rowmesh.data import CRITEO_KAGGLE, SyntheticClicks
from rowmesh.errors import InputError, RowmeshError
from rowmesh.placement import Plan, save_plan
from rowmesh.placement.document import plan_to_json
from rowmesh.topology import Topology
from rowmesh.train.launch import exit_code, launch
from rowmesh.train.trainer import RunConfig, build_model, plan_run, train

__all__ = ["app", "main"]

_DEFAULT = RunConfig()
_LINE_EVERY_S = 3.0

app = typer.Typer(
    name="rowmesh",
    help="Train recommendation models whose embedding tables outgrow a device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Batch = Annotated[int, typer.Option(help="Samples per rank and step.")]
Dim = Annotated[int, typer.Option(help="Columns of every table.")]
Alpha = Annotated[float, typer.Option(help="Zipf exponent of the ids; 0 is uniform.")]
Split = Annotated[
    str, typer.Option(help="Of all tables: auto, table_wise, row_wise or data_parallel.")
]
Exchange = Annotated[str, typer.Option(help="What travels: auto, rows or pooled.")]


@app.callback()
def rowmesh() -> None:
    """Train recommendation models whose embedding tables outgrow a device."""


@app.command("train")
def train_command(
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes to start here; default one, or the ranks of torchrun."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = _DEFAULT.steps,
    batch: Batch = _DEFAULT.data.batch_size,
    dim: Dim = _DEFAULT.dim,
    cap: Annotated[int, typer.Option(help="Most rows of a table.")] = _DEFAULT.data.cap or 0,
    alpha: Alpha = _DEFAULT.data.alpha,
    split: Split = _DEFAULT.split,
    exchange: Exchange = _DEFAULT.exchange,
    lr: Annotated[
        float, typer.Option(help="First learning rate, of tables and layers; it falls to 0.")
    ] = _DEFAULT.sparse_lr,
    seed: Annotated[int, typer.Option(help="Of the initial values and the data.")] = _DEFAULT.seed,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object, nothing else.")
    ] = False,
) -> None:
    """Train a DLRM on synthetic clicks of Criteo's shape, whose truth is known, and evaluate it.

    With two ranks on two cores the default takes about a minute.

    Under torchrun, on one host or many: torchrun --nproc-per-node 2 -m rowmesh.cli train
    """
    with _one_sentence():
        config = RunConfig(
            data=SyntheticClicks(cap=cap, alpha=alpha, batch_size=batch, seed=seed),
            dim=dim,
            split=split,
            exchange=exchange,
            sparse_lr=lr,
            dense_lr=lr,
            steps=steps,
            seed=seed,
        )
        here = Topology(local=max(ranks or 1, 1))
        plan_run(config, build_model(config), here, num_batches=0)  # fail before ranks start
        launch(functools.partial(_train_rank, config, as_json), ranks=ranks)


@app.command("plan")
def plan_command(
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 1,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks (devices) on each host.")] = 2,
    tables: Annotated[
        int, typer.Option(help="Number of tables; beyond 26 Criteo's sizes repeat.")
    ] = len(CRITEO_KAGGLE),
    batch: Batch = _DEFAULT.data.batch_size,
    dim: Dim = 64,
    cap: Annotated[int | None, typer.Option(help="Most rows of a table; default no limit.")] = None,
    alpha: Alpha = _DEFAULT.data.alpha,
    split: Split = _DEFAULT.split,
    exchange: Exchange = _DEFAULT.exchange,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file as JSON.")] = None,
) -> None:
    """Print the plan for a cluster, without any cluster: tables of Criteo's sizes, Zipf ids."""
    with _one_sentence():
        sizes = tuple(itertools.islice(itertools.cycle(CRITEO_KAGGLE), max(tables, 0)))
        data = SyntheticClicks(cardinalities=sizes, cap=cap, alpha=alpha, batch_size=batch)
        config = RunConfig(data=data, dim=dim, split=split, exchange=exchange)
        topology = Topology(hosts=hosts, local=ranks_per_host)
        plan = plan_run(config, build_model(config), topology, num_batches=0)
        if out is not None:
            try:
                save_plan(plan, out)
            except OSError as error:
                raise InputError(f"cannot write the plan to {out}: {error.strerror}") from None
        typer.echo(plan_to_json(plan) if as_json else str(plan), nl=not as_json)


def main() -> None:
    """The program `rowmesh`."""
    app()


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """End with one sentence on stderr (of rank 0) and 2 for bad input, 130 for a signal, else 1."""
    try:
        yield
        return
    except RowmeshError as error:
        sentence, code = " ".join(str(error).split()), exit_code(error)
    except KeyboardInterrupt as error:
        sentence, code = f"stopped by {error or 'SIGINT'}", 130
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"rowmesh: {sentence}", err=True)
    raise typer.Exit(code)


def _train_rank(config: RunConfig, as_json: bool, mesh: Mesh) -> None:
    """One rank of `rowmesh train`; rank 0 prints."""
    if mesh.rank != 0:
        train(config, mesh)
    elif as_json:
        found = train(config, mesh)
        known = {k: None if v != v else v for k, v in found.items()}  # JSON has no nan
        print(json.dumps(known), flush=True)
    else:
        with _View(config, mesh) as view:
            found = train(config, mesh, on_plan=view.show_plan, on_step=view.show_step)
        view.show_result(found)


class _View:
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

    def __enter__(self) -> "_View":
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


if __name__ == "__main__":
    main()
