"""The unsharded engine: tables of one dim and dtype stacked in memory, one lookup for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn.bags import as_features, check_ids, flatten
from rowmesh.nn.kernels import coalesce, pool
from rowmesh.tables import is_weighted

if TYPE_CHECKING:
    from rowmesh.nn.collections import Collection, Piece

__all__ = ["LocalEngine", "Sink"]

Sink = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Tables (indices into the collection's) whose weights lie one after the other."""

    tables: list[int]
    readers: list[int]
    weight: Tensor
    bounds: Tensor  # first row of each table in the stack, and the end


class LocalEngine:
    """Looks up every reader in the collection's own parameters.

    ``open_sink``, when set, is called once a forward; what it returns receives (table, distinct
    rows, fp32 sums) in backward instead of the parameters' ``grad``, which torch would round to
    the table's dtype. The oracle sets it.
    """

    def __init__(self, collection: Collection) -> None:
        self.open_sink: Callable[[], Sink] | None = None
        self.num_samples = 0  # of the last forward
        self._collection = [collection]  # in a list: a module must not register its parent
        self._stacks: list[_Stack] = []

    @property
    def device(self) -> torch.device:
        """Where the first table is."""
        return self._weight(0).device

    def __call__(self, features: Any) -> tuple[KeyedJaggedTensor, list[Piece]]:
        """The checked features and the sums of every reader's bags."""
        collection = self._collection[0]
        tables, pooled = collection.configs(), collection.pooled
        features = as_features(features)
        self.num_samples = features.stride()
        sink = self.open_sink() if self.open_sink is not None else None
        pieces: list[Piece] = []
        for stack in self.current_stacks():
            readers = [collection.readers[r] for r in stack.readers]
            bags = flatten(features, readers, pooled=pooled, weighted=is_weighted(collection))
            check_ids(bags, readers, tables)
            place = {t: i for i, t in enumerate(stack.tables)}
            first = stack.bounds[[place[r.table] for r in readers]]
            rows = bags.ids + first.index_select(0, bags.reader)
            parameters = [self._weight(t) for t in stack.tables]
            vectors = _Lookup.apply(stack, rows, bags, sink, *parameters)  # type: ignore[no-untyped-call]
            pieces.append((stack.readers, vectors))
        if sink is not None:
            together = _Together.apply(*(v for _, v in pieces))  # type: ignore[no-untyped-call]
            pieces = [(r, v) for (r, _), v in zip(pieces, together, strict=True)]
        return features, pieces

    def _weight(self, table: int) -> Tensor:
        collection = self._collection[0]
        weight = collection.table_modules()[collection.configs()[table].name].weight
        return weight

    def copy_stacks(self) -> list[_Stack]:
        """Copies of the tables as they are now, for `use_stacks`."""
        return [replace(s, weight=s.weight.clone()) for s in self.current_stacks()]

    def use_stacks(self, stacks: list[_Stack]) -> None:
        """Read, and make the parameters, these tables from now on."""
        self._stacks = stacks
        for stack in stacks:
            starts = stack.bounds.tolist()
            for t, start, stop in zip(stack.tables, starts[:-1], starts[1:], strict=True):
                self._weight(t).data = stack.weight[start:stop]

    def current_stacks(self) -> list[_Stack]:
        """The stacks; made anew when ``.to()``, a copy or an assignment moved a parameter."""
        if not self._stacks or any(not self._is_stacked(s) for s in self._stacks):
            self._stacks = self._make_stacks()
        return self._stacks

    def _is_stacked(self, stack: _Stack) -> bool:
        size = stack.weight.element_size() * stack.weight.shape[1]
        starts = [stack.weight.data_ptr() + b * size for b in stack.bounds.tolist()]
        return all(
            self._weight(t).data_ptr() == start
            for t, start in zip(stack.tables, starts[:-1], strict=True)
        )

    @torch.no_grad()
    def _make_stacks(self) -> list[_Stack]:
        collection = self._collection[0]
        groups: dict[tuple[int, torch.dtype], list[int]] = {}
        for t, config in enumerate(collection.configs()):
            if self._weight(t).device.type == "meta":
                raise InputError(
                    f"table {config.name!r} has no memory (device 'meta'): shard the model, "
                    f"or build its collections on a device"
                )
            groups.setdefault((config.embedding_dim, self._weight(t).dtype), []).append(t)
        stacks = []
        for members in groups.values():
            weight = torch.cat([self._weight(t) for t in members])
            bounds = torch.tensor([0, *(len(self._weight(t)) for t in members)]).cumsum(0)
            for t, start, stop in zip(members, bounds[:-1], bounds[1:], strict=True):
                self._weight(t).data = weight[start:stop]
            readers = [r for r, reader in enumerate(collection.readers) if reader.table in members]
            stacks.append(_Stack(members, readers, weight, bounds.to(weight.device)))
        return stacks


class _Together(torch.autograd.Function):
    """All vectors of a forward as they are: if one gets a gradient, the others get zeros.

    A row counts as touched if a forward read it and that forward's backward ran, also where the
    loss used only some of the vectors; sharded and unsharded must agree on it.
    """

    @staticmethod
    def forward(ctx: Any, *vectors: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.detach() for v in vectors)  # else views, which may not change in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


class _Lookup(torch.autograd.Function):
    """Sums of bags of stack rows; backward gives each table its sparse, coalesced gradient."""

    @staticmethod
    def forward(
        ctx: Any, stack: _Stack, rows: Tensor, bags: Any, sink: Any, *parameters: Tensor
    ) -> Tensor:
        ctx.stack, ctx.rows, ctx.bags, ctx.sink = stack, rows, bags, sink
        starts = torch.cumsum(bags.lengths, 0) - bags.lengths
        return pool(stack.weight, rows, starts, bags.weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stack, bags = ctx.stack, ctx.bags
        rows, sums = coalesce(ctx.rows, grads[0].contiguous(), index=bags.bag, weights=bags.weights)
        cuts = torch.searchsorted(rows, stack.bounds).tolist()
        found: list[Tensor | None] = []
        for i, start in enumerate(stack.bounds[:-1].tolist()):
            if not ctx.needs_input_grad[4 + i]:
                found.append(None)
                continue
            part = slice(cuts[i], cuts[i + 1])
            if ctx.sink is not None:
                ctx.sink(stack.tables[i], rows[part] - start, sums[part])
                found.append(None)
                continue
            shape = (int(stack.bounds[i + 1]) - start, stack.weight.shape[1])
            found.append(
                torch.sparse_coo_tensor(
                    (rows[part] - start).unsqueeze(0),
                    sums[part].to(stack.weight.dtype),
                    shape,
                    is_coalesced=True,
                    check_invariants=False,
                )
            )
        return None, None, None, None, *found
