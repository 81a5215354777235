"""`rm.verify`: prove on the user's own model and batches that the sharded model is the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.mesh import Mesh
from rowmesh.comm.status import sentence_of
from rowmesh.errors import PlanError, RowmeshError
from rowmesh.optim import UpdateRule
from rowmesh.placement import Exactness, Plan, Sync
from rowmesh.runtime.export import full_sparse_state, full_state_dict
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.oracle import Loss, Oracle, run_model
from rowmesh.runtime.regions import named_tables
from rowmesh.runtime.shard import shard
from rowmesh.tables import uncompiled

__all__ = ["Difference", "Verification", "first_difference", "verify"]

E1_TOLERANCE = 1e-4
"""Largest |difference| of an E1 plan, relative to max(1, |value|)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where sharded and oracle values differ by more than allowed."""

    what: str
    place: tuple[int, ...]
    sharded: float
    oracle: float

    def __str__(self) -> str:
        names = ("row", "column")[: len(self.place)]
        where = "".join(f", {n} {i}" for n, i in zip(names, self.place, strict=False))
        return f"{self.what}{where}: {self.sharded!r} sharded, {self.oracle!r} by the oracle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What `verify` found."""

    exactness: Exactness
    is_bitwise: bool
    num_steps: int
    num_tensors: int
    difference: Difference | None

    @property
    def is_equal(self) -> bool:
        """Whether the plan kept its promise."""
        return self.difference is None

    def __str__(self) -> str:
        how = "bit-equal" if self.is_bitwise else f"within {E1_TOLERANCE}"
        if self.difference is None:
            return (
                f"verified: {self.num_steps} steps, {self.num_tensors} tensors {how} "
                f"({self.exactness})"
            )
        return f"NOT equal after {self.num_steps} steps ({self.exactness}): {self.difference}"


def first_difference(
    what: str, sharded: Tensor, oracle: Tensor, *, tolerance: float
) -> Difference | None:
    """The first entry with |a - b| > tolerance * max(1, |b|); at 0 every unequal value counts."""
    bound = tolerance * oracle.double().abs().clamp(min=1.0)
    same = (sharded == oracle) | (sharded.isnan() & oracle.isnan())
    wrong = ~(same | ((sharded.double() - oracle.double()).abs() <= bound))
    if not bool(wrong.any()):
        return None
    place = tuple(int(i) for i in wrong.nonzero()[0])
    return Difference(
        what=what, place=place, sharded=float(sharded[place]), oracle=float(oracle[place])
    )


def verify(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    mesh: Mesh,
    batches: Sequence[Any],
    *,
    dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    sparse: UpdateRule,
    loss: Loss | None = None,
    is_mean: bool = False,
) -> Verification:
    """Train a few steps sharded and by the oracle, and compare losses, weights and states.

    Args:
        make_model: Builds the model anew, with the same values each time on every rank.
        plan: Of exactness E0 (bitwise) or E1 (within 1e-4); or E2, whose oracle holds a copy of
            the tables for every shard group and averages them when the plan does (bitwise).
        mesh: Of the plan.
        batches: This rank's batch of every step.
        dense: As for `rowmesh.Optimizer`.
        sparse: As for `rowmesh.Optimizer`.
        loss: Of the model and a batch: one loss per sample, which ``model(batch)`` gives if this
            is not given.
        is_mean: It is one number instead, the mean, as for `Mesh.mean`.

    Returns:
        The same on all ranks.

    Collective:
        All ranks. The oracle holds the whole model in rank 0's memory.
    """
    if plan.exactness not in (Exactness.E0, Exactness.E1, Exactness.E2):
        raise PlanError(
            f"verify compares E0, E1 and E2 plans; this one is {plan.exactness}: leave out its "
            f"codecs and towers"
        )
    model = shard(make_model(), plan, mesh)
    optimizer = Optimizer(model, dense=dense, sparse=sparse)
    losses = []
    for batch in batches:
        found = (loss or run_model)(model, batch)
        mesh.mean(found, is_mean=is_mean).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.detach())
    everyone = mesh.gather_objects((list(batches), losses))
    tables, states = full_state_dict(model), full_sparse_state(model)
    outcome: Verification | str | None = None
    if mesh.rank == 0:
        try:
            settings: dict[str, Any] = {"loss": loss, "is_mean": is_mean}
            oracle = Oracle(make_model(), dense=dense, sparse=sparse, plan=plan, **settings)
            outcome = _compare(oracle, plan, everyone, tables, states)
        except Exception as error:  # every rank must hear of it
            outcome = f"the oracle failed on rank 0: {sentence_of(error)}"
    result = mesh.gather_objects(outcome)[0]
    if not isinstance(result, Verification):
        raise RowmeshError(str(result))
    return result


def _is_rounded(plan: Plan) -> bool:
    """Whether any table's sums are made in another order, as of E1 plans."""
    return replace(plan, sync=Sync()).exactness is Exactness.E1


def _compare(
    oracle: Oracle,
    plan: Plan,
    everyone: Sequence[tuple[Sequence[Any], Sequence[Tensor]]],
    tables: dict[str, Tensor],
    states: dict[str, dict[str, Tensor]],
) -> Verification:
    tolerance = E1_TOLERANCE if _is_rounded(plan) else 0.0
    pairs: list[tuple[str, Tensor, Tensor]] = []
    num_steps = len(everyone[0][0])
    for step in range(num_steps):
        expected = oracle.step([batches[step] for batches, _ in everyone])
        for rank, (_, losses) in enumerate(everyone):
            pairs.append((f"losses of rank {rank}, step {step}", losses[step], expected[rank]))
    oracle.sync()
    whole = uncompiled(oracle.model).state_dict()
    named = {k: f"table {t.config.name!r}" for t in named_tables(oracle.model) for k in t.keys}
    pairs += [(named.get(k, f"parameter {k!r}"), tables[k], whole[k]) for k in whole]
    for name, state in states.items():
        pairs += [
            (f"state {key!r} of table {name!r}", value, oracle.states[name][key])
            for key, value in state.items()
        ]
    found = (first_difference(n, a, b, tolerance=tolerance) for n, a, b in pairs)
    return Verification(
        exactness=plan.exactness,
        is_bitwise=not _is_rounded(plan),
        num_steps=num_steps,
        num_tensors=len(pairs),
        difference=next((d for d in found if d is not None), None),
    )
