"""`rowmesh calibrate`."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rowmesh.cli.terminal import Ranks, Recipe, Settings, one_sentence
from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, save_calibration
from rowmesh.files import check_target
from rowmesh.train.calibrate import calibrate
from rowmesh.train.launch import launch
from rowmesh.train.recipes import load_recipe

__all__ = ["calibrate_command"]


def calibrate_command(
    recipe: Recipe = None,
    ranks: Ranks = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Where to write what was found.")] = Path(
        "topology.json"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print it as one JSON object, nothing else.")
    ] = False,
) -> None:
    """Measure how fast this cluster is, and write it to topology.json for planner and forecasts.

    Latency and bandwidth inside and across hosts, by the exchanges that training uses; the cost
    of lookups and updates of rows by dim; a step of the recipe's dense layers. All ranks measure
    at once, as they train at once. It takes about a minute; let nothing else run.

    Start it on the hosts and ranks that will train: rowmesh calibrate --ranks 2, under torchrun,
    or in a lab: rowmesh lab run --hosts 2 --rate 1gbit -- rowmesh calibrate. Then say rowmesh train
    --topology topology.json, or rowmesh plan --topology topology.json.
    """
    with one_sentence():
        name = "demo" if recipe is None else recipe
        config = load_recipe(name, tuple(settings or ()))  # fail before ranks start
        config.training.num_steps(config.data)
        way_out = "give --out a file in a folder that exists"
        check_target(out, what="the calibration", way_out=way_out)
        chosen = tuple(settings or ())
        launch(functools.partial(_calibrate_rank, name, chosen, out, as_json), ranks=ranks)


def _calibrate_rank(
    recipe: str, settings: tuple[str, ...], out: Path, as_json: bool, mesh: Mesh
) -> None:
    def say(stage: str) -> None:
        if mesh.rank == 0:
            print(f"measuring {stage}", file=sys.stderr, flush=True)

    found = calibrate(load_recipe(recipe, settings), mesh, on_stage=say)
    on_rank_0(mesh, lambda: save_calibration(found, out))
    if mesh.rank == 0:
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(found)))
        else:
            _show(found, out)


def _show(found: Calibration, out: Path) -> None:
    topology, rates = found.topology, found.rates
    console = Console(highlight=False, width=100)
    console.print(f"{topology.hosts} hosts x {topology.local} ranks", markup=False)
    for there, name, latency, rate in (
        (topology.local > 1, "inside hosts", rates.host_latency_s, rates.host_bytes_per_s),
        (topology.hosts > 1, "across hosts", rates.cross_latency_s, rates.cross_bytes_per_s),
    ):
        if there:
            of = "a rank" if name == "inside hosts" else "a host"
            console.print(
                f"{name}: latency {latency * 1e6:,.0f} us, {rate / 1e6:,.1f} MB/s out of {of}",
                markup=False,
            )
    table = Table(box=None, pad_edge=False)
    heads = ("ns for each", "id", "row read", "row updated", "id, pooled", "row, pooled")
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    for cost in rates.rows:
        numbers = (cost.id_s, cost.lookup_s, cost.update_s, cost.bag_id_s, cost.bag_update_s)
        table.add_row(f"dim {cost.dim}", *(f"{number * 1e9:.0f}" for number in numbers))
    console.print(table, markup=False)
    if rates.dense is not None:
        dense = rates.dense
        console.print(
            f"dense layers: forward {dense.forward_s * 1e3:.1f} ms, backward "
            f"{dense.backward_s * 1e3:.1f}, step {dense.step_s * 1e3:.1f}; "
            f"{dense.flops / (dense.forward_s + dense.backward_s) / 1e9:.1f} Gflop/s a rank",
            markup=False,
        )
    console.print(f"written to {out}", markup=False)
