"""`rowmesh plan`."""

import itertools
from pathlib import Path
from typing import Annotated

import typer

from rowmesh.cli.terminal import Alpha, Batch, Dim, Exchange, Split, one_sentence
from rowmesh.data import CRITEO_KAGGLE, SyntheticClicks
from rowmesh.errors import InputError
from rowmesh.placement import save_plan
from rowmesh.placement.document import plan_to_json
from rowmesh.topology import Topology
from rowmesh.train.trainer import RunConfig, build_model, plan_run

__all__ = ["plan_command"]

_DEFAULT = RunConfig()


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
    with one_sentence():
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
