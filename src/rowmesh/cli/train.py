"""`rowmesh train`."""

import functools
import json
from typing import Annotated

import typer

from rowmesh.cli.terminal import Alpha, Batch, Dim, Exchange, Split, one_sentence
from rowmesh.cli.view import View
from rowmesh.comm.mesh import Mesh
from rowmesh.data import SyntheticClicks
from rowmesh.topology import Topology
from rowmesh.train.launch import launch
from rowmesh.train.trainer import RunConfig, build_model, plan_run, train

__all__ = ["train_command"]

_DEFAULT = RunConfig()


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
    with one_sentence():
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


def _train_rank(config: RunConfig, as_json: bool, mesh: Mesh) -> None:
    """One rank of `rowmesh train`; rank 0 prints."""
    if mesh.rank != 0:
        train(config, mesh)
    elif as_json:
        found = train(config, mesh)
        known = {k: None if v != v else v for k, v in found.items()}  # JSON has no nan
        print(json.dumps(known), flush=True)
    else:
        with View(config, mesh) as view:
            found = train(config, mesh, on_plan=view.show_plan, on_step=view.show_step)
        view.show_result(found)
