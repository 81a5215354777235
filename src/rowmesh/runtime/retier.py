"""`change_tiers`: other hot rows for a sharded model, between two steps."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rowmesh.comm.agreement import agree_on, attempt
from rowmesh.errors import PlanError, StepError
from rowmesh.nn.collections import Collection
from rowmesh.placement import Plan
from rowmesh.placement.diff import describe_plan
from rowmesh.runtime.copies import make_riders, refresh_copies, refresh_homes
from rowmesh.runtime.dense import DenseBuckets
from rowmesh.runtime.embeddings import ShardedEngine, sharded_engines
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.places import DENSE_SUMS
from rowmesh.runtime.regions import Place
from rowmesh.runtime.shard import ONE_PLAN, check_executable, make_stack
from rowmesh.runtime.stacks import lay_out
from rowmesh.runtime.tickets import Stack

__all__ = ["change_tiers"]


@torch.no_grad()
def change_tiers(model: nn.Module, plan: Plan, *, optimizer: Optimizer) -> None:
    """Copy the hot rows of ``plan`` instead of those the model has copies of now.

    Copies go home, with their optimiser state, and rows that are hot now are copied from there
    (edge ``tier move``): no bit of a row changes.

    Args:
        model: Sharded, between ``optimizer.step()`` and the next forward.
        plan: The model's, with other hot rows.
        optimizer: The model's.

    Raises:
        PlanError: On all ranks, if the plan differs in more than hot rows, is invalid, or is not
            the same on all ranks.
        StepError: On all ranks, if gradients wait for a step.

    Collective:
        All ranks, with the same plan.
    """
    buckets = getattr(model, "_rowmesh_dense", None)
    if not isinstance(buckets, DenseBuckets):
        raise PlanError("change_tiers takes a sharded model: call rm.shard(model, plan, mesh)")
    engines = sharded_engines(model)
    parts, problem = attempt(lambda: _check(model, engines, plan, optimizer))
    agree_on(buckets.mesh, parts, problem, way_out=ONE_PLAN, value=None)
    collections = [m for m in model.modules() if vars(m).get("engine") in engines]
    for module, engine in zip(collections, engines, strict=True):
        assert isinstance(module, Collection)
        refresh_homes(engine)
        plans = [plan.table(config.name) for config in module.configs()]
        mesh = engine.mesh
        layouts = lay_out(
            plans,
            [plan.groups(table) for table in plans],
            module.readers,
            topology=mesh.topology,
            rank=mesh.rank,
            device=mesh.device,
        )
        engine.set_stacks([_move(engine, make_stack(layout, mesh)) for layout in layouts])
    own, riders = ([r for e in engines for r in make_riders(e, sums)] for sums in DENSE_SUMS)
    buckets.set_riders(riders, own)
    optimizer.attach()
    for engine in engines:
        refresh_copies(engine)
    model._rowmesh_plan = plan  # type: ignore[assignment]


def _check(
    model: nn.Module, engines: Sequence[ShardedEngine], plan: Plan, optimizer: Optimizer
) -> dict[str, str]:
    """The plan in words, if tiers can change to it now."""
    plan.validate()
    before: Plan = model._rowmesh_plan  # type: ignore[assignment]
    if _without_hot_rows(before) != _without_hot_rows(plan):
        raise PlanError("the plan differs from the model's in more than hot rows: shard it anew")
    check_executable(plan)
    if optimizer.has_gradients or any(engine.tickets for engine in engines):
        raise StepError(
            "tiers change between steps: a forward or its gradients wait, so run backward and "
            "opt.step() first"
        )
    return describe_plan(plan)


def _without_hot_rows(plan: Plan) -> Plan:
    return replace(plan.without_hot_rows(), predicted=type(plan.predicted)())


def _move(engine: ShardedEngine, stack: Stack) -> Stack:
    """The new stack with the rows of the old ones, and state as theirs; no copies yet."""
    layout = stack.layout
    like = next(
        old
        for old in engine.stacks
        if old.layout.dim == layout.dim and set(old.layout.tables) & set(layout.tables)
    )
    stack.home_state = _states(like.home_state, len(stack.home))
    stack.copies_state = _states(like.copies_state, len(stack.copies))
    before = {_key(place): place for old in engine.stacks for place in _places(engine, old)}
    for place in _places(engine, stack):
        for new, old in zip(_tensors(place), _tensors(before[_key(place)]), strict=True):
            new.copy_(old)
    return stack


def _places(engine: ShardedEngine, stack: Stack) -> list[Place]:
    """This rank's home rows, and rows of tables that are copied whole."""
    home = [Place(stack, r, False) for r in stack.layout.home if r.rank == engine.mesh.rank]
    return home + [Place(stack, r, True) for r in stack.layout.copied]


def _key(place: Place) -> tuple[int, tuple[int, int], int]:
    return place.region.table, place.region.columns, place.region.owner


def _tensors(place: Place) -> list[Tensor]:
    stack = place.stack
    states = stack.copies_state if place.is_copied else stack.home_state
    return [place.weight, *(place.of(state) for state in states.values())]


def _states(like: dict[str, Tensor], num_rows: int) -> dict[str, Tensor]:
    return {name: state.new_zeros((num_rows, *state.shape[1:])) for name, state in like.items()}
