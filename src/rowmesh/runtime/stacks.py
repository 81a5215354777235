"""Stacks: the tables of a collection that share storage and messages, laid out for all ranks.

Pure arithmetic on the plan. Tables of one dim, dtype and wire form are stacked; a rank's home
stack holds the rows it owns, table after table, and its copies stack the rows every rank holds,
ordered by the rank that adds up their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rowmesh.nn.bags import Reader
from rowmesh.placement import Copies, Exchange, Homes, TablePlan
from rowmesh.tables import parse_dtype

__all__ = ["Region", "StackLayout", "lay_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Rows of one table that lie together in one rank's home stack or in the copies stack."""

    table: int
    rank: int
    owner: int  # index of the rank among those of its column piece
    homes: Homes
    columns: tuple[int, int]  # first and last + 1
    start: int

    @property
    def num_rows(self) -> int:
        """Slots of the region."""
        return self.homes.num_slots(self.owner)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackLayout:
    """One stack of a collection.

    The last four fields are indexed by (table, virtual shard), at ``first_entry[reader]`` +
    id mod S; row id of a reader lies at ``slot0 + (id // S) * stride``.

    Args:
        tables: Indices into the collection's tables.
        readers: Indices into the collection's readers.
        home: Regions in home stacks, of all ranks.
        copied: Regions in the copies stack.
        home_slots: ``[W]`` rows of each rank's home stack.
        copy_bounds: ``[W + 1]`` where the rows that each rank sums begin in the copies stack.
    """

    dim: int
    dtype: torch.dtype
    trainable: bool
    tables: tuple[int, ...]
    readers: tuple[int, ...]
    home: tuple[Region, ...]
    copied: tuple[Region, ...]
    home_slots: tuple[int, ...]
    copy_bounds: tuple[int, ...]
    is_copied: Tensor  # per reader
    is_pooled: Tensor  # per reader: owners pool
    is_deduped: Tensor  # per reader
    has_pooled: bool  # any reader is_pooled
    all_deduped: bool
    num_shards: Tensor  # per reader
    shard_bits: int | None  # log2 of num_shards where it is one power of two for all
    first_entry: Tensor  # per reader
    owner: Tensor
    slot0: Tensor
    stride: Tensor

    def num_summed(self, rank: int) -> int:
        """Copied rows whose gradients ``rank`` adds up."""
        return self.copy_bounds[rank + 1] - self.copy_bounds[rank]

    @property
    def has_repeats(self) -> bool:
        """One part may bring a row several gradients: owners pool, or ids are not deduped."""
        return self.has_pooled or not self.all_deduped


def lay_out(
    plans: Sequence[TablePlan], readers: Sequence[Reader], *, world: int, device: torch.device
) -> list[StackLayout]:
    """The stacks of a collection; the same on every rank.

    Args:
        plans: One per table of the collection, in its order.
        readers: Of the collection.
        world: Number of ranks.
        device: Where the index tensors go.
    """
    groups: dict[tuple[int, str, bool, bool], list[int]] = {}
    for t, plan in enumerate(plans):
        # Owners send sums in fp32: a low-precision table's sums and rows differ in dtype.
        widened = plan.data_type != "fp32" and _owner_pools(plan)
        key = (plan.embedding_dim, plan.data_type, plan.trainable, widened)
        groups.setdefault(key, []).append(t)
    return [_lay_out_one(plans, readers, tables, world, device) for tables in groups.values()]


def _owner_pools(plan: TablePlan) -> bool:
    return plan.exchange is Exchange.POOLED and plan.rest.copies is not Copies.WORLD


def _lay_out_one(
    plans: Sequence[TablePlan],
    readers: Sequence[Reader],
    tables: Sequence[int],
    world: int,
    device: torch.device,
) -> StackLayout:
    home, home_slots = _regions(plans, [t for t in tables if not _is_copied(plans[t])], world)
    copied, sums = _regions(plans, [t for t in tables if _is_copied(plans[t])], world)
    copy_bounds = [sum(sums[:rank]) for rank in range(world + 1)]
    copied = [replace(region, start=region.start + copy_bounds[region.rank]) for region in copied]
    entries: dict[int, int] = {}
    owner: list[int] = []
    slot0: list[int] = []
    stride: list[int] = []
    for t in tables:
        entries[t] = len(owner)
        homes = plans[t].homes()
        of_table = {r.owner: r for r in (*home, *copied) if r.table == t}
        for shard in range(homes.num_shards):
            region = of_table[shard % homes.num_owners]
            owner.append(region.rank)
            slot0.append(region.start + shard // homes.num_owners)
            stride.append(homes.width(region.owner))
    members = [r for r, reader in enumerate(readers) if reader.table in tables]
    of_reader = [plans[readers[r].table] for r in members]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def flags(values: list[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.bool, device=device)

    return StackLayout(
        dim=plans[tables[0]].embedding_dim,
        dtype=parse_dtype(plans[tables[0]].data_type),
        trainable=plans[tables[0]].trainable,
        tables=tuple(tables),
        readers=tuple(members),
        home=tuple(home),
        copied=tuple(copied),
        home_slots=tuple(home_slots),
        copy_bounds=tuple(copy_bounds),
        is_copied=flags([_is_copied(p) for p in of_reader]),
        is_pooled=flags([_owner_pools(p) for p in of_reader]),
        is_deduped=flags([p.dedup or _owner_pools(p) or _is_copied(p) for p in of_reader]),
        has_pooled=any(_owner_pools(p) for p in of_reader),
        all_deduped=all(p.dedup or _owner_pools(p) or _is_copied(p) for p in of_reader),
        num_shards=tensor([p.virtual_shards for p in of_reader]),
        shard_bits=_shard_bits({p.virtual_shards for p in of_reader}),
        first_entry=tensor([entries[readers[r].table] for r in members]),
        owner=tensor(owner),
        slot0=tensor(slot0),
        stride=tensor(stride),
    )


def _shard_bits(sizes: set[int]) -> int | None:
    size = next(iter(sizes))
    return size.bit_length() - 1 if len(sizes) == 1 and size & (size - 1) == 0 else None


def _is_copied(plan: TablePlan) -> bool:
    return plan.rest.copies is Copies.WORLD


def _regions(
    plans: Sequence[TablePlan], tables: Sequence[int], world: int
) -> tuple[list[Region], list[int]]:
    """Where each (table, rank) starts within that rank, and how many rows each rank gets."""
    used = [0] * world
    regions = []
    for t in tables:
        homes = plans[t].homes()
        for owner, rank in enumerate(plans[t].rest.ranks):
            columns = (0, plans[t].embedding_dim)
            region = Region(
                table=t, rank=rank, owner=owner, homes=homes, columns=columns, start=used[rank]
            )
            regions.append(region)
            used[rank] += region.num_rows
    return regions, used
