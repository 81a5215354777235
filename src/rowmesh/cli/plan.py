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
from rowmesh.train.model import ModelConfig, build_model
from rowmesh.train.planning import PlanConfig, plan_run

__all__ = ["plan_command"]

_DATA, _PLAN = SyntheticClicks(), PlanConfig()


def plan_command(
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 1,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks (devices) on each host.")] = 2,
    tables: Annotated[
        int, typer.Option(help="Number of tables; beyond 26 Criteo's sizes repeat.")
    ] = len(CRITEO_KAGGLE),
    batch: Batch = _DATA.batch_size,
    dim: Dim = 64,
    cap: Annotated[int | None, typer.Option(help="Most rows of a table; default no limit.")] = None,
    alpha: Alpha = _DATA.alpha,
    split: Split = _PLAN.split,
    exchange: Exchange = _PLAN.exchange,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file as JSON.")] = None,
) -> None:
    """Print the plan for a cluster, without any cluster: tables of Criteo's sizes, Zipf ids."""
    with one_sentence():
        sizes = tuple(itertools.islice(itertools.cycle(CRITEO_KAGGLE), max(tables, 0)))
        data = SyntheticClicks(cardinalities=sizes, cap=cap, alpha=alpha, batch_size=batch)
        config = PlanConfig(split=split, exchange=exchange, batches=0)
        topology = Topology(hosts=hosts, local=ranks_per_host)
        model = build_model(ModelConfig(dim=dim), data, seed=0)
        plan = plan_run(config, model, data, topology)
        if out is not None:
            try:
                save_plan(plan, out)
            except OSError as error:
                raise InputError(f"cannot write the plan to {out}: {error.strerror}") from None
        typer.echo(plan_to_json(plan) if as_json else str(plan), nl=not as_json)
