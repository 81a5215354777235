"""Bytes between replicas: what keeps the shard groups' copies of a row together.

Replicas are the ranks at one place of all M groups. Of a stack with S slots on each of them, two
replicas send each other what they have; three or more send slot s to replica s mod M, which
answers all. A dense sync parts the rows into M chunks instead, and says not which rows are meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.pieces import Piece, Traffic, host_copies_of, ids_of, set_words
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Sync, hot_ids
from rowmesh.placement.groups import Groups
from rowmesh.placement.memory import RuleState
from rowmesh.stats import distinct
from rowmesh.topology import Topology

__all__ = ["add_replica_sync"]

Ints = NDArray[np.int64]
Batches = Sequence[KeyedJaggedTensor]
_Asked = dict[str, tuple[Ints, Ints]]  # by table


def add_replica_sync(
    traffic: Traffic,
    stacks: Sequence[Sequence[Piece]],
    steps: Sequence[Batches],
    *,
    topology: Topology,
    sync: Sync,
    state: RuleState,
    id_bytes: int,
) -> None:
    """What replicas of the trained ``stacks`` of a collection send each other in a step.

    Args:
        traffic: Is added to.
        stacks: Pieces of each.
        steps: Batches of all ranks since the last sync of weights, those of this step last.
        topology: Of the mesh.
        sync: Of the plan.
        state: Of the update rule.
        id_bytes: Of a word in a set.
    """
    for size in sorted({pieces[0].groups.size for pieces in stacks}):
        mine = [pieces for pieces in stacks if pieces[0].groups.size == size]
        groups = mine[0][0].groups
        if groups.count == 1:
            continue
        shape, is_due = groups.shape(topology), len(steps) == sync.period
        now = [_Touched.of(pieces, steps[-1:], shape) for pieces in mine]
        if sync.mode == "gradients":
            row = [4 * pieces[0].width for pieces in mine]
            _add_sparse(traffic, now, row, id_bytes)
        if sync.mode == "moments-first" and state.adds_squares:
            _add_sparse(traffic, now, [4] * len(now), id_bytes)
        if sync.mode == "gradients" or not is_due:
            continue
        row = [_row_bytes(pieces[0], sync, state) for pieces in mine]
        if sync.form == "dense":
            _add_dense(traffic, now, row)
        else:
            since = [_Touched.of(pieces, steps, shape) for pieces in mine]
            _add_sparse(traffic, since, row, id_bytes)


def _row_bytes(piece: Piece, sync: Sync, state: RuleState) -> int:
    """Weights, and in mode ``weights`` the rule's state."""
    if sync.mode == "moments-first":
        return piece.row_bytes
    return piece.row_bytes + state.row_bytes + state.element_bytes * piece.width


@dataclass(frozen=True, slots=True)
class _Touched:
    """Of one stack: slots and rows of every place.

    Args:
        groups: Of the stack.
        sizes: Of each place S: home slots, and its copies per host.
        hot: Of each place, home slots of hot rows.
        slots: ``[group][place]``: slots that the group touched, home slots of hot rows left out.
    """

    groups: Groups
    sizes: list[int]
    hot: list[int]
    slots: list[list[Ints]]

    @staticmethod
    def of(pieces: Sequence[Piece], steps: Sequence[Batches], shape: Topology) -> "_Touched":
        groups = pieces[0].groups
        places, found = range(groups.size), []
        for ranks in map(groups.members, range(groups.count)):
            batches = [step[rank] for step in steps for rank in ranks]
            asked = {piece.table.name: _asked(piece, batches) for piece in pieces}
            found.append([_slots(pieces, place, asked, shape) for place in places])
        sizes = [_num_home(pieces, p) + len(_copies(pieces, p, {}, shape)) for p in places]
        return _Touched(groups, sizes, [_num_hot(pieces, p) for p in places], found)


def _asked(piece: Piece, batches: Batches) -> tuple[Ints, Ints]:
    """Distinct rows of a piece that batches ask for: those that are not hot, and all."""
    table = piece.table
    cold = every = distinct(np.concatenate([ids_of(table, batch)[0] for batch in batches]))
    for _, rows in table.hot:
        cold = cold[~np.isin(cold, hot_ids(rows, where=f"table {table.name!r}"))]
    return cold, every


def _owner(piece: Piece, place: int) -> int | None:
    return piece.ranks.index(place) if place in piece.ranks else None


def _num_home(pieces: Sequence[Piece], place: int) -> int:
    owners = [(piece.table.homes(), _owner(piece, place)) for piece in pieces]
    return sum(homes.num_slots(owner) for homes, owner in owners if owner is not None)


def _num_hot(pieces: Sequence[Piece], place: int) -> int:
    total = 0
    for piece in pieces:
        for _, rows in piece.table.hot:
            ids = hot_ids(rows, where=f"table {piece.table.name!r}")
            owners = np.asarray(piece.ranks)[piece.table.homes().owners(ids)]
            total += int((owners == place).sum())
    return total


def _slots(pieces: Sequence[Piece], place: int, asked: _Asked, shape: Topology) -> Ints:
    """Slots of a place that its group touches: its regions piece after piece, then its copies."""
    start, found = 0, list[Ints]()
    for piece in pieces:
        homes, owner = piece.table.homes(), _owner(piece, place)
        if owner is None:
            continue
        ids = asked[piece.table.name][0]
        found.append(start + homes.slots(ids[homes.owners(ids) == owner]))
        start += homes.num_slots(owner)
    found.append(start + np.flatnonzero(_copies(pieces, place, asked, shape)))
    return np.concatenate(found)


def _copies(
    pieces: Sequence[Piece], place: int, asked: _Asked, shape: Topology
) -> NDArray[np.bool_]:
    """Of the rows that a place holds for its host, by home, piece and tier: which are asked for."""
    touched = [np.empty(0, dtype=bool)]
    for home in range(shape.world):
        for piece in pieces:
            owner, homes = _owner(piece, home), piece.table.homes()
            for copy in () if owner is None else host_copies_of(piece):
                is_mine = copy.holders(copy.rows, shape) == place % shape.local
                mine = copy.rows[is_mine & (homes.owners(copy.rows) == owner)]
                touched.append(np.isin(mine, asked.get(piece.table.name, (mine, mine))[1]))
    return np.concatenate(touched)


def _add_sparse(
    traffic: Traffic, stacks: Sequence[_Touched], row_bytes: Sequence[int], id_bytes: int
) -> None:
    """Touched rows of every stack, and in two rounds if there are more than two replicas."""
    groups = stacks[0].groups
    rounds = 1 if groups.count == 2 else 2
    for place in range(groups.size):
        peers = groups.replicas(groups.rank(0, place))
        for source in peers:
            for target in peers:
                traffic["counts", source, target] += rounds * 8 * len(stacks)
        for stack, row in zip(stacks, row_bytes, strict=True):
            parts = [slots[place] for slots in stack.slots]
            if groups.count == 2:
                sent = [[_set_bytes(p, stack.sizes[place], row, id_bytes)] * 2 for p in parts]
            else:
                sent = _two_rounds(parts, stack.sizes[place], row, id_bytes)
            for i, source in enumerate(peers):
                for j, target in enumerate(peers):
                    traffic["replica sync", source, target] += sent[i][j]


def _set_bytes(rows: Ints, size: int, row: int, id_bytes: int) -> int:
    return set_words(len(rows), size) * id_bytes + len(rows) * row


def _two_rounds(parts: Sequence[Ints], size: int, row: int, id_bytes: int) -> list[list[int]]:
    """``[from][to]``: slots s to replica s mod M, and of its own what any replica has."""
    count = len(parts)
    sizes = [-(-(size - a) // count) for a in range(count)]
    union = distinct(np.concatenate(parts))
    sums = [_set_bytes(union[union % count == a], sizes[a], row, id_bytes) for a in range(count)]
    return [
        [
            _set_bytes(parts[i][parts[i] % count == j], sizes[j], row, id_bytes) + sums[i]
            for j in range(count)
        ]
        for i in range(count)
    ]


def _add_dense(traffic: Traffic, stacks: Sequence[_Touched], row_bytes: Sequence[int]) -> None:
    """Of all rows but stale homes a chunk to each replica, and the own chunk's means to all."""
    groups = stacks[0].groups
    for stack, row in zip(stacks, row_bytes, strict=True):
        for place in range(groups.size):
            rows = stack.sizes[place] - stack.hot[place]
            chunk, peers = -(-rows // groups.count), groups.replicas(groups.rank(0, place))
            sizes = [max(0, min(chunk, rows - chunk * i)) for i in range(groups.count)]
            for i, source in enumerate(peers):
                for j, target in enumerate(peers):
                    traffic["replica sync", source, target] += row * (sizes[i] + sizes[j])
