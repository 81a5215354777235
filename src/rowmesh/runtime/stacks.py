"""Stacks: the tables of a collection that share storage and messages, laid out for all ranks.

Pure arithmetic on the plan. A table is one piece, or several column pieces; pieces of one width,
table dim, dtype, wire form and size of shard groups are stacked, as the rank's own group holds
them. A rank's home stack holds the rows it owns, piece after piece, and then its host's copies of
rows that have one copy per host, ordered by the host whose peer adds up their gradients. Its copies
stack holds the rows every rank holds: first those with sparse sums, ordered by the rank that adds
up their gradients, then those with dense ones. A hot row has a slot at home and another where it is
copied; its home is stale while it is hot. Its gradients are added up at its home in one of the
groups or, of copies per host, by the holder on its home's host.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.nn.bags import Reader
from rowmesh.placement import Copies, Exchange, Groups, TablePlan
from rowmesh.runtime.places import Region, find_hot, index_hot, lay_copies, lay_host_copies
from rowmesh.tables import parse_dtype
from rowmesh.topology import Topology

__all__ = ["StackLayout", "lay_out"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Columns of one table and the ranks their rows are spread over."""

    table: int
    columns: tuple[int, int]
    ranks: tuple[int, ...]
    groups: Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class StackLayout:
    """One stack of a collection, as one rank sees it.

    The last four fields are indexed by (piece, virtual shard), at ``first_entry[reader]`` +
    id mod S; row id of a reader is slot ``slot0 + (id // S) * stride`` of the rank it asks.

    Args:
        groups: Shard groups of the tables; of those copied whole, one of all ranks.
        dim: Columns of a vector.
        table_dim: Columns of the tables; more than ``dim`` where they are split by columns.
        is_relayed: A rank of the owners' host, the asker's peer, answers for them
            (`rowmesh.runtime.relay`).
        is_merged: A rank of the asker's host, the owner's peer, answers for it
            (`rowmesh.runtime.merges`).
        tables: Indices into the collection's tables.
        readers: Indices into the collection's readers; one comes once for every piece.
        columns: Of each of ``readers``, the columns of the table it reads here.
        home: Regions in home stacks, of all ranks of this rank's group.
        copied: Regions in the copies stack of tables that are copied whole.
        hot: Regions in the copies stack of hot rows.
        host_copies: Regions of hot rows copied per host, of all holders.
        home_slots: ``[W]`` rows of each rank's home stack without copies; 0 outside the group.
        asked_slots: ``[W]`` slots that each rank can be asked for by this one: its home rows and
            its host's copies; relayed, the home rows of its host, rank after rank; merged, of ranks
            of this host only, the home rows of its peers, host after host, and its host's copies.
        asked_homes: ``[W]`` of these, the slots of home rows, which come first.
        host_bounds: ``[H + 1]`` where the rows that each peer on the group's H hosts sums begin
            among this rank's copies for its host.
        copy_bounds: ``[W + 1]`` where the rows that each rank sums begin in the copies stack.
        dense_bounds: ``[3]`` where those whose sums are ``dense``, then ``bucket``, begin and end.
        hot_keys: Of every hot row its home's key (`rowmesh.runtime.routes`) without bags,
            ascending.
        hot_ranks: The rank of its home.
        copy_keys: The key of the copy that this rank reads, without bags.
        copy_ranks: The rank that has it; W for this rank's copies stack.
        hot_in_order: The keys of copies ascend behind all others.
    """

    groups: Groups
    dim: int
    table_dim: int
    dtype: torch.dtype
    trainable: bool
    is_relayed: bool
    is_merged: bool
    tables: tuple[int, ...]
    readers: tuple[int, ...]
    columns: tuple[tuple[int, int], ...]
    home: tuple[Region, ...]
    copied: tuple[Region, ...]
    hot: tuple[Region, ...]
    host_copies: tuple[Region, ...]
    home_slots: tuple[int, ...]
    asked_slots: tuple[int, ...]
    asked_homes: tuple[int, ...]
    host_bounds: tuple[int, ...]
    copy_bounds: tuple[int, ...]
    dense_bounds: tuple[int, ...]
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
    hot_keys: Tensor
    hot_ranks: Tensor
    copy_keys: Tensor
    copy_ranks: Tensor
    hot_in_order: bool

    @property
    def num_copies(self) -> int:
        """Rows of the copies stack."""
        return self.dense_bounds[-1]

    @property
    def num_host_copies(self) -> int:
        """Rows that this rank holds for its host."""
        return self.host_bounds[-1]

    @property
    def may_follow(self) -> bool:
        """Whether gradients of some rows may be exchanged after their step.

        Of merged requests; not of groups, which sync, nor of columns, whose squares are added.
        """
        one_piece = self.dim == self.table_dim and self.groups.count == 1
        return self.is_merged and self.trainable and one_piece

    def hot_places(self) -> Tensor:
        """Which rows are hot, and where their copies lie: the same only under the same tiers."""
        return torch.cat([self.hot_keys, self.copy_keys])

    def num_summed(self, rank: int) -> int:
        """Copied rows whose gradients ``rank`` adds up."""
        return self.copy_bounds[rank + 1] - self.copy_bounds[rank]

    @property
    def has_repeats(self) -> bool:
        """One part may bring a row several gradients: owners pool, or ids are not deduped."""
        return self.has_pooled or not self.all_deduped


def lay_out(
    plans: Sequence[TablePlan],
    groups: Sequence[Groups],
    readers: Sequence[Reader],
    *,
    topology: Topology,
    rank: int,
    device: torch.device,
) -> list[StackLayout]:
    """The stacks of a collection; alike on every rank, but for whom its group or relay asks.

    Args:
        plans: One per table of the collection, in its order.
        groups: Of each table (`Plan.groups`).
        readers: Of the collection.
        topology: Of the mesh.
        rank: Whose view it is.
        device: Where the index tensors go.
    """
    stacks: dict[tuple[object, ...], list[_Piece]] = {}
    # Copies per host come last in what an owner sends, where bags it pools would be.
    apart = any(tier.copies is Copies.HOST for plan in plans for tier in plan.tiers)
    merges = any(plan.merged for plan in plans)
    for t, (plan, of_table) in enumerate(zip(plans, groups, strict=True)):
        columns, tier = plan.columns(), plan.rest
        per_piece = len(tier.ranks) // len(columns)
        for c, (first, last) in enumerate(columns):
            # Owners send sums in fp32: a low-precision table's sums and rows differ in dtype.
            widened = plan.data_type != "fp32" and _owner_pools(plan)
            key = (last - first, plan.embedding_dim, plan.data_type, plan.trainable, widened)
            ranks = tier.ranks[c * per_piece : (c + 1) * per_piece]
            piece = _Piece(t, (first, last), ranks, of_table)
            # Tables that are copied whole add nothing to merged exchanges but save those of others.
            merged = plan.merged or (merges and _is_copied(plan))
            form = (plan.is_relayed, apart and _owner_pools(plan), of_table.size, merged)
            stacks.setdefault((*key, *form), []).append(piece)
    return [
        _lay_out_one(plans, readers, pieces, topology, rank, device) for pieces in stacks.values()
    ]


def _owner_pools(plan: TablePlan) -> bool:
    return plan.exchange is Exchange.POOLED and plan.rest.copies is not Copies.WORLD


def _lay_out_one(
    plans: Sequence[TablePlan],
    readers: Sequence[Reader],
    pieces: Sequence[_Piece],
    topology: Topology,
    rank: int,
    device: torch.device,
) -> StackLayout:
    world, first = topology.world, plans[pieces[0].table]
    home, used = _regions(plans, [p for p in pieces if not _is_copied(plans[p.table])], rank)
    copied, _ = _regions(plans, [p for p in pieces if _is_copied(plans[p.table])], rank)
    home_slots = [used[r] for r in range(world)]
    everywhere, per_host = find_hot(plans, home, topology.local)
    copied, hot, copy_bounds, dense_bounds = lay_copies(copied, everywhere, world)
    groups = pieces[0].groups
    hosts = sorted({topology.host(r) for r in groups.members(groups.group(rank))})
    host_copies, host_bounds = lay_host_copies(per_host, topology, hosts)
    asked_homes, route = home_slots, [*home, *copied]
    of_hot = [*hot, *host_copies]
    is_merged = any(plans[piece.table].merged for piece in pieces)
    if first.is_relayed:
        asked_homes, route = _relay(home, home_slots, topology, rank)
    if is_merged:
        asked_homes, moves = _merge(home_slots, topology, rank)
        route = [*(moves(region) for region in home), *copied]
        of_hot = [moves(region) for region in of_hot]
    beside = topology.host(rank) * topology.local
    asked_slots = list(asked_homes)
    for other in range(world):
        if not is_merged or topology.host(other) == topology.host(rank):
            asked_slots[other] += host_bounds[other % topology.local][-1]
    places = [(world, region.start) for region in hot]
    for region in host_copies:
        assert region.holder is not None
        target = beside + region.holder
        places.append((target, asked_homes[target] + region.start))
    index = index_hot(of_hot, asked_slots, places)
    entries, lookups = _entries(plans, pieces, route)
    members = [
        (r, e, piece)
        for piece, e in zip(pieces, entries, strict=True)
        for r, reader in enumerate(readers)
        if reader.table == piece.table
    ]
    members.sort(key=lambda member: member[0])  # output order; pieces of a reader stay in order
    of_reader = [plans[piece.table] for _, _, piece in members]

    def tensor(values: Sequence[int] | Ints) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    def flags(values: list[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.bool, device=device)

    deduped = [p.dedup or _owner_pools(p) or _is_copied(p) for p in of_reader]
    return StackLayout(
        groups=groups,
        dim=pieces[0].columns[1] - pieces[0].columns[0],
        table_dim=first.embedding_dim,
        dtype=parse_dtype(first.data_type),
        trainable=first.trainable,
        is_relayed=first.is_relayed,
        is_merged=is_merged,
        tables=tuple(dict.fromkeys(p.table for p in pieces)),
        readers=tuple(r for r, _, _ in members),
        columns=tuple(piece.columns for _, _, piece in members),
        home=tuple(home),
        copied=tuple(copied),
        hot=tuple(hot),
        host_copies=tuple(host_copies),
        home_slots=tuple(home_slots),
        asked_slots=tuple(asked_slots),
        asked_homes=tuple(asked_homes),
        host_bounds=tuple(host_bounds[rank % topology.local]),
        copy_bounds=tuple(copy_bounds),
        dense_bounds=tuple(dense_bounds),
        is_copied=flags([_is_copied(p) for p in of_reader]),
        is_pooled=flags([_owner_pools(p) for p in of_reader]),
        is_deduped=flags(deduped),
        has_pooled=any(_owner_pools(p) for p in of_reader),
        all_deduped=all(deduped),
        num_shards=tensor([p.virtual_shards for p in of_reader]),
        shard_bits=_shard_bits({p.virtual_shards for p in of_reader}),
        first_entry=tensor([e for _, e, _ in members]),
        owner=tensor(lookups[0]),
        slot0=tensor(lookups[1]),
        stride=tensor(lookups[2]),
        hot_keys=tensor(index[0]),
        hot_ranks=tensor(index[1]),
        copy_keys=tensor(index[2]),
        copy_ranks=tensor(index[3]),
        hot_in_order=not (copied or host_copies) and bool((np.diff(index[2]) > 0).all()),
    )


def _relay(
    home: Sequence[Region], home_slots: Sequence[int], topology: Topology, rank: int
) -> tuple[list[int], list[Region]]:
    """Slots each rank can be asked for, and the regions as slots of the peer that relays them."""
    local = topology.local
    hosts = [sum(home_slots[h * local : (h + 1) * local]) for h in range(topology.hosts)]
    route = []
    for region in home:
        first = topology.host(region.rank) * local
        start = region.start + sum(home_slots[first : region.rank])
        route.append(replace(region, rank=first + rank % local, start=start))
    return [hosts[topology.host(r)] for r in range(topology.world)], route


def _merge(
    home_slots: Sequence[int], topology: Topology, rank: int
) -> tuple[list[int], Callable[[Region], Region]]:
    """Slots of home rows each rank can be asked for, and what moves a region to whom to ask."""
    local, first = topology.local, topology.host(rank) * topology.local
    by_host = np.reshape(home_slots, (topology.hosts, local))
    before = np.cumsum(by_host, 0) - by_host
    asked = [0] * topology.world
    asked[first : first + local] = by_host.sum(0).tolist()

    def moved(region: Region) -> Region:
        shift = int(before[topology.host(region.rank), region.rank % local])
        return replace(
            region,
            rank=first + region.rank % local,
            start=region.start + shift,
            home_start=region.home_start + shift,
        )

    return asked, moved


def _entries(
    plans: Sequence[TablePlan], pieces: Sequence[_Piece], route: Sequence[Region]
) -> tuple[list[int], tuple[Ints, ...]]:
    """Where each piece's (piece, virtual shard) entries begin; owner, slot0 and stride of all."""
    by_piece: dict[tuple[int, tuple[int, int]], list[Region]] = {}
    for region in route:
        by_piece.setdefault((region.table, region.columns), []).append(region)
    starts, at = [], 0
    columns: list[list[Ints]] = [[], [], []]
    for piece in pieces:
        regions = sorted(by_piece[piece.table, piece.columns], key=lambda r: r.owner)
        homes = plans[piece.table].homes()
        shard = np.arange(homes.num_shards, dtype=np.int64)
        owner = shard % homes.num_owners
        columns[0].append(np.array([r.rank for r in regions])[owner])
        columns[1].append(np.array([r.start for r in regions])[owner] + shard // homes.num_owners)
        columns[2].append(np.array([homes.width(r.owner) for r in regions])[owner])
        starts.append(at)
        at += homes.num_shards
    return starts, tuple(np.concatenate(c) for c in columns)


def _shard_bits(sizes: set[int]) -> int | None:
    size = next(iter(sizes))
    return size.bit_length() - 1 if len(sizes) == 1 and size & (size - 1) == 0 else None


def _is_copied(plan: TablePlan) -> bool:
    return plan.rest.copies is Copies.WORLD


def _regions(
    plans: Sequence[TablePlan], pieces: Sequence[_Piece], asker: int
) -> tuple[list[Region], Counter[int]]:
    """Where each (piece, rank) of the asker's group starts, and how many rows each rank gets."""
    regions: list[Region] = []
    used: Counter[int] = Counter()
    for piece in pieces:
        homes, groups = plans[piece.table].homes(), piece.groups
        for owner, rank in enumerate(groups.move(piece.ranks, groups.group(asker))):
            region = Region(
                table=piece.table,
                rank=rank,
                replicas=groups.replicas(rank),
                owner=owner,
                homes=homes,
                columns=piece.columns,
                start=used[rank],
                sums=plans[piece.table].rest.sums,
            )
            regions.append(region)
            used[rank] += region.num_rows
    return regions, used
