"""`rm.Optimizer`: one step for a sharded model's rows and its dense parameters.

It communicates, so it lives in the runtime; the rules themselves are in `rowmesh.optim`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.agreement import agree_on, attempt
from rowmesh.errors import InputError, StepError
from rowmesh.optim import SGD, MomentumScaledRowwiseAdagrad, RowwiseAdagrad, UpdateRule
from rowmesh.optim.given import check_rule, make_dense
from rowmesh.optim.groups import rule_apart
from rowmesh.placement import Plan
from rowmesh.runtime.alike import optimizer_parts
from rowmesh.runtime.dense import DenseBuckets
from rowmesh.runtime.embeddings import ShardedEngine, sharded_engines
from rowmesh.runtime.gradients import RowGradient, SparseGradients
from rowmesh.runtime.history import History
from rowmesh.runtime.replicas import Replicas
from rowmesh.runtime.squares import ColumnSquares

__all__ = ["Optimizer"]


class Optimizer(torch.optim.Optimizer):
    """Steps the tables by an exact `UpdateRule` and the dense parameters by any torch optimiser.

    ``param_groups`` are the dense optimiser's, then one named ``"sparse"`` whose ``lr`` the
    rule uses; torch's learning-rate schedulers therefore drive both.

    Args:
        model: After `rowmesh.shard`.
        dense: Makes the optimiser of the dense parameters, e.g. ``torch.optim.Adagrad`` or
            ``functools.partial(torch.optim.Adam, lr=1e-3)``.
        sparse: The rule for table rows, e.g. ``rm.RowwiseAdagrad(lr=0.05)``.

    Raises:
        InputError: On all ranks, if the model is not sharded or has an optimiser, or ``dense`` or
            ``sparse`` is something else.
        PlanError: On all ranks, if ranks have other rules, rates or settings.

    Collective:
        All ranks.
    """

    # GradScaler then calls `step` itself, having set `found_inf`: which refuses it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        *,
        dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        sparse: UpdateRule,
    ) -> None:
        buckets = _buckets_of(model)
        plan: Plan = model._rowmesh_plan  # type: ignore[assignment]
        self._mesh, self._trace = buckets.mesh, buckets.mesh.trace
        made, problem = attempt(lambda: _make(buckets, plan, dense, sparse))
        parts = None if made is None else optimizer_parts(sparse, made[0])
        way_out = "give rm.Optimizer the same rules and rates on all ranks"
        agree_on(self._mesh, parts, problem, way_out=way_out, value=None)
        assert made is not None
        (self.dense,), buckets.has_optimizer = made, True
        self._engines: list[ShardedEngine] = sharded_engines(model)
        self._rule, self._buckets, self._sync = sparse, buckets, plan.sync
        self._history = History()
        self._pending: list[list[RowGradient]] | None = None
        for engine in self._engines:
            engine.history = self._history
            for stack in engine.stacks:
                if stack.layout.trainable:
                    for weight, state in (
                        (stack.home, stack.home_state),
                        (stack.copies, stack.copies_state),
                    ):
                        state |= sparse.new_state(*weight.shape, device=weight.device)
        self._is_accumulating = self._has_dropped = False
        buckets.is_held = self._may_get_more
        self.attach()
        group = {"params": [], "lr": sparse.lr, "name": "sparse"}
        super().__init__([{**group, "params": [nn.Parameter(torch.zeros(0))]}], {"lr": sparse.lr})
        sparse_group = self.param_groups[0] | {"params": []}
        self.param_groups = [*(self.dense.param_groups if self.dense else ()), sparse_group]
        self._is_built = True

    @property
    def has_gradients(self) -> bool:
        """Whether summed gradients wait for a step: after `clip_grad_norm_`, `sum_gradients`."""
        return self._pending is not None

    def attach(self) -> None:
        """Collect gradients for the model's stacks as they are now: after rows have moved.

        Collective:
            All ranks, between steps.
        """
        self._sparse = [SparseGradients(engine) for engine in self._engines]
        self._squares = [ColumnSquares(engine) for engine in self._engines]
        self._replicas = []
        for engine in self._engines:
            adds = self._rule.adds_squares
            engine.replicas = replicas = Replicas(engine, self._sync, adds_squares=adds)
            self._replicas.append(replicas)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sum the gradients over ranks, update every touched row once, step the dense part.

        The gradients are used up: ``zero_grad()`` after it is welcome and does nothing.

        Collective:
            All ranks.
        """
        if closure is not None:
            raise InputError("rm.Optimizer.step takes no closure")
        self._check_step()
        lr = float(self.param_groups[-1]["lr"])  # a tensor may change before what follows the step
        if self._pending is None:
            self._buckets.launch()
            # Rows first: the next batch's may wait for them, and dense sums travel meanwhile.
            for number in range(len(self._engines)):
                self._step_rows(number, self._sum_rows(number, at_once=False), lr)
            self._buckets.reduce()
            for sparse, squares, replicas in zip(
                self._sparse, self._squares, self._replicas, strict=True
            ):
                parts = sparse.dense_sums()
                added: list[Tensor | None] = [None] * len(parts)
                if self._rule.adds_squares:
                    added = squares.add(parts)
                self._update(parts, added, replicas, lr)
        else:
            for number, parts in enumerate(self._pending):
                self._step_rows(number, parts, lr)
        if self.dense is not None:
            with self._trace.phase("dense update"):
                self.dense.step()
                self.dense.zero_grad(set_to_none=True)
        self._pending = None
        self._history.step(self.param_groups)

    def _step_rows(self, number: int, parts: list[RowGradient], lr: float) -> None:
        """One step of an engine's rows."""
        replicas = self._replicas[number]
        replicas.finish()  # a step may come without a forward
        self._engines[number].rest.finish()
        replicas.remember(parts)
        squares: list[Tensor | None] = [None] * len(parts)
        if self._rule.adds_squares:
            squares = replicas.add_squares(parts, self._squares[number].add(parts))
        with self._trace.phase("update"):
            self._update(parts, squares, replicas, lr)
        replicas.end_step()
        self._sparse[number].follow(
            lambda others: self._update(others, [None] * len(others), replicas, lr)
        )
        self._engines[number].end_step()

    def sync(self) -> None:
        """Make the rows and state of shard groups that step apart their mean now.

        A plan's sync does it every ``period`` steps; an evaluation in between that should see
        what a checkpoint would hold calls it first. Checkpoints and exports do.

        Collective:
            All ranks, between steps.
        """
        for engine in self._engines:
            engine.bring_together()

    def _update(
        self,
        parts: list[RowGradient],
        squares: list[Tensor | None],
        replicas: Replicas,
        lr: float,
    ) -> None:
        for part, found in zip(parts, squares, strict=True):
            if len(part.rows):
                rows, rule = part.rows.long(), rule_apart(self._rule, replicas.num_apart(part))
                rule.update(part.weight, part.state, rows, part.grad, lr, squares=found)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Make the ``grad`` of every dense parameter the sum over ranks now, not in `step`.

        Until the step it may then be changed, alike on all ranks: scaled, clipped, set to None.
        Rows of tables have no ``grad``; `clip_grad_norm_` scales both.

        Collective:
            All ranks, after the backwards of a step.
        """
        self._reduce()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients, sparse and dense, so that their joint norm is at most max_norm.

        The norm is over the summed gradients; a copied row counts once. Of shard groups that step
        apart it is the mean over groups of squares that counts. Squares are added in
        fp64 in an order that depends on the plan: equal to the oracle within 1e-6 (E1).

        Returns:
            The norm before scaling, the same on all ranks.

        Collective:
            All ranks.
        """
        pending = [part for parts in self._reduce() for part in parts]
        grads = [p.grad for p in self._buckets.parameters if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64)
        for part in pending:
            norm = part.grad[part.own].double().square().sum()
            squares += part.share * norm.to(squares.device)
        squares = self._mesh.total(squares.to(self._mesh.device))
        for grad in grads:
            squares = squares + grad.double().square().sum()
        norm = squares.sqrt().float()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in (*grads, *(part.grad for part in pending)):
            grad.mul_(scale)
        return norm

    def _check_step(self) -> None:
        """Raise if there is nothing to step with, or what there is has been scaled.

        On one rank alone the first would keep the others waiting for gradients that it dropped.
        """
        if self.has_gradients or any(sparse.has_tickets for sparse in self._sparse):
            self._has_dropped = False
        if self._has_dropped and self._mesh is not None and self._mesh.world > 1:
            raise StepError(
                "opt.step() after opt.zero_grad() dropped the gradients: call step() first, and "
                "zero_grad() after it, or neither"
            )
        if hasattr(self, "found_inf"):
            raise StepError(
                "torch's GradScaler scales losses, but gradients of tables cannot be scaled back: "
                "leave it out, and use bf16 under autocast"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all backwards that have run since the last step."""
        is_active = any(sparse.has_tickets for sparse in self._sparse)
        if is_active or self.has_gradients:
            self._history.drop()
            self._has_dropped = True
        for sparse in self._sparse:
            sparse.discard()
        for engine in self._engines:
            engine.end_step()
        self._buckets.discard(is_active=is_active)
        self._pending = None
        if self.dense is not None:
            self.dense.zero_grad(set_to_none=set_to_none)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside add up; ``step()`` afterwards makes one update of their sum.

        A rank's gradients of a row are added over its backwards first, then over ranks. Only
        the sparse gradients travel inside; the dense ones wait for the step. No backward of
        the same step may come before it.

        Raises:
            StepError: If gradients of a backward before it are on their way.
        """
        if self._pending is not None:
            raise StepError("accumulate() after gradients were summed: call step() first")
        if any(sparse.is_launched for sparse in self._sparse):
            raise StepError(
                "accumulate() after a backward outside it, whose gradients are on their way: run "
                "all backwards of a step inside"
            )
        self._set_accumulating(True)
        try:
            yield
        finally:
            self._set_accumulating(False)

    def _set_accumulating(self, value: bool) -> None:
        self._is_accumulating = value
        for engine in self._engines:
            engine.is_accumulating = value

    def _may_get_more(self) -> bool:
        """Whether dense gradients may not be final after this backward."""
        return self._is_accumulating or any(len(engine.tickets) > 1 for engine in self._engines)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible after construction: parameters are bucketed when the model is sharded."""
        if hasattr(self, "_is_built"):
            raise InputError("rm.Optimizer takes all parameters of the sharded model at once")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Dense state, and this rank's part of the sparse state (`rowmesh` saves all of it).

        Collective:
            All ranks, if shard groups step apart: their rows are averaged first (`sync`).
        """
        self.sync()
        return {
            "dense": self.dense.state_dict() if self.dense is not None else None,
            "sparse_group": {k: v for k, v in self.param_groups[-1].items() if k != "params"},
            "sparse": [
                {
                    "home": dict(stack.home_state),
                    "copies": dict(stack.copies_state),
                    "hot": stack.layout.hot_places(),
                }
                for engine in self._engines
                for stack in engine.stacks
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, under the same plan and rank.

        Collective:
            As `state_dict`.
        """
        self.sync()
        stacks = [stack for engine in self._engines for stack in engine.stacks]
        if len(stacks) != len(state_dict["sparse"]):
            raise InputError(
                f"the state has {len(state_dict['sparse'])} stacks, this model has {len(stacks)}: "
                f"it was saved under another plan"
            )
        for stack, saved in zip(stacks, state_dict["sparse"], strict=True):
            hot = stack.layout.hot_places()
            if not torch.equal(saved.get("hot", hot), hot):
                raise InputError("the state is of other hot rows: the model's tiers have changed")
            for ours, theirs in (
                (stack.home_state, saved["home"]),
                (stack.copies_state, saved["copies"]),
            ):
                if {k: v.shape for k, v in ours.items()} != {k: v.shape for k, v in theirs.items()}:
                    raise InputError("the state is of another update rule, plan or rank")
                for name, tensor in ours.items():
                    tensor.copy_(theirs[name])
        if self.dense is not None:
            self.dense.load_state_dict(state_dict["dense"])
            self.param_groups[:-1] = self.dense.param_groups
        self.param_groups[-1].update(state_dict["sparse_group"])

    def _sum_rows(self, number: int, *, at_once: bool) -> list[RowGradient]:
        """The gradients that an engine's rows are stepped with, but for those in dense sums."""
        parts = self._sparse[number].reduce(at_once=at_once)
        self._replicas[number].add_gradients(parts)
        return parts

    def _reduce(self) -> list[list[RowGradient]]:
        if self._pending is None:
            self._buckets.launch()
            self._pending = [
                self._sum_rows(number, at_once=True) for number in range(len(self._engines))
            ]
            self._buckets.reduce()
            for parts, sparse in zip(self._pending, self._sparse, strict=True):
                parts += sparse.dense_sums()
        return self._pending


def _buckets_of(model: nn.Module) -> DenseBuckets:
    """Of a sharded model."""
    found = {path: getattr(m, "_rowmesh_dense", None) for path, m in model.named_modules()}
    buckets = found.pop("", None)
    if isinstance(buckets, DenseBuckets):
        return buckets
    inner = next((path for path, b in found.items() if isinstance(b, DenseBuckets)), None)
    if inner is not None:
        raise InputError(f"rm.Optimizer takes the model that was sharded: give it .{inner}")
    raise InputError("rm.Optimizer takes a sharded model: call rm.shard(model, plan, mesh)")


def _make(
    buckets: DenseBuckets, plan: Plan, dense: Any, sparse: Any
) -> tuple[torch.optim.Optimizer | None]:
    """The optimiser of the layers, if all that was given is right."""
    if buckets.has_optimizer:
        raise InputError("this model has an rm.Optimizer already: one steps all its tables")
    check_rule(sparse)
    if plan.has_replicas and plan.sync.mode == "moments-first" and not _is_rowwise(sparse):
        raise InputError(
            f"sync 'moments-first' sums the squares of rows: it goes with row-wise AdaGrad "
            f"or SGD, not with {type(sparse).__name__}; use 'gradients' or 'weights'"
        )
    return (make_dense(dense, buckets.parameters),)


def _is_rowwise(rule: UpdateRule) -> bool:
    return isinstance(rule, RowwiseAdagrad | MomentumScaledRowwiseAdagrad | SGD)
