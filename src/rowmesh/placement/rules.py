"""The rules a plan obeys, and the exactness that follows from its settings."""

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import PlanError, did_you_mean
from rowmesh.placement.columns import num_blocks
from rowmesh.placement.groups import can_merge
from rowmesh.placement.plan import (
    PLAN_VERSION,
    Copies,
    Exactness,
    Exchange,
    HotSet,
    MeshShape,
    Plan,
    TablePlan,
    Tier,
)
from rowmesh.tables import MAX_DIM, MAX_ROWS, PoolingType
from rowmesh.topology import MAX_RANKS

__all__ = ["CODEC_NAMES", "EDGES", "MAX_DEPTH", "check", "exactness"]

EDGES = (
    "status",
    "counts",
    "ids",
    "sample weights",
    "look-ahead bits",
    "rows",
    "pooled",
    "backward",
    "column squares",
    "hot gradients",
    "dense",
    "tower gradients",
    "replica sync",
    "tier move",
    "checkpoint",
)
MAX_DEPTH = 8
MAX_SHARDS = 16 * MAX_RANKS  # virtual shards of a table, of which every rank has a list
SYNC_MODES, SYNC_FORMS = ("gradients", "weights", "moments-first"), ("sparse", "dense")
CODEC_NAMES = ("fp32", "fp16", "bf16", "int8", "threshold", "topk")
_CODABLE = {"rows", "pooled", "backward", "hot gradients", "dense", "tower gradients"}
_SIDECAR = re.compile(r"hot[\w-]*\.npy")  # no name that a run's folder has for another file
_CODEC = re.compile(r"(\w+)(?:\((\d*\.?\d+(?:[eE][+-]?\d+)?(?:, *\d+)?)\))?")


def check(plan: Plan) -> None:
    """Raise `PlanError` at the first broken rule."""
    if plan.version != PLAN_VERSION:
        raise PlanError(f"plan version {plan.version} is not {PLAN_VERSION}, the one known here")
    _check_mesh(plan.mesh)
    _check_groups(plan)
    names = [t.name for t in plan.tables]
    if twice := {n for n in names if names.count(n) > 1}:
        raise PlanError(f"tables planned more than once: {sorted(twice)}")
    for table in plan.tables:
        _check_table(plan, table)
    for codec in plan.codecs:
        if codec.edge not in _CODABLE:
            raise PlanError(f"edge {codec.edge!r} takes no codec: known are {sorted(_CODABLE)}")
        if not codec.stack:
            raise PlanError(f"the codec of edge {codec.edge!r} is empty: say fp32")
        for name in codec.stack:
            _check_codec(name, codec.edge)
    if not 1 <= plan.depth <= MAX_DEPTH:
        raise PlanError(f"depth {plan.depth} must be from 1 (nothing ahead) to {MAX_DEPTH} batches")
    if any(n < 1 for n in plan.dense):
        raise PlanError(f"dense buckets must not be empty, got {plan.dense}")


def _check_mesh(mesh: MeshShape) -> None:
    if mesh.hosts < 1 or mesh.local < 1:
        raise PlanError(f"a mesh of {mesh.hosts} hosts x {mesh.local} ranks has no ranks")
    if mesh.hosts * mesh.local > MAX_RANKS:
        raise PlanError(
            f"a mesh of {mesh.hosts} hosts x {mesh.local} ranks has more than {MAX_RANKS:,} ranks"
        )
    _check_size(mesh, mesh.group, "")


def _check_size(mesh: MeshShape, size: int, where: str) -> None:
    world = mesh.hosts * mesh.local
    if size < 1 or world % size:
        raise PlanError(f"{where}shard groups of {size} ranks do not divide {world} ranks")
    if size % mesh.local and mesh.local % size:
        raise PlanError(
            f"{where}shard groups of {size} ranks neither fill whole hosts of {mesh.local} ranks "
            f"nor divide one: choose a multiple or a divisor of {mesh.local}"
        )


def _check_groups(plan: Plan) -> None:
    for table in plan.tables:
        if table.group is not None:
            _check_size(plan.mesh, table.group, f"table {table.name!r}: ")
    sizes = sorted({plan.mesh.group, *(t.group for t in plan.tables if t.group is not None)})
    for small, large in pairwise(sizes):
        if large % small:
            raise PlanError(
                f"shard groups of {small} and of {large} ranks: sizes of one plan must each "
                f"divide the next larger one"
            )
    sync = plan.sync
    for what, word, known in (("mode", sync.mode, SYNC_MODES), ("form", sync.form, SYNC_FORMS)):
        if word not in known:
            raise PlanError(f"sync {what} {word!r} is unknown{did_you_mean(str(word), known)}")
    if type(sync.period) is not int or sync.period < 1:
        raise PlanError(f"sync period {sync.period!r} must be a whole number of steps, at least 1")
    if sync.mode == "gradients" and (sync.period > 1 or sync.form != "sparse"):
        raise PlanError(
            f"gradients are synced every step, of touched rows: period {sync.period} and form "
            f"{sync.form!r} are for mode 'weights' or 'moments-first'"
        )


def _check_table(plan: Plan, table: TablePlan) -> None:
    where = f"table {table.name!r}"
    if table.num_embeddings < 1 or table.embedding_dim < 1:
        raise PlanError(f"{where} needs at least one row and one column")
    if table.num_embeddings > MAX_ROWS or table.embedding_dim > MAX_DIM:
        raise PlanError(
            f"{where} has {table.num_embeddings:,} rows of {table.embedding_dim:,} columns, but "
            f"may have {MAX_ROWS:,} of {MAX_DIM:,} at most"
        )
    if not 1 <= table.virtual_shards <= MAX_SHARDS:
        raise PlanError(
            f"{where}: {table.virtual_shards} virtual shards, but it must be from 1 to {MAX_SHARDS}"
        )
    if not table.tiers or table.rest.rows != "rest":
        raise PlanError(f"{where}: the last tier must hold the rest of the rows")
    if any(not isinstance(t.rows, HotSet) for t in table.tiers[:-1]):
        raise PlanError(f"{where}: only the last tier may hold the rest of the rows")
    if table.pooling is PoolingType.NONE and table.exchange is Exchange.POOLED:
        raise PlanError(f"{where} is a sequence table: its exchange must be 'rows'")
    if table.tower is not None and table.tower not in plan.towers:
        raise PlanError(f"{where}: tower {table.tower!r} is not among {list(plan.towers)}")
    for tier in table.tiers:
        _check_tier(plan, table, tier, where)
    if table.hot:
        _check_hot(table, where)
    if table.merged:
        _check_merged(plan, table, where)


def _check_merged(plan: Plan, table: TablePlan, where: str) -> None:
    if table.exchange is Exchange.POOLED or not table.dedup or table.rest.copies is Copies.WORLD:
        raise PlanError(
            f"{where}: merged requests are for distinct rows: its exchange must be 'rows', with "
            f"dedup, and its rows on some ranks, not on all"
        )
    groups = plan.groups(table)
    if not can_merge(groups, plan.mesh.topology):
        raise PlanError(
            f"{where}: requests are merged on hosts of several ranks, in shard groups of several "
            f"whole hosts next to each other; here are {groups.layout} groups of {groups.size} "
            f"ranks on {plan.mesh.hosts} hosts x {plan.mesh.local}"
        )
    if plan.tree == "flat":
        raise PlanError(
            f"{where}: gradients of merged requests are added up inside a host first: the plan's "
            f"tree must be 'host-first', not 'flat'"
        )


def _check_hot(table: TablePlan, where: str) -> None:
    if table.exchange is Exchange.POOLED:
        raise PlanError(
            f"{where} has hot rows, which a bag may mix with others: its exchange must be 'rows'"
        )
    if table.rest.copies is Copies.WORLD:
        raise PlanError(f"{where} is copied to every rank as it is: it needs no hot rows")
    seen: list[NDArray[np.int64]] = []
    for tier, rows in table.hot:
        if tier.copies is Copies.GROUP:
            raise PlanError(f"{where}: hot rows are copied to the world or to every host")
        if not _SIDECAR.fullmatch(rows.file):
            raise PlanError(
                f"{where}: its hot rows are in {rows.file!r}, but must be in a file hot….npy "
                f"beside the plan"
            )
        if not 1 <= rows.count <= table.num_embeddings:
            raise PlanError(f"{where}: {rows.count:,} of {table.num_embeddings:,} rows are hot")
        if rows.ids is not None:
            if rows.ids[-1] >= table.num_embeddings:
                raise PlanError(
                    f"{where}: hot row {rows.ids[-1]} is outside its {table.num_embeddings} rows"
                )
            seen.append(rows.ids)
    if len(seen) > 1 and len(np.unique(np.concatenate(seen))) < sum(map(len, seen)):
        raise PlanError(f"{where}: a row is in two of its hot sets")


def _check_tier(plan: Plan, table: TablePlan, tier: Tier, where: str) -> None:
    mesh, split, ranks = plan.mesh, tier.split, tier.ranks
    world = mesh.hosts * mesh.local
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= world:
        raise PlanError(f"{where}: ranks {list(ranks)} must be distinct and in 0..{world - 1}")
    if tier.copies is Copies.WORLD and (split.kind != "whole" or len(ranks) != world):
        raise PlanError(f"{where}: copies on the whole world are whole and list all {world} ranks")
    if tier.sums != "sparse" and tier.copies is not Copies.WORLD:
        raise PlanError(f"{where}: {tier.sums} sums are of copies on the whole world")
    if tier.copies is Copies.HOST:
        _check_host_copies(plan, table, tier, where)
    groups = plan.groups(table)
    if tier.copies is Copies.GROUP and any(groups.group(rank) for rank in ranks):
        raise PlanError(
            f"{where}: ranks {list(ranks)} must be of its first shard group, which has "
            f"{groups.size} of {world} ranks ({groups.layout})"
        )
    if tier.copies is Copies.GROUP and split.kind == "whole" and len(ranks) != 1:
        raise PlanError(f"{where}: a whole copy lives on one rank, got {list(ranks)}")
    if split.kind == "whole" and (split.columns != 1 or split.rows != "none"):
        raise PlanError(f"{where}: a whole copy has no column or row split")
    most = num_blocks(table.embedding_dim)
    if not 1 <= split.columns <= most:
        raise PlanError(
            f"{where}: {split.columns} column pieces of {table.embedding_dim} columns, which are "
            f"cut into at most {most}: choose another dim, or fewer pieces"
        )
    if split.kind == "boxes" and tier.copies is Copies.GROUP:
        _check_boxes(plan, table, tier, where)


def _check_host_copies(plan: Plan, table: TablePlan, tier: Tier, where: str) -> None:
    mesh, split, ranks = plan.mesh, tier.split, tier.ranks
    if split.kind == "boxes" and (split.rows != "host" or split.columns > 1):
        raise PlanError(f"{where}: copies per host are whole or split with rows=host")
    if table.tower is not None:
        raise PlanError(f"{where} is in tower {table.tower!r}: it cannot be copied per host too")
    if split.kind == "boxes" and ranks != tuple(range(mesh.hosts * mesh.local)):
        raise PlanError(f"{where}: copies per host that are split list all ranks in order")
    peers = tuple(range(ranks[0] % mesh.local, mesh.hosts * mesh.local, mesh.local))
    if split.kind == "whole" and ranks != peers:
        raise PlanError(
            f"{where}: whole copies per host list one rank of every host, with one local rank, "
            f"as {list(peers)}, not {list(ranks)}"
        )
    groups = plan.groups(table)
    if groups.count > 1 and (groups.size % mesh.local or groups.layout == "strided"):
        raise PlanError(
            f"{where}: copies per host need shard groups of whole hosts, next to each other: "
            f"contiguous ones of a multiple of {mesh.local} ranks"
        )
    if plan.tree == "flat" and mesh.hosts > 1 and mesh.local > 1:
        raise PlanError(
            f"{where}: gradients of copies per host are added up inside a host first: the plan's "
            f"tree must be 'host-first', not 'flat'"
        )


def _check_boxes(plan: Plan, table: TablePlan, tier: Tier, where: str) -> None:
    mesh, groups = plan.mesh, plan.groups(table)
    ranks, columns, rows = tier.ranks, tier.split.columns, tier.split.rows
    if len(ranks) % columns:
        raise PlanError(f"{where}: {len(ranks)} ranks do not divide into {columns} columns")
    owners = len(ranks) // columns
    if rows == "none" and owners != 1:
        raise PlanError(
            f"{where}: split by columns alone it needs {columns} ranks, got {len(ranks)}"
        )
    if owners > table.virtual_shards:
        raise PlanError(
            f"{where}: {owners} ranks share {table.virtual_shards} virtual shards; S is fixed "
            f"when the table is created: use at most {table.virtual_shards} ranks"
        )
    if rows == "host" and owners > 1 and groups.layout == "strided" and mesh.local % groups.count:
        raise PlanError(
            f"{where}: {groups.count} strided groups do not divide hosts of {mesh.local} ranks, so "
            f"that no split with rows=host is inside hosts in all of them: use contiguous groups"
        )
    for first in range(0, len(ranks) if rows == "host" else 0, owners):
        for rank in ranks[first : first + owners]:
            if mesh.topology.host(rank) != mesh.topology.host(ranks[first]):
                raise PlanError(
                    f"{where}: ranks {ranks[first]} and {rank} share a column piece split with "
                    f"rows=host, but are on different hosts (hosts have {mesh.local} ranks)"
                )


def _check_codec(text: str, edge: str) -> None:
    match = _CODEC.fullmatch(text)
    if match is None or match[1] not in CODEC_NAMES:
        raise PlanError(f"unknown codec {text!r} on edge {edge!r}: known are {CODEC_NAMES}")
    if (match[2] is not None) != (match[1] in ("threshold", "topk")):
        raise PlanError(f"codec {text!r} on edge {edge!r}: threshold and topk take (eta, ...)")


def exactness(plan: Plan) -> Exactness:
    """The weakest label of any setting; `Exactness` says what each one promises."""
    codecs = {name for codec in plan.codecs for name in codec.stack} - {"fp32"}
    if plan.towers or any(c.startswith("topk") for c in codecs):
        return Exactness.E4
    if codecs:
        return Exactness.E3
    if plan.has_replicas and plan.sync.mode != "gradients":
        return Exactness.E2
    for table in plan.tables:
        split_rows = table.rest.split.rows == "all" and table.homes().num_owners > 1
        if table.exchange is Exchange.POOLED and split_rows:
            return Exactness.E1
    return Exactness.E0
