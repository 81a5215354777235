"""`rowmesh train`."""

import contextlib
import functools
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rowmesh.cli.terminal import AllTables, Ranks, Recipe, Settings, one_sentence, with_options
from rowmesh.cli.view import View
from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, check_range
from rowmesh.extras import require_extra
from rowmesh.placement.text import MAX_TABLES
from rowmesh.topology import Topology
from rowmesh.trace.table import format_summary
from rowmesh.train.board import open_board
from rowmesh.train.checkpoint import Checkpoints
from rowmesh.train.config import RunConfig
from rowmesh.train.folder import MetricsFile, RunFolder, without_nan
from rowmesh.train.launch import launch
from rowmesh.train.model import build_model
from rowmesh.train.planning import check_plan
from rowmesh.train.recipes import load_recipe
from rowmesh.train.restarts import earlier_folder, remember_folder
from rowmesh.train.stop import Stop
from rowmesh.train.tracing import Tracing, check_trace_file
from rowmesh.train.trainer import Listener, Trainer

__all__ = ["train_command"]


_DEFAULT = "demo"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """What the command line asked for; every rank reads the recipe itself."""

    recipe: str | None
    settings: tuple[str, ...]
    path: Path | None
    resume: bool
    as_json: bool
    every_table: bool
    trace: Path | None
    trace_steps: int

    def config(self) -> RunConfig:
        """The run's config."""
        if self.resume:
            assert self.path is not None
            return RunFolder(self.path).load_config(self.settings, data_from=self.recipe)
        return load_recipe(self.recipe or _DEFAULT, self.settings)

    def folder(self) -> RunFolder:
        """The run's folder, which a new run must not find in use."""
        name = Path(self.recipe or _DEFAULT).stem
        folder = RunFolder(self.path) if self.path else RunFolder.named(name)
        if not self.resume:
            folder.check_free()
        return folder

    def place(self) -> tuple[Path, bool]:
        """The run's folder, and whether to go on from a checkpoint there; for rank 0.

        A restart by torchrun goes on where it can, and begins anew where nothing was saved.
        """
        earlier = earlier_folder()
        if earlier is None:
            return self.folder().path, self.resume
        return earlier, self.resume or Checkpoints(
            RunFolder(earlier).checkpoints
        ).latest() is not None


def train_command(
    recipe: Recipe = None,
    ranks: Ranks = None,
    settings: Settings = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; default runs/RECIPE-TIME."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in --folder from its last checkpoint."),
    ] = False,
    plan: Annotated[
        Path | None, typer.Option(help="Use this plan.json: short for --set plan.file=FILE.")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(help="Speeds from rowmesh calibrate: short for --set plan.topology=FILE."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object, nothing else.")
    ] = False,
    every_table: AllTables = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome trace of some steps of all ranks here, and print its table."
        ),
    ] = None,
    trace_steps: Annotated[
        int | None, typer.Option(help="How many steps to trace, after the first five; default 10.")
    ] = None,
) -> None:
    """Train the model of a recipe and evaluate it on held-out data.

    RECIPE is a TOML file, a Python file with a function recipe() -> RunConfig, or the name of a
    recipe that comes with rowmesh: demo (the default; synthetic clicks whose truth is known,
    about a minute on two ranks), clicks (Parquet files: --set data.path=FOLDER), dcn, sequences
    and movietweetings (next items: --set data.path=FILE), or drift (synthetic sequences).

    The run folder gets config.json, plan.json, metrics.jsonl and, with --set checkpoint.every=N,
    checkpoints; where TensorBoard is installed it is written for too. --resume takes the stored
    config, on any number of ranks; --set may then change training, checkpoint, plan, data.path,
    learning rates and their schedule. Data that a Python recipe makes needs that RECIPE again: a
    stored config runs no code.

    Ctrl-C or SIGTERM stops all ranks after the same step, with a checkpoint if the run saves any;
    a second one ends them at once. Exit code 0: done; 2: bad input; 130: stopped; else 1.

    Under torchrun, on one host or many: torchrun --nproc-per-node 2 -m rowmesh.cli train. Its
    --max-restarts goes on from the last checkpoint.
    """
    with one_sentence():
        if resume and (folder is None or not (recipe is None or recipe.endswith(".py"))):
            raise InputError("--resume takes the run's own config: give --folder FOLDER, no RECIPE")
        order = _Order(
            recipe=recipe,
            settings=with_options(settings, {"file": plan, "topology": topology}),
            path=folder,
            resume=resume,
            as_json=as_json,
            every_table=every_table,
            trace=trace,
            trace_steps=10 if trace_steps is None else trace_steps,
        )
        _check_trace(order, has_steps=trace_steps is not None)
        config = order.config()  # fail before ranks start
        config.training.num_steps(config.data)
        if config.training.tensorboard is True and os.environ.get("RANK", "0") == "0":
            require_extra("tensorboard", "torch.utils.tensorboard")
        if "WORLD_SIZE" not in os.environ:  # else the ranks are there, and plan at once
            order.folder()
            model = build_model(config.model, config.data, seed=config.seed)
            check_plan(config.plan, model, Topology(local=max(ranks or 1, 1)))
        launch(functools.partial(_train_rank, order), ranks=ranks)


def _train_rank(order: _Order, mesh: Mesh) -> None:
    """One rank of `rowmesh train`; rank 0 prints and writes."""
    config = order.config()
    path, resumes = on_rank_0(mesh, order.place)
    folder = RunFolder(path)
    with Stop(mesh) as stop, contextlib.ExitStack() as closing:

        def lock() -> None:
            closing.enter_context(folder.lock())
            remember_folder(folder.path)

        def begin() -> None:
            if not resumes:
                lock()
            folder.write(config, trainer.plan)

        if resumes:
            on_rank_0(mesh, lock)
        trainer = Trainer(config, mesh, folder=folder, resume=resumes)
        on_rank_0(mesh, begin)
        view = None
        listeners: list[Listener] = []
        if mesh.rank == 0:
            listeners += _writers(config, folder, trainer, closing)
        if mesh.rank == 0 and not order.as_json:
            view = closing.enter_context(
                View(
                    num_steps=trainer.num_steps,
                    world=mesh.world,
                    first_step=trainer.start,
                    stop=stop,
                    rule=config.optimiser.sparse,
                    max_tables=None if order.every_table else MAX_TABLES,
                )
            )
            listeners.append(view)
            if trainer.start == trainer.num_steps:
                view.say(
                    f"the run is at step {trainer.start}, its last: --set training.steps=N with "
                    f"more steps trains on"
                )
        tracing = _tracing(order, trainer)
        found = trainer.run(listeners=listeners, stop=stop, tracing=tracing)
        reasons = mesh.gather_objects(stop.reason) if found["is_stopped"] else []
    if tracing is not None and tracing.summary is not None:
        found["trace"] = tracing.summary.to_dict()
    if view is not None:
        view.show_result(found)
        if tracing is not None:
            view.say(_traced(tracing))
        view.say(_epilogue(found, folder))
    elif mesh.rank == 0:
        print(json.dumps(without_nan(found | {"run": str(folder.path)})), flush=True)
    if reasons:
        raise KeyboardInterrupt(next(reason for reason in reasons if reason))


def _check_trace(order: _Order, *, has_steps: bool) -> None:
    """Fail before ranks start; under torchrun the file is rank 0's, which checks it later."""
    check_range("--trace-steps", order.trace_steps, 1)
    if has_steps and order.trace is None:
        raise InputError("--trace-steps says how long a trace is: give --trace FILE too")
    if order.trace is not None and "WORLD_SIZE" not in os.environ:
        check_trace_file(order.trace)


def _tracing(order: _Order, trainer: Trainer) -> Tracing | None:
    """Of the steps after the first five; a short run is traced from nearer its beginning."""
    if order.trace is None:
        return None
    spare = trainer.num_steps - trainer.start - order.trace_steps
    skip = min(5, max(spare, 0))
    return Tracing(trainer.mesh, order.trace, num_steps=order.trace_steps, skip=skip)


def _traced(tracing: Tracing) -> str:
    if tracing.summary is None:
        return "no step was traced: the run ended before"
    where = f"the trace is in {tracing.path}: open it in ui.perfetto.dev or chrome://tracing"
    return f"\n{format_summary(tracing.summary)}\n\n{where}"


def _writers(
    config: RunConfig, folder: RunFolder, trainer: Trainer, closing: contextlib.ExitStack
) -> list[Listener]:
    every, start = config.training.log_every, trainer.start
    metrics = MetricsFile(folder.metrics, log_every=every, after=start)
    closing.callback(metrics.close)
    found: list[Listener] = [metrics]
    if config.training.tensorboard:
        board = open_board(
            folder.tensorboard, log_every=every, rule=config.optimiser.sparse, after=start
        )
        if board is not None:
            closing.callback(board.close)
            found.append(board)
    return found


def _epilogue(found: dict[str, Any], folder: RunFolder) -> str:
    where = f"this run is in {folder.path}"
    if not found["is_stopped"]:
        return where
    if found["saved_step"] is None:
        return f"stopped after step {found['steps']}, without a checkpoint; {where}"
    return (
        f"stopped after step {found['steps']}, saved after step {found['saved_step']}: continue "
        f"with rowmesh train --folder {shlex.quote(str(folder.path))} --resume"
    )
