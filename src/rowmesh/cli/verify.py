"""`rowmesh verify`."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from rowmesh.cli.terminal import Ranks, Settings, one_sentence, say, with_options
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError
from rowmesh.train.launch import launch
from rowmesh.train.proof import Verification, is_model_name, verify_model, verify_recipe
from rowmesh.train.recipes import load_recipe

__all__ = ["verify_command"]


def verify_command(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe, or module:function.")
    ],
    plan: Annotated[
        Path | None, typer.Option(help="The plan.json to verify; default the planner's.")
    ] = None,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(help="Training steps to compare.")] = 3,
    settings: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as one JSON object, nothing else.")
    ] = False,
) -> None:
    """Prove that the sharded model is the model: train a few steps both ways and compare.

    Losses, weights and optimiser states must equal the unsharded model's: bit for bit if the plan
    is E0, within a tolerance if it is E1. The first difference is told by table, row and column.
    The whole model is held once more in the memory of rank 0.

    MODEL is module:function, found from the current folder. function() returns two callables:
    make_model(), which builds the model anew with the same values each time, its forward(batch)
    giving a loss per sample; and batches(rank, world), that rank's batches.

    Exit code 0: equal; 1: not equal, or a failure; 2: bad input.
    """
    with one_sentence():
        if steps < 1:
            raise InputError(f"steps is {steps}, but must be at least 1")
        chosen = with_options(settings, {"file": plan})
        if not is_model_name(target):
            config = load_recipe(target, chosen)  # fail before ranks start
            config.training.num_steps(config.data)
        elif settings:
            raise InputError(f"--set changes recipes, but {target} is a model: leave it out")
        file = None if plan is None else str(plan)
        found = launch(functools.partial(_verify_rank, target, file, chosen, steps), ranks=ranks)
    if os.environ.get("RANK", "0") == "0":
        document = dataclasses.asdict(found) | {"is_equal": found.is_equal}
        say(json.dumps(document) if as_json else str(found))
    if not found.is_equal:
        raise typer.Exit(1)


def _verify_rank(
    target: str, plan_file: str | None, settings: tuple[str, ...], steps: int, mesh: Mesh
) -> Verification:
    if is_model_name(target):
        return verify_model(target, mesh, plan_file=plan_file, num_steps=steps)
    return verify_recipe(load_recipe(target, settings), mesh, num_steps=steps)
