"""`predict`: the ledger of one training step, from the plan and the batches alone.

Written from the formulas of docs/plan.md, one table and one rank at a time, and deliberately
without the runtime's routes: that the two agree to the byte is a test of both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Copies, Exchange, Plan, TablePlan

__all__ = ["predict"]

Batches = Sequence[KeyedJaggedTensor | Mapping[str, KeyedJaggedTensor]]
_Traffic = Counter[tuple[str, int, int]]  # (edge, source, target) -> bytes


def predict(plan: Plan, batches: Batches) -> list[dict[str, dict[str, int]]]:
    """Bytes every rank sends in one training step: ``[rank][edge][link]``.

    Args:
        plan: A validated plan.
        batches: Per rank, the features of the model's collection, or of each by its path.

    Returns:
        The same numbers as each rank's ledger shows after the step, edges of zero left out.
    """
    world = plan.mesh.hosts * plan.mesh.local
    if len(batches) != world:
        raise InputError(f"the plan has {world} ranks, but {len(batches)} batches were given")
    traffic: _Traffic = Counter()
    for path in dict.fromkeys(t.collection for t in plan.tables):
        tables = [t for t in plan.tables if t.collection == path]
        mine = [b if isinstance(b, KeyedJaggedTensor) else b[path] for b in batches]
        _collection(traffic, plan, tables, mine)
    for elements in plan.dense if world > 1 else ():
        _dense(traffic, elements, world)
    return _by_rank(plan, traffic)


def _by_rank(plan: Plan, traffic: _Traffic) -> list[dict[str, dict[str, int]]]:
    topology = plan.mesh.topology
    found: list[dict[str, dict[str, int]]] = [{} for _ in range(topology.world)]
    for (edge, source, target), num_bytes in sorted(traffic.items()):
        if num_bytes and source != target:
            links = found[source].setdefault(edge, {})
            link = topology.link(source, target).value
            links[link] = links.get(link, 0) + num_bytes
    return found


def _stack(table: TablePlan) -> tuple[int, str, bool, bool]:
    """Tables with the same value here share their messages."""
    pooled = table.exchange is Exchange.POOLED and table.rest.copies is not Copies.WORLD
    widened = table.data_type != "fp32" and pooled
    return table.embedding_dim, table.data_type, table.trainable, widened


def _collection(
    traffic: _Traffic,
    plan: Plan,
    tables: Sequence[TablePlan],
    batches: Sequence[KeyedJaggedTensor],
) -> None:
    world, ranks = len(batches), range(len(batches))
    stacks = {_stack(t) for t in tables}
    wide = any(_most_slots(tables, s, world) >= 1 << 31 for s in stacks)
    id_bytes = 8 if wide else 4
    for source in ranks:
        for target in ranks:
            traffic["status", source, target] += 8
            traffic["counts", source, target] += 8 * (1 + 4 * len(stacks))
    for table in tables:
        if table.rest.copies is not Copies.WORLD:
            for rank in ranks:
                _home_table(traffic, table, batches[rank], rank, id_bytes)
    copied = {_stack(t) for t in tables if t.rest.copies is Copies.WORLD and t.trainable}
    for stack in copied:
        members = [t for t in tables if _stack(t) == stack and t.rest.copies is Copies.WORLD]
        _copied_stack(traffic, members, batches, id_bytes)
        for source in ranks:
            for target in ranks:
                traffic["counts", source, target] += 8


def _most_slots(tables: Sequence[TablePlan], stack: tuple[int, str, bool, bool], world: int) -> int:
    slots = [0] * world
    for table in tables:
        if _stack(table) == stack and table.rest.copies is not Copies.WORLD:
            homes = table.homes()
            for owner, rank in enumerate(table.rest.ranks):
                slots[rank] += homes.num_slots(owner)
    return max(slots)


def _ids(table: TablePlan, batch: KeyedJaggedTensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of all the table's features, and a number for the bag of each."""
    ids: list[NDArray[np.int64]] = []
    bags: list[NDArray[np.int64]] = []
    for feature in table.feature_names:
        jagged = batch[feature]
        ids.append(jagged.values().cpu().numpy().astype(np.int64))
        sample = np.repeat(np.arange(batch.stride()), jagged.lengths().cpu().numpy())
        bags.append(sample + len(bags) * batch.stride())
    return np.concatenate(ids), np.concatenate(bags)


def _home_table(
    traffic: _Traffic, table: TablePlan, batch: KeyedJaggedTensor, rank: int, id_bytes: int
) -> None:
    """Ids out, vectors back, gradients out, between ``rank`` and the owners of one table."""
    ids, bags = _ids(table, batch)
    pooled = table.exchange is Exchange.POOLED
    if not pooled and table.dedup:
        ids = np.unique(ids)
    owners = table.homes().owners(ids)
    vector_bytes = 4 * table.embedding_dim if pooled else table.row_bytes
    for index, owner in enumerate(table.rest.ranks):
        chosen = owners == index
        num_ids = int(chosen.sum())
        num_vectors = len(np.unique(bags[chosen])) if pooled else num_ids
        traffic["ids", rank, owner] += num_ids * id_bytes
        if pooled and table.weighted:
            traffic["sample weights", rank, owner] += num_ids * 4
        traffic[table.exchange.value, owner, rank] += num_vectors * vector_bytes
        if table.trainable:
            traffic["backward", rank, owner] += num_vectors * 4 * table.embedding_dim


def _copied_stack(
    traffic: _Traffic,
    tables: Sequence[TablePlan],
    batches: Sequence[KeyedJaggedTensor],
    id_bytes: int,
) -> None:
    """Gradients of touched rows to their sum owner; sums of rows any rank touched to all."""
    world, row = len(batches), 4 * tables[0].embedding_dim
    touched = [[np.unique(_ids(t, b)[0]) for b in batches] for t in tables]
    for target in range(world):
        size, union = 0, 0
        from_source = [0] * world
        for table, rows in zip(tables, touched, strict=True):
            homes, index = table.homes(), table.rest.ranks.index(target)
            size += homes.num_slots(index)
            mine = [r[homes.owners(r) == index] for r in rows]
            union += len(np.unique(np.concatenate(mine)))
            from_source = [n + len(m) for n, m in zip(from_source, mine, strict=True)]
        for source, count in enumerate(from_source):
            traffic["ids", source, target] += _set_words(count, size) * id_bytes
            traffic["hot gradients", source, target] += count * row
            sums = _set_words(union, size) * id_bytes + union * row
            traffic["hot gradients", target, source] += sums


def _set_words(count: int, size: int) -> int:
    """Which of ``size`` rows: nothing if all, else a list or a bitmap."""
    return 0 if count == size else min(count, -(-size // 32))


def _dense(traffic: _Traffic, elements: int, world: int) -> None:
    """A chunk to every rank, which adds it up and sends the sum to all."""
    size = -(-elements // world)
    chunks = [max(0, min(size, elements - size * rank)) for rank in range(world)]
    for source in range(world):
        for target in range(world):
            traffic["dense", source, target] += 4 * (chunks[target] + chunks[source])
