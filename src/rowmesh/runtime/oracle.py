"""The oracle: the unsharded model in one process, run as W virtual ranks.

The batch is cut as the ranks got it; forward and backward run per part; a row's gradients are
added in sample order within a part, then over parts in the plan's sum tree; with shard groups
whose gradients are summed, over the parts of each group and then over groups. What a plan of
exactness E0 does on W real ranks must equal this to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowmesh.comm.mesh import share_of_mean
from rowmesh.errors import InputError
from rowmesh.nn.collections import Collection
from rowmesh.nn.init import fill_table
from rowmesh.nn.kernels import coalesce
from rowmesh.nn.local import LocalEngine, Sink
from rowmesh.optim import UpdateRule
from rowmesh.optim.groups import mean_of_groups, rule_apart
from rowmesh.optim.squares import mean_squares
from rowmesh.placement import Copies, Groups, Plan, Sync, hot_ids
from rowmesh.runtime.adopt import adopt_collections
from rowmesh.tables import dense_parameters, named_collections

__all__ = ["Loss", "Oracle", "materialise", "run_model"]

Loss = Callable[[nn.Module, Any], Tensor]


def run_model(model: nn.Module, batch: Any) -> Tensor:
    """What ``model`` returns: one loss per sample."""
    found: Tensor = model(batch)
    return found


@torch.no_grad()
def materialise(model: nn.Module, *, device: torch.device | str = "cpu") -> nn.Module:
    """Give collections built on ``meta`` their initial values, the ones sharding would give."""
    for _, module, configs in named_collections(model):
        assert isinstance(module, Collection)
        for config in configs:
            table = module.table_modules()[config.name]
            weight = table.weight
            if weight.device.type == "meta":
                values = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                fill_table(values, config, seed=module.seed)
                table.weight = nn.Parameter(values, requires_grad=weight.requires_grad)
    return model


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Gradients of one table from one forward of one part."""

    table: str
    part: int
    forward: int
    rows: Tensor
    sums: Tensor


@dataclass(slots=True)
class _Step:
    """One update of distinct rows of a table, in the copies of these groups."""

    table: str
    views: Sequence[int]
    rule: UpdateRule
    rows: Tensor
    grad: Tensor
    weight: float = 1.0  # of its squares in a norm
    squares: Tensor | None = None


class Oracle:
    """Trains ``model`` as ``world`` virtual ranks would.

    With a plan whose shard groups step apart it holds a copy of the tables for every group: what
    ranks do under that plan, whatever its exactness, must equal this to the bit.

    Args:
        model: Unsharded. Tables on ``meta`` get their initial values.
        dense: As for `rowmesh.Optimizer`.
        sparse: As for `rowmesh.Optimizer`.
        span: `Plan.span`: so many parts, next to each other, are added up first; default all.
        plan: Whose shard groups, sync and span to follow, instead of ``span``.
        loss: Of the model and a batch: one loss per sample, which ``model(batch)`` gives if this
            is not given.
        is_mean: It is one number instead, the mean, as for `Mesh.mean`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        sparse: UpdateRule,
        span: int | None = None,
        plan: Plan | None = None,
        loss: Loss | None = None,
        is_mean: bool = False,
    ) -> None:
        self._loss = loss or run_model
        self._is_mean = is_mean
        self._num_samples: int | None = None  # of the last forward of a collection
        self._span = span if plan is None else plan.span
        self.model = materialise(adopt_collections(model))
        self.rule = sparse
        self.parameters = [p for p in dense_parameters(self.model) if p.requires_grad]
        self.dense = dense(self.parameters) if self.parameters else None
        self._arrived: list[_Arrival] = []
        self._part, self._forwards, self._num_steps = 0, 0, 0
        self._apart: dict[str, list[Tensor]] = {}  # rows that groups stepped since the last sync
        self._names: list[list[str]] = []
        self._engines: list[LocalEngine] = []
        for _, module, configs in named_collections(self.model):
            engine = module.engine
            if not isinstance(engine, LocalEngine):
                raise InputError("the oracle needs the unsharded model")
            names = [c.name for c in configs]
            engine.open_sink = lambda e=engine, names=names: self._open_sink(e, names)
            self._engines.append(engine)
            self._names.append(names)
        self._collections = [m for _, m, _ in named_collections(self.model)]
        self._plan_groups(plan)

    def _plan_groups(self, plan: Plan | None) -> None:
        """A view, which is a copy of all tables, for every group that steps apart."""
        self.sync_settings = Sync() if plan is None else plan.sync
        self._groups: dict[str, Groups] = {}
        self._everywhere: dict[str, Tensor] = {}  # rows that every rank holds
        if plan is not None:
            of_tables = {table.name: plan.groups(table) for table in plan.tables}
            self._groups = {name: g for name, g in of_tables.items() if g.count > 1}
            self._find_hot(plan)
        self._together = rule_apart(self.rule, 1)
        finest = min(self._groups.values(), key=lambda g: g.size, default=None)
        self._views = finest if self.sync_settings.mode != "gradients" else None
        count = 1 if self._views is None else self._views.count
        names = [name for names in self._names for name in names]
        self._stacks = [[e.current_stacks() for e in self._engines]]
        self._stacks += [[e.copy_stacks() for e in self._engines] for _ in range(count - 1)]
        self._weights: list[dict[str, Tensor]] = []
        self._states: list[dict[str, dict[str, Tensor]]] = []
        for view in range(count):
            self._use(view)
            weights = {name: self.weight(name) for name in names}
            self._weights.append(weights)
            self._states.append(
                {n: self.rule.new_state(*w.shape, device=w.device) for n, w in weights.items()}
            )
        self._use(0)

    def _find_hot(self, plan: Plan) -> None:
        for name in self._groups:
            table, where = plan.table(name), f"table {name!r}"
            ids = [hot_ids(r, where=where) for t, r in table.hot if t.copies is Copies.WORLD]
            hot = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *ids]))
            self._everywhere[name] = torch.from_numpy(hot)

    def change_tiers(self, plan: Plan) -> None:
        """Follow a plan with other hot rows from now on, as `rowmesh.change_tiers` does."""
        self.sync()
        self._find_hot(plan)

    @property
    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimiser state of every table (of the first group, where they are apart)."""
        return self._states[0]

    def _use(self, view: int) -> None:
        for engine, stacks in zip(self._engines, self._stacks[view], strict=True):
            engine.use_stacks(stacks)

    def _open_sink(self, engine: LocalEngine, names: Sequence[str]) -> Sink:
        self._num_samples = engine.num_samples
        part, forward = self._part, self._forwards
        self._forwards += 1
        return lambda table, rows, sums: self._arrived.append(
            _Arrival(names[table], part, forward, rows, sums)
        )

    def step(
        self, parts: Sequence[Any], *, clip: float | None = None, lr: float | None = None
    ) -> list[Tensor]:
        """One training step on the parts of a batch, ``parts[rank]``."""
        return self.step_accumulated([[part] for part in parts], clip=clip, lr=lr)

    def step_accumulated(
        self,
        parts: Sequence[Sequence[Any]],
        *,
        clip: float | None = None,
        lr: float | None = None,
    ) -> list[Tensor]:
        """One update from several backwards, ``parts[rank][backward]``.

        Returns:
            The losses of the last backward of every part.
        """
        self._arrived.clear()
        dense: list[list[Tensor | None]] = []
        # All forwards go first: they tell how many samples a batch has on all ranks.
        forwards = [self._forward(number, part) for number, part in enumerate(parts)]
        counts = [sum(local for _, local in column) for column in zip(*forwards, strict=True)]
        for mine in forwards:
            for parameter in self.parameters:
                parameter.grad = None
            for count, (found, local) in zip(counts, mine, strict=True):
                share_of_mean(found, local, count, is_mean=self._is_mean).backward()
            dense.append([p.grad for p in self.parameters])
        losses = [mine[-1][0].detach() for mine in forwards]
        for parameter, grads in zip(self.parameters, zip(*dense, strict=True), strict=True):
            parameter.grad = _add(parameter, grads, self._span or len(grads))
        self._update(clip, self.rule.lr if lr is None else lr)
        return losses

    def _forward(self, number: int, part: Sequence[Any]) -> list[tuple[Tensor, int]]:
        """The losses of every batch of a part, and of how many samples."""
        self._part, self._forwards = number, 0
        if self._views is not None:
            self._use(self._views.group(number))
        found = []
        for batch in part:
            self._num_samples = None
            losses = self._loss(self.model, batch)
            if self._is_mean and self._num_samples is None:
                raise InputError("is_mean takes a model that reads a collection: it tells samples")
            is_list = losses.dim() > 0 and not self._is_mean
            found.append((losses, len(losses) if is_list else self._num_samples or 0))
        self._use(0)
        return found

    @torch.no_grad()
    def _update(self, clip: float | None, lr: float) -> None:
        steps = [
            s for name in dict.fromkeys(a.table for a in self._arrived) for s in self._of(name)
        ]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if clip is not None:
            squares = sum(float(g.double().square().sum()) for g in grads)
            squares += sum(s.weight * float(s.grad.double().square().sum()) for s in steps)
            for grad in (*grads, *(s.grad for s in steps)):
                grad.mul_(min(1.0, clip / (squares**0.5 + 1e-6)))
        if self.sync_settings.mode == "moments-first" and self.rule.adds_squares:
            steps = self._add_squares(steps)
        for s in steps:
            for view in s.views:
                weight, state = self._weights[view][s.table], self._states[view][s.table]
                s.rule.update(weight, state, s.rows, s.grad, lr, squares=s.squares)
            if s.weight < 1.0:
                self._apart.setdefault(s.table, []).append(s.rows)
        if self.dense is not None:
            self.dense.step()
        self._num_steps += 1
        if self._num_steps >= self.sync_settings.period:
            self.sync()

    def _of(self, name: str) -> list[_Step]:
        """The updates of one table: of rows stepped with the sum of all ranks, and of groups."""
        mine = [a for a in self._arrived if a.table == name]
        every, groups = list(range(len(self._weights))), self._groups.get(name)
        if groups is None:
            return [_Step(name, every, self._together, *self._sum(mine))]
        hot, steps = self._everywhere[name], []
        if len(hot):
            of_all = _among(mine, hot, True)
            steps = [_Step(name, every, self._together, *self._sum(of_all))]
            mine = _among(mine, hot, False)
        if self._views is None:
            return [*steps, _Step(name, every, self._together, *self._sum(mine, groups))]
        for group in range(groups.count):
            rows, grad = self._sum([a for a in mine if groups.group(a.part) == group])
            views = [v for v in every if groups.group(self._views.members(v)[0]) == group]
            rule = rule_apart(self.rule, groups.count)
            steps.append(_Step(name, views, rule, rows, grad * groups.count, 1.0 / groups.count))
        return steps

    def _sum(
        self, arrivals: Sequence[_Arrival], groups: Groups | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rank by rank, within a rank forward by forward; then spans; then groups."""
        if len(arrivals) == 1:
            return arrivals[0].rows, arrivals[0].sums
        of = [0 if groups is None else groups.group(a.part) for a in arrivals]
        order = sorted(range(len(of)), key=lambda i: (of[i], arrivals[i].part, arrivals[i].forward))
        mine = [arrivals[i] for i in order]
        sizes = torch.tensor([len(a.rows) for a in mine])
        parts = torch.repeat_interleave(torch.tensor([a.part for a in mine]), sizes)
        group = torch.repeat_interleave(torch.tensor([of[i] for i in order]), sizes)
        labels = [parts]
        if self._span is not None:
            labels.append(group * (1 << 32) + parts // self._span)
        labels += [] if groups is None else [group]
        rows = torch.cat([a.rows for a in mine])
        return coalesce(rows, torch.cat([a.sums for a in mine]), labels=labels)

    def _add_squares(self, steps: Sequence[_Step]) -> list[_Step]:
        """Steps of groups on the rows of all of them, with their squares summed over groups."""
        found = [s for s in steps if s.weight == 1.0]
        for name in dict.fromkeys(s.table for s in steps if s.weight < 1.0):
            mine = [s for s in steps if s.table == name and s.weight < 1.0]
            squares = [mean_squares(s.grad).unsqueeze(1) for s in mine]
            rows, total = coalesce(torch.cat([s.rows for s in mine]), torch.cat(squares))
            moment = total.squeeze(1) / len(mine) ** 2
            for s in mine:
                grad = s.grad.new_zeros((len(rows), s.grad.shape[1]))
                grad[torch.searchsorted(rows, s.rows)] = s.grad
                rule = self._together
                found.append(_Step(name, s.views, rule, rows, grad, s.weight, moment))
        return found

    @torch.no_grad()
    def sync(self) -> None:
        """Make the copies of all groups their mean, weights and optimiser state.

        Rows that no group has stepped since the last time are alike in all copies and stay so.
        """
        self._num_steps = 0  # since the last sync
        for name, stepped in self._apart.items():
            groups, views, rows = self._groups[name], self._views, torch.unique(torch.cat(stepped))
            assert views is not None
            places = [views.group(groups.members(m)[0]) for m in range(groups.count)]
            tensors = [{"": w[name], **s[name]} for w, s in zip(*self._copies(), strict=True)]
            for key in tensors[0]:
                mean = mean_of_groups([tensors[v][key].index_select(0, rows) for v in places])
                for view in tensors:
                    view[key].index_copy_(0, rows, mean)
        self._apart.clear()

    def _copies(self) -> tuple[list[dict[str, Tensor]], list[dict[str, dict[str, Tensor]]]]:
        return self._weights, self._states

    def weight(self, name: str) -> Tensor:
        """The table ``name`` (of the first group, where they are apart)."""
        for module in self._collections:
            if name in module.table_modules():
                weight = module.table_modules()[name].weight.detach()
                assert isinstance(weight, Tensor)
                return weight
        raise KeyError(name)


def _among(arrivals: Sequence[_Arrival], rows: Tensor, is_among: bool) -> list[_Arrival]:
    """Of each arrival, only what is of ``rows``, or only what is not."""
    found = []
    for a in arrivals:
        keep = torch.isin(a.rows, rows.to(a.rows.device)) == is_among
        found.append(replace(a, rows=a.rows[keep], sums=a.sums[keep]))
    return found


def _add(parameter: nn.Parameter, grads: Sequence[Tensor | None], span: int) -> Tensor | None:
    """The sum in fp32, of spans and then over spans; no gradient counts as zero, as on the wire."""
    if all(g is None for g in grads):
        return None
    parts = [torch.zeros_like(parameter) if g is None else g for g in grads]
    sums = []
    for first in range(0, len(parts), span):
        total = parts[first].float()
        for part in parts[first + 1 : first + span]:
            total = total + part.float()
        sums.append(total)
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return total.to(parameter.dtype)
