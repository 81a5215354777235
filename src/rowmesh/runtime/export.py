"""Whole tables back from their shards, as plain tensors under TorchRec's keys."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from rowmesh.runtime.copies import refresh_homes
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.regions import (
    NamedTable,
    dense_state,
    mesh_of,
    named_tables,
    places_of,
    put_region,
    send_bytes,
)
from rowmesh.runtime.tickets import Stack

__all__ = ["dense_tensors", "full_sparse_state", "full_state_dict", "gather_table"]


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unsharded model, on rank 0; empty on other ranks.

    Keys are TorchRec's (``<path>.embedding_bags.<table>.weight``), values plain whole tensors in
    the table's dtype, and copies: training may go on. Of an unsharded model it is every rank's own
    state dict, which shares its memory.

    Collective:
        All ranks, if the model is sharded.
    """
    mesh = mesh_of(model)
    found = dense_tensors(model)
    if mesh is not None:
        found = {key: value.clone() for key, value in found.items()}
    for table in named_tables(model):
        weight = gather_table(table)
        if weight is not None:
            found |= dict.fromkeys(table.keys, weight)
    return found if mesh is None or mesh.rank == 0 else {}


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict that are not tables."""
    tables = {key for table in named_tables(model) for key in table.keys}
    return {
        key: value.detach()
        for key, value in dense_state(model).items()
        if isinstance(value, Tensor) and key not in tables
    }


def gather_table(table: NamedTable) -> Tensor | None:
    """The whole table on rank 0, None elsewhere; of an unsharded model as it is, on every rank.

    Collective:
        All ranks, if the model is sharded.
    """
    if table.engine is None:
        weight: Tensor = table.local.weight.detach()
        return weight
    return _gather(table.engine, table.index, _weights).get("weight")


def full_sparse_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Optimiser state of every table of a sharded model, ``{table: {name: tensor}}``, on rank 0.

    Collective:
        All ranks.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for table in named_tables(model):
        if table.engine is not None:
            whole = _gather(table.engine, table.index, _states)
            found |= {table.config.name: whole} if whole else {}
    return found


_Part = Callable[[Stack, bool], Mapping[str, Tensor]]


def _weights(stack: Stack, is_copied: bool) -> Mapping[str, Tensor]:
    return {"weight": stack.copies if is_copied else stack.home}


def _states(stack: Stack, is_copied: bool) -> Mapping[str, Tensor]:
    return stack.copies_state if is_copied else stack.home_state


def _gather(engine: ShardedEngine, table: int, part_of: _Part) -> dict[str, Tensor]:
    """The regions of a table put together on rank 0; nothing on other ranks."""
    rank, config = engine.mesh.rank, engine.tables[table]
    refresh_homes(engine, table=table)
    found: dict[str, Tensor] = {}
    for place in places_of(engine, table):
        region = place.region
        for name, tensor in part_of(place.stack, place.is_copied).items():
            if tensor.dim() == 1 and region.columns[0] > 0:
                continue  # state of whole rows: every column piece has it, the first one's counts
            part = place.of(tensor) if place.is_on(rank) else None
            if not place.is_on(0):
                if part is None:
                    part = tensor.new_empty(
                        (region.num_rows if rank == 0 else 0, *tensor.shape[1:])
                    )
                send_bytes(engine, part.contiguous(), source=region.replicas[0], targets=[0])
            if rank == 0:
                assert part is not None
                shape = (config.num_embeddings, config.embedding_dim)[: tensor.dim()]
                if name not in found:
                    found[name] = tensor.new_empty(shape)
                put_region(found[name], region, part)
    return found
