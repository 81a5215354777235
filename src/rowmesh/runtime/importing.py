"""Values into the tables of a model, sharded under any plan or not sharded."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rowmesh.nn.init import fill_table
from rowmesh.runtime.copies import refresh_copies, refresh_homes
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.places import Region
from rowmesh.runtime.regions import NamedTable, Place, places_of, send_bytes

__all__ = ["Ints", "set_rows", "share_of"]

Ints = NDArray[np.int64]
_CHUNK_BYTES = 1 << 26  # what a rank holds besides its tables while values come in


@torch.no_grad()
def set_rows(
    table: NamedTable, values: Tensor | None, rows: Ints | None, *, count: int, spread: bool
) -> None:
    """Set rows of a table to ``values``, rounded to the table's dtype.

    Args:
        table: Of a sharded or an unsharded model.
        values: ``[count, columns]``; None on ranks that are sent theirs.
        rows: ``[count]`` distinct ids, or None for 0 .. count - 1. The same on all ranks.
        count: Number of rows.
        spread: Rank 0 has the values and sends every rank its own. Otherwise every rank takes
            its own from ``values``.

    Collective:
        All ranks, if the model is sharded.
    """
    if table.engine is None:
        assert values is not None
        _set_local(table, values, rows)
        return
    refresh_homes(table.engine, table=table.index)
    for place in places_of(table.engine, table.index):
        positions, slots = share_of(place.region, rows, count)
        for chunk in _chunks(len(positions), place):
            _set_chunk(table.engine, place, values, positions[chunk], slots[chunk], spread=spread)
    refresh_copies(table.engine, table=table.index)


def share_of(region: Region, rows: Ints | None, count: int) -> tuple[Ints, Ints]:
    """Which of the ``count`` given rows lie in the region, and in which of its slots."""
    homes = region.homes
    if rows is None:  # an owner's slots are in row order
        mine = homes.rows(region.owner)
        positions = mine[: np.searchsorted(mine, count)]
        return positions, np.arange(len(positions), dtype=np.int64)
    positions = np.flatnonzero(homes.owners(rows) == region.owner)
    return positions, homes.slots(rows[positions])


def _chunks(num_rows: int, place: Place) -> Iterator[slice]:
    first, last = place.region.columns
    step = max(1, _CHUNK_BYTES // (place.stack.home.element_size() * (last - first)))
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _set_chunk(
    engine: ShardedEngine,
    place: Place,
    values: Tensor | None,
    positions: Ints,
    slots: Ints,
    *,
    spread: bool,
) -> None:
    mesh, (first, last) = engine.mesh, place.region.columns
    dtype, is_mine = place.stack.home.dtype, place.is_on(mesh.rank)
    part = torch.empty((0, last - first), dtype=dtype, device=mesh.device)
    if mesh.rank == 0 if spread else is_mine:
        assert values is not None
        at = torch.from_numpy(positions).to(values.device)
        part = values.index_select(0, at)[:, first:last].to(mesh.device, dtype).contiguous()
    elif is_mine:
        part = part.new_empty((len(positions), last - first))
    if spread:
        targets = list(range(mesh.world)) if place.is_copied else list(place.region.replicas)
        send_bytes(engine, part, source=0, targets=targets)
    if is_mine:
        place.weight.index_copy_(0, torch.from_numpy(slots).to(mesh.device), part)


def _set_local(table: NamedTable, values: Tensor, rows: Ints | None) -> None:
    module, config = table.local, table.config
    weight = module.weight
    if weight.is_meta:
        made = torch.empty(weight.shape, dtype=weight.dtype, device=values.device)
        if len(values) < len(made):  # the others start as sharding would start them
            fill_table(made, config, seed=getattr(table.collection, "seed", 0))
        module.weight = weight = nn.Parameter(made, requires_grad=weight.requires_grad)
    if rows is None:
        weight[: len(values)].copy_(values)
    else:
        at = torch.from_numpy(rows).to(weight.device)
        weight.index_copy_(0, at, values.to(weight.device, weight.dtype))
