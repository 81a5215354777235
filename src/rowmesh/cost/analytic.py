"""`predict`: the ledger of one training step, from the plan and the batches alone.

Written from the formulas of docs/plan.md, one table and one rank at a time, and deliberately
without the runtime's routes: that the two agree to the byte is a test of both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rowmesh.cost.merged import add_merged, may_follow
from rowmesh.cost.pieces import (
    Piece,
    Traffic,
    cold_ids_of,
    copies_of,
    host_copies_of,
    ids_of,
    is_copied,
    pieces_of,
)
from rowmesh.cost.replicas import add_replica_sync
from rowmesh.cost.sums import add_host_rows, add_host_sums, add_sparse_sums
from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, Exchange, Plan, TablePlan
from rowmesh.placement.codecs import WireForm, wire_form
from rowmesh.placement.columns import num_blocks
from rowmesh.placement.memory import RuleState, rule_state
from rowmesh.stats import distinct
from rowmesh.topology import Topology

__all__ = ["predict"]

Batches = Sequence[KeyedJaggedTensor | Mapping[str, KeyedJaggedTensor]]


def predict(
    plan: Plan,
    batches: Batches,
    *,
    sparse: str = "rowwise_adagrad",
    earlier: Sequence[Batches] = (),
    is_last: bool = False,
) -> list[dict[str, dict[str, int]]]:
    """Bytes every rank sends in one training step: ``[rank][edge][link]``.

    Args:
        plan: A validated plan.
        batches: Per rank, the features of the model's collection, or of each by its path.
        sparse: Update rule of the tables: a name of `RULE_STATES`.
        earlier: Batches of the steps since weights of replicas were last synced, where the plan
            syncs them: they are with this step if it is the period-th.
        is_last: No batch has been begun behind these, as at the end of a loop: nobody can tell
            which gradients of merged requests may follow the step.

    Returns:
        The same numbers as each rank's ledger shows after the step, edges of zero left out.

    Raises:
        InputError: If batches of a rank are missing, the rule is unknown, or a sync is overdue.
    """
    world, state = plan.mesh.hosts * plan.mesh.local, rule_state(sparse)
    for step in (batches, *earlier):
        if len(step) != world:
            raise InputError(f"the plan has {world} ranks, but {len(step)} batches were given")
    if plan.has_replicas and len(earlier) >= plan.sync.period:
        raise InputError(
            f"{len(earlier)} earlier steps were given, but replicas sync every "
            f"{plan.sync.period}: give those since the last sync"
        )
    traffic: Traffic = Counter()
    for path in dict.fromkeys(t.collection for t in plan.tables):
        tables = [t for t in plan.tables if t.collection == path]
        steps = [
            [b if isinstance(b, KeyedJaggedTensor) else b[path] for b in step]
            for step in (*earlier, batches)
        ]
        _collection(traffic, plan, tables, steps, state, is_last)
        for table in tables if state.adds_squares else ():
            if table.trainable and table.rest.split.columns > 1:
                _column_squares(traffic, plan, table, steps[-1])
    if world > 1:
        _buckets(traffic, plan, world)
    return _by_rank(plan, traffic)


def _by_rank(plan: Plan, traffic: Traffic) -> list[dict[str, dict[str, int]]]:
    topology = plan.mesh.topology
    found: list[dict[str, dict[str, int]]] = [{} for _ in range(topology.world)]
    for (edge, source, target), num_bytes in sorted(traffic.items()):
        if num_bytes and source != target:
            links = found[source].setdefault(edge, {})
            link = topology.link(source, target).value
            links[link] = links.get(link, 0) + num_bytes
    return found


def _collection(
    traffic: Traffic,
    plan: Plan,
    tables: Sequence[TablePlan],
    steps: Sequence[Sequence[KeyedJaggedTensor]],
    state: RuleState,
    is_last: bool,
) -> None:
    batches, topology = steps[-1], plan.mesh.topology
    apart = any(tier.copies is Copies.HOST for table in tables for tier in table.tiers)
    form, merges = wire_form(plan), any(table.merged for table in tables)
    pieces = [
        replace(piece, apart=apart, merges=merges, form=form)
        for table in tables
        for piece in pieces_of(table, plan.groups(table))
    ]
    stacks = {piece.stack: [p for p in pieces if p.stack == piece.stack] for piece in pieces}
    wide = any(_most_slots(members, topology) >= 1 << 31 for members in stacks.values())
    id_bytes, everyone = (8 if wide else 4), range(topology.world)
    _to_all(traffic, "status", everyone, 8)
    _to_all(traffic, "counts", everyone, 8 * (1 + 4 * len(stacks)))
    for members in stacks.values():
        groups, is_trained = members[0].groups, members[0].table.trainable
        for ranks in map(groups.members, range(groups.count)):
            inside: Traffic = Counter()
            mine = [batches[rank] for rank in ranks]
            _group(inside, members, mine, id_bytes, groups.shape(topology))
            if plan.depth > 1 and not members[0].table.is_relayed:
                _look_ahead_bits(inside, members, groups.shape(topology), is_last)
            for (edge, source, target), num_bytes in inside.items():
                traffic[edge, ranks[source], ranks[target]] += num_bytes
        copies = [c for piece in members for c in copies_of(piece) if c.sums == "sparse"]
        if copies and is_trained:
            add_sparse_sums(traffic, copies, batches, id_bytes)
            _to_all(traffic, "counts", everyone, 8)
    trained = [members for members in stacks.values() if members[0].table.trainable]
    add_replica_sync(
        traffic, trained, steps, topology=topology, sync=plan.sync, state=state, id_bytes=id_bytes
    )


def _group(
    traffic: Traffic,
    members: Sequence[Piece],
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
    shape: Topology,
) -> None:
    """What pieces of one stack send inside one shard group of ``shape``, from place to place."""
    table = members[0].table
    if any(piece.table.merged for piece in members):
        add_merged(traffic, members, batches, id_bytes, shape)
    for piece in members:
        is_direct = not (is_copied(piece.table) or piece.table.merged)
        for place, batch in enumerate(batches if is_direct else ()):
            if table.is_relayed:
                _relayed_piece(traffic, piece, batch, place, id_bytes, shape.local)
            else:
                _home_piece(traffic, piece, batch, place, id_bytes)
    if table.is_relayed:
        for host in {shape.host(place) for piece in members for place in piece.ranks}:
            beside = [place for place in range(shape.world) if shape.host(place) == host]
            _to_all(traffic, "counts", beside, 8 * shape.hosts)
    per_host = [c for piece in members for c in host_copies_of(piece)]
    for copy in per_host:
        add_host_rows(traffic, copy, batches, id_bytes, shape)
    if per_host and table.trainable:
        add_host_sums(traffic, per_host, batches, id_bytes, shape)


def _look_ahead_bits(
    traffic: Traffic, members: Sequence[Piece], shape: Topology, is_last: bool
) -> None:
    """A bit from the owner for every row that is asked of a stack, in whole bytes.

    Another one, behind the next batch's, tells whether the gradient of a row may follow.
    """
    piece = next((p for p in members if p.table.merged), members[0])
    follow = not is_last and may_follow(piece.table, piece.groups)
    for (edge, owner, rank), num_bytes in list(traffic.items()):
        if edge == "rows":
            is_beside = shape.host(owner) == shape.host(rank)
            row_bytes = (piece.inside_bytes if is_beside else piece.wire_bytes)(edge)
            bits = -(-(num_bytes // row_bytes) // 8)
            traffic["look-ahead bits", owner, rank] += bits * (1 + (follow and not is_beside))


def _to_all(traffic: Traffic, edge: str, ranks: Sequence[int], num_bytes: int) -> None:
    for source in ranks:
        for target in ranks:
            traffic[edge, source, target] += num_bytes


def _most_slots(pieces: Sequence[Piece], topology: Topology) -> int:
    """Slots that one rank can be asked for: its own, its host's as a relay, or its peers'."""
    topology = pieces[0].groups.shape(topology)
    homes, copies = np.zeros((2, topology.hosts, topology.local), dtype=np.int64)
    for piece in pieces:
        if not is_copied(piece.table):
            slots = piece.table.homes()
            for owner, rank in enumerate(piece.ranks):
                homes[topology.host(rank), rank % topology.local] += slots.num_slots(owner)
            for copy in host_copies_of(piece):
                held = copy.holders(copy.rows, topology)
                copies += np.bincount(held, minlength=topology.local)
    if pieces[0].table.is_relayed:
        homes = homes.sum(1, keepdims=True)
    if any(piece.table.merged for piece in pieces):
        homes = homes.sum(0, keepdims=True)
    return int((homes + copies).max())


def _home_piece(
    traffic: Traffic, piece: Piece, batch: KeyedJaggedTensor, rank: int, id_bytes: int
) -> None:
    """Ids out, vectors back, gradients out, between ``rank`` and the owners of one piece."""
    table = piece.table
    ids, bags = cold_ids_of(table, batch)
    pooled = table.exchange is Exchange.POOLED
    if not pooled and table.dedup:
        ids = distinct(ids)
    owners = table.homes().owners(ids)
    for index, owner in enumerate(piece.ranks):
        chosen = owners == index
        num_ids = int(chosen.sum())
        num_vectors = len(distinct(bags[chosen])) if pooled else num_ids
        traffic["ids", rank, owner] += num_ids * id_bytes
        if pooled and table.weighted:
            traffic["sample weights", rank, owner] += num_ids * 4
        edge = table.exchange.value
        traffic[edge, owner, rank] += num_vectors * piece.wire_bytes(edge)
        if table.trainable:
            traffic["backward", rank, owner] += num_vectors * piece.wire_bytes("backward")


def _relayed_piece(
    traffic: Traffic,
    piece: Piece,
    batch: KeyedJaggedTensor,
    rank: int,
    id_bytes: int,
    local: int,
) -> None:
    """Bags between ``rank`` and its peer on the owners' host, its distinct rows beyond that."""
    table = piece.table
    ids, bags = ids_of(table, batch)
    relay = piece.ranks[0] - piece.ranks[0] % local + rank % local
    num_bags = len(distinct(bags))
    traffic["ids", rank, relay] += len(ids) * id_bytes
    if table.weighted:
        traffic["sample weights", rank, relay] += len(ids) * 4
    traffic["pooled", relay, rank] += num_bags * piece.wire_bytes("pooled")
    owners = table.homes().owners(distinct(ids))
    for index, owner in enumerate(piece.ranks):
        num_rows = int((owners == index).sum())
        traffic["ids", relay, owner] += num_rows * id_bytes
        traffic["rows", owner, relay] += num_rows * piece.wire_bytes("rows")
        if table.trainable:
            traffic["backward", relay, owner] += num_rows * piece.wire_bytes("backward")
    if table.trainable:
        traffic["backward", rank, relay] += num_bags * piece.wire_bytes("backward")


def _column_squares(
    traffic: Traffic, plan: Plan, table: TablePlan, batches: Sequence[KeyedJaggedTensor]
) -> None:
    """One float a column block, of every row that is stepped, to the owners of its other columns.

    A group steps the rows that its ranks touched, or, if gradients are synced, that any rank did.
    """
    groups = plan.groups(table)
    pieces = pieces_of(table, groups)
    block = table.embedding_dim // num_blocks(table.embedding_dim)
    for ranks in map(groups.members, range(groups.count)):
        chosen = batches if plan.sync.mode == "gradients" else [batches[rank] for rank in ranks]
        touched = distinct(np.concatenate([cold_ids_of(table, batch)[0] for batch in chosen]))
        owners = table.homes().owners(touched)
        for index in range(table.homes().num_owners):
            num_rows = int((owners == index).sum())
            for mine in pieces:
                for theirs in pieces:
                    source, target = ranks[mine.ranks[index]], ranks[theirs.ranks[index]]
                    num_bytes = num_rows * 4 * (mine.width // block)
                    traffic["column squares", source, target] += num_bytes


def _buckets(traffic: Traffic, plan: Plan, world: int) -> None:
    """Dense gradients, and of copies with dense sums a gradient and a flag a row."""
    lines = {"dense": 0, "bucket": 0}
    for table in plan.tables:
        for piece in pieces_of(table, plan.groups(table)) if table.trainable else ():
            for copy in copies_of(piece):
                if copy.sums in lines:
                    lines[copy.sums] += copy.count * (piece.width + 1)
    elements, form = list(plan.dense), wire_form(plan)
    if elements:
        elements[-1] += lines.pop("bucket")
    for size in elements:
        _bucket(traffic, "dense", size, world, plan.span, form)
    _bucket(traffic, "hot gradients", sum(lines.values()), world, plan.span, form)


def _bucket(
    traffic: Traffic, edge: str, elements: int, world: int, span: int, form: WireForm
) -> None:
    """Groups of ``span`` ranks add up a chunk each; so do, of that chunk, peers of the groups."""
    for first in range(0, world, span):
        _ring(traffic, edge, elements, range(first, first + span), form)
    for place, size in enumerate(_chunks(elements, span)):
        _ring(traffic, edge, size, range(place, world, span), form)


def _ring(traffic: Traffic, edge: str, elements: int, ranks: Sequence[int], form: WireForm) -> None:
    """A chunk to every rank, which adds it up and sends the sum to all."""
    chunks = [form.flat_bytes(edge, size) for size in _chunks(elements, len(ranks))]
    for i, source in enumerate(ranks):
        for j, target in enumerate(ranks):
            traffic[edge, source, target] += chunks[i] + chunks[j]


def _chunks(elements: int, count: int) -> list[int]:
    size = -(-elements // count)
    return [max(0, min(size, elements - size * i)) for i in range(count)]
