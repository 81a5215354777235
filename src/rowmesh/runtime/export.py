"""Whole tables back from their shards, as plain tensors under TorchRec's keys."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rowmesh.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.tickets import Stack

__all__ = ["full_sparse_state", "full_state_dict"]


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unsharded model, on rank 0; empty on other ranks.

    Collective:
        All ranks.
    """
    found = {k: v.detach() for k, v in model.state_dict().items()}
    rank = 0
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            engine = module.engine
            assert isinstance(engine, ShardedEngine)
            rank = engine.mesh.rank
            prefix = f"{path}." if path else ""
            tables = _gather(engine, lambda s: {"weight": s.home}, lambda s: {"weight": s.copies})
            for name, parts in tables.items():
                found[f"{prefix}{module.table_attribute}.{name}.weight"] = parts["weight"]
    return found if rank == 0 else {}


def full_sparse_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Optimiser state of every table, ``{table: {name: tensor}}``, on rank 0.

    Collective:
        All ranks.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for module in model.modules():
        engine = getattr(module, "engine", None)
        if isinstance(engine, ShardedEngine):
            found |= _gather(engine, lambda s: s.home_state, lambda s: s.copies_state)
    return found


_Part = Callable[[Stack], Mapping[str, Tensor]]


def _gather(engine: ShardedEngine, home: _Part, copies: _Part) -> dict[str, dict[str, Tensor]]:
    """Put the regions of every table in row order on rank 0."""
    mesh = engine.mesh
    found: dict[str, dict[str, Tensor]] = {}
    for stack in engine.stacks:
        for region in (*stack.layout.home, *stack.layout.copied):
            copied = region in stack.layout.copied
            config = engine.tables[region.table]
            rows = torch.from_numpy(region.homes.rows(region.owner)).to(mesh.device)
            first, last = region.columns
            for name, tensor in (copies if copied else home)(stack).items():
                if tensor.dim() == 1 and first > 0:
                    continue  # a row's state lies beside each of its column pieces
                engine.num_exports += 1
                mine = copied or region.rank == mesh.rank
                if mine:
                    part = tensor[region.start : region.start + region.num_rows]
                else:
                    part = tensor.new_empty((region.num_rows, *tensor.shape[1:]))
                if not copied and region.rank != 0:
                    _move(engine, part, region.rank)
                if mesh.rank == 0:
                    whole = found.setdefault(config.name, {})
                    if name not in whole:
                        shape = (config.num_embeddings, config.embedding_dim)[: tensor.dim()]
                        whole[name] = tensor.new_empty(shape)
                    target = whole[name] if tensor.dim() == 1 else whole[name][:, first:last]
                    target.index_copy_(0, rows, part)
    return found


def _move(engine: ShardedEngine, part: Tensor, source: int) -> None:
    """From ``source`` to rank 0."""
    mesh = engine.mesh
    sends = [(0, part.contiguous())] if mesh.rank == source else ()
    receives = [(source, part)] if mesh.rank == 0 else ()
    handle = engine.exports.post(
        engine.num_exports, sends=sends, receives=receives, edge="checkpoint"
    )
    handle.wait()
