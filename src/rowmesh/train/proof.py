"""`rm.verify` for a recipe, or for a model that a function of the user's makes."""

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.comm.status import sentence_of
from rowmesh.errors import InputError
from rowmesh.planners import make_plan
from rowmesh.runtime.verify import Verification, verify
from rowmesh.train.config import RunConfig
from rowmesh.train.forecast import plan_of
from rowmesh.train.inputs import checked
from rowmesh.train.model import build_model
from rowmesh.train.optimiser import OptimiserConfig
from rowmesh.train.planning import measured, read_plan

__all__ = ["Verification", "is_model_name", "verify_model", "verify_recipe"]


def is_model_name(target: str) -> bool:
    """Whether ``target`` is ``module:function`` and not a file."""
    return ":" in target and not Path(target).is_file()


def verify_recipe(config: RunConfig, mesh: Mesh, *, num_steps: int) -> Verification:
    """`verify` with the recipe's model, plan, optimiser and first batches.

    Collective:
        All ranks.
    """
    source, settings = config.data, config.optimiser

    def make_model() -> nn.Module:
        return build_model(config.model, source, seed=config.seed, device=mesh.device)

    topology = measured(mesh)
    plan = on_rank_0(mesh, lambda: plan_of(config, make_model(), topology))
    batches = checked(
        source.batches(rank=mesh.rank, world=mesh.world),
        num_dense=source.num_dense,
        first_step=1,
        device=mesh.device,
        what="step",
    )
    chosen = list(itertools.islice(batches, num_steps))
    return verify(make_model, plan, mesh, chosen, dense=settings.make_dense, sparse=settings.rule)


def verify_model(name: str, mesh: Mesh, *, plan_file: str | None, num_steps: int) -> Verification:
    """`verify` with what ``module:function`` makes, AdaGrad on layers and, by row, on tables.

    Raises:
        InputError: If the function is not there, or does not return (make_model, batches).

    Collective:
        All ranks.
    """
    make_model, make_batches = _import_case(name)
    batches = list(itertools.islice(make_batches(mesh.rank, mesh.world), num_steps))
    if plan_file is None:
        plan = on_rank_0(mesh, lambda: make_plan(make_model(), mesh.topology))
    else:
        plan = on_rank_0(mesh, lambda: read_plan(plan_file, mesh.topology))
    settings = OptimiserConfig()
    return verify(make_model, plan, mesh, batches, dense=settings.make_dense, sparse=settings.rule)


def _import_case(
    name: str,
) -> tuple[Callable[[], nn.Module], Callable[[int, int], Iterable[Any]]]:
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
        found = make()
    except Exception as error:
        raise InputError(f"cannot call {name}: {sentence_of(error)}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and all(map(callable, found))):
        raise InputError(
            f"{name} must return two callables, make_model() and batches(rank, world), got "
            f"{found!r}"
        )
    make_model, make_batches = found
    return make_model, make_batches
