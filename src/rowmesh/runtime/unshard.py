"""`rm.unshard`: a sharded model back as one for a single process."""

import copy
from typing import Any

from torch import Tensor, nn

from rowmesh.nn.collections import Collection
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.export import gather_table
from rowmesh.runtime.regions import mesh_of, named_tables
from rowmesh.runtime.state_dicts import unhook_state_dicts
from rowmesh.tables import named_collections, uncompiled

__all__ = ["unshard"]


def unshard(model: nn.Module) -> nn.Module | None:
    """A copy of a sharded model for one process, on rank 0; None on other ranks.

    The copy has plain parameters, tables included, trainable or frozen as they were, the state
    dict of the model before `rm.shard` and ``torch.compile``, and no tie to the mesh: move it, save
    it, shard it again. Its forward gives the bits of the sharded one where the plan is exact (E0).
    Gradients and optimiser state are not copied. Of an unsharded model it is a plain copy, on every
    rank.

    Collective:
        All ranks, if the model is sharded. Rank 0 holds every table.
    """
    model = uncompiled(model)
    mesh = mesh_of(model)
    if mesh is None:
        return copy.deepcopy(model)
    tables: dict[int, dict[str, Tensor]] = {}
    for table in named_tables(model):
        weight = gather_table(table)
        if weight is not None:
            tables.setdefault(id(table.collection), {})[table.config.name] = weight
    return _copy(model, tables) if mesh.rank == 0 else None


def _copy(model: nn.Module, tables: dict[int, dict[str, Tensor]]) -> nn.Module:
    """``model`` with local engines over ``tables``, ``{id of a collection: {table: weight}}``."""
    mesh = mesh_of(model)
    # What is in the memo is not copied: the mesh stays the one it is, engines and buckets go.
    memo: dict[int, Any] = {id(mesh): mesh, id(None): None}
    memo |= {id(engine): _Gone for engine in sharded_engines(model)}
    buckets = {id(m._rowmesh_dense) for m in model.modules() if hasattr(m, "_rowmesh_dense")}
    memo |= dict.fromkeys(buckets, _Gone)
    found = copy.deepcopy(model, memo)
    for module in found.modules():
        if hasattr(module, "_rowmesh_dense"):
            del module._rowmesh_dense
    unhook_state_dicts(found)
    pairs = zip(named_collections(found), named_collections(model), strict=True)
    for (_, module, _), (_, original, _) in pairs:
        assert isinstance(module, Collection)
        assert isinstance(original, Collection)
        _restore(module, original, tables[id(original)])
    return found


class _Gone:
    """Stands for what a copy does not take along."""


def _restore(module: Collection, original: Collection, weights: dict[str, Tensor]) -> None:
    """Give a copied collection its tables back, and the engine that reads them."""
    frozen = {
        t
        for engine in sharded_engines(original)
        for stack in engine.stacks
        for t in stack.layout.tables
        if not stack.layout.trainable
    }
    module.give_tables(
        {
            config.name: nn.Parameter(weights[config.name], requires_grad=t not in frozen)
            for t, config in enumerate(module.configs())
        }
    )
