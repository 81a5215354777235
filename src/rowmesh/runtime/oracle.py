"""The oracle: the unsharded model in one process, run as W virtual ranks.

The batch is cut as the ranks got it; forward and backward run per part; a row's gradients are
added in sample order within a part, then over parts in the plan's sum tree. What a plan of
exactness E0 does on W real ranks must equal this to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.errors import InputError
from rowmesh.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.nn.init import fill_initial_values
from rowmesh.nn.kernels import coalesce
from rowmesh.nn.local import LocalEngine, Sink
from rowmesh.optim import UpdateRule
from rowmesh.runtime.adopt import adopt_collections
from rowmesh.tables import dense_parameters, named_collections

__all__ = ["Oracle", "materialise"]


@torch.no_grad()
def materialise(model: nn.Module, *, device: torch.device | str = "cpu") -> nn.Module:
    """Give collections built on ``meta`` their initial values, the ones sharding would give."""
    for _, module, configs in named_collections(model):
        assert isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
        for config in configs:
            table = module.table_modules()[config.name]
            weight = table.weight
            if weight.device.type == "meta":
                values = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                rows = torch.arange(len(values), device=device)
                fill_initial_values(values, config, rows, seed=module.seed)
                table.weight = nn.Parameter(values, requires_grad=weight.requires_grad)
    return model


class Oracle:
    """Trains ``model`` as ``world`` virtual ranks would.

    Args:
        model: Unsharded; its ``forward(batch)`` returns one loss per sample. Tables on ``meta``
            get their initial values.
        dense: As for `rowmesh.Optimizer`.
        sparse: As for `rowmesh.Optimizer`.
        span: `Plan.span`: so many parts, next to each other, are added up first; default all.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        sparse: UpdateRule,
        span: int | None = None,
    ) -> None:
        self._span = span
        self.model = materialise(adopt_collections(model))
        self.rule = sparse
        self.parameters = [p for p in dense_parameters(self.model) if p.requires_grad]
        self.dense = dense(self.parameters) if self.parameters else None
        self.weights: dict[str, Tensor] = {}
        self.states: dict[str, dict[str, Tensor]] = {}
        self._arrived: list[tuple[str, int, int, Tensor, Tensor]] = []
        self._part, self._forwards = 0, 0
        for _, module, configs in named_collections(self.model):
            engine = module.engine
            if not isinstance(engine, LocalEngine):
                raise InputError("the oracle needs the unsharded model")
            names = [c.name for c in configs]
            engine.open_sink = lambda names=names: self._open_sink(names)
            for config in configs:
                weight = module.table_modules()[config.name].weight
                self.states[config.name] = sparse.new_state(*weight.shape, device=weight.device)
        self._collections = [m for _, m, _ in named_collections(self.model)]

    def _open_sink(self, names: Sequence[str]) -> Sink:
        part, forward = self._part, self._forwards
        self._forwards += 1
        return lambda table, rows, sums: self._arrived.append(
            (names[table], part, forward, rows, sums)
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
        losses: list[Tensor] = []
        dense: list[list[Tensor | None]] = []
        counts = [sum(_num_samples(part[k]) for part in parts) for k in range(len(parts[0]))]
        for self._part, part in enumerate(parts):
            self._forwards = 0
            for parameter in self.parameters:
                parameter.grad = None
            for count, batch in zip(counts, part, strict=True):
                found = self.model(batch)
                (found.sum() / max(count, 1)).backward()
            losses.append(found.detach())
            dense.append([p.grad for p in self.parameters])
        for parameter, grads in zip(self.parameters, zip(*dense, strict=True), strict=True):
            parameter.grad = _add(parameter, grads, self._span or len(grads))
        self._update(clip, self.rule.lr if lr is None else lr)
        return losses

    @torch.no_grad()
    def _update(self, clip: float | None, lr: float) -> None:
        gradients = {}
        for name in dict.fromkeys(arrival[0] for arrival in self._arrived):
            # rank by rank, and within a rank forward by forward
            mine = sorted((a for a in self._arrived if a[0] == name), key=lambda a: a[1:3])
            rows = torch.cat([a[3] for a in mine])
            sizes = torch.tensor([len(a[3]) for a in mine])
            parts = torch.repeat_interleave(torch.tensor([a[1] for a in mine]), sizes)
            labels = [parts] if self._span is None else [parts, parts // self._span]
            gradients[name] = coalesce(rows, torch.cat([a[4] for a in mine]), labels=labels)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        grads += [grad for _, grad in gradients.values()]
        if clip is not None:
            squares = sum(float(g.double().square().sum()) for g in grads)
            for grad in grads:
                grad.mul_(min(1.0, clip / (squares**0.5 + 1e-6)))
        for name, (rows, grad) in gradients.items():
            self.rule.update(self.weight(name), self.states[name], rows, grad, lr)
        if self.dense is not None:
            self.dense.step()

    def weight(self, name: str) -> Tensor:
        """The table ``name``."""
        for module in self._collections:
            if name in module.table_modules():
                weight = module.table_modules()[name].weight.detach()
                assert isinstance(weight, Tensor)
                return weight
        raise KeyError(name)


def _num_samples(batch: Any) -> int:
    """Samples of a batch: of its jagged features, wherever they are."""
    if callable(getattr(batch, "stride", None)) and callable(getattr(batch, "keys", None)):
        return int(batch.stride())
    if hasattr(batch, "sparse_features"):
        return int(batch.sparse_features.stride())
    members = batch.values() if isinstance(batch, dict) else batch
    for member in members if isinstance(batch, dict | list | tuple) else ():
        if (found := _num_samples(member)) >= 0:
            return found
    return -1


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
