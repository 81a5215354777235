"""`Draft`: a unit under one option, in seconds, before it has ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost import Rates
from rowmesh.cost.expected import expect_alike
from rowmesh.cost.load import LINES, Part
from rowmesh.placement.memory import RuleState, alike_bytes
from rowmesh.planners.options import Option, Unit
from rowmesh.topology import Topology

__all__ = ["Draft", "Piece", "draft", "draft_alike", "lay_drafts", "scale_to_seconds"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` column pieces of the same width, one after the other.

    ``near`` is added to every rank of an owner's host, once for each owner; ``owner`` to the
    first three lines of every owner.
    """

    count: int
    near: Floats
    owner: Floats


@dataclass(frozen=True, slots=True)
class Draft:
    """What a unit costs and holds under one option on so many ranks, wherever they are.

    There are five lines, in seconds: sent and received inside the host, work, then sent and
    received across hosts by the card of the rank's host, the same for all its ranks.

    Args:
        option: The option.
        topology: Of the mesh.
        base: Line added to every rank.
        pieces: Of the unit's tables together.
        squares: Seconds an owner of each piece sends to its likes in every other piece, inside a
            host and ``[pieces, 2]`` across; none if no squares are sent.
        held: Bytes on each of the ranks, in their order.
        need: Most bytes on a rank.
        kinds: The exchanges that take place.
        sent: Bytes that leave a rank, over both links; mean over ranks.
    """

    option: Option
    topology: Topology
    base: Floats
    pieces: tuple[Piece, ...]
    squares: Floats | None
    held: NDArray[np.int64]
    need: int
    kinds: frozenset[str]
    sent: float


def lay_drafts(drafts: Sequence[Draft], ranks: Sequence[tuple[int, ...]]) -> Floats:
    """``[drafts, 5, W]``: the lines of every rank, of each draft on its ranks alone."""
    topology = drafts[0].topology
    shape = topology.hosts, topology.local
    pieces = [piece for made in drafts for piece in made.pieces]
    owns = np.zeros((len(pieces), topology.world))  # of each piece, 1 for its owners
    firsts, row = [], 0
    for made, mine in zip(drafts, ranks, strict=True):
        firsts.append(row)
        each, first = len(mine) // sum(piece.count for piece in made.pieces), 0
        for piece in made.pieces:
            last = first + each * piece.count
            owns[row, slice(None) if last - first == topology.world else mine[first:last]] = 1.0
            row, first = row + 1, last
    counts = owns.reshape(-1, *shape).sum(2)
    by_host = np.array([piece.near for piece in pieces])[:, :, None] * counts[:, None]
    lines: Floats = by_host.repeat(topology.local, 2)
    lines[:, :3] += np.array([piece.owner for piece in pieces])[:, :, None] * owns[:, None]
    if len(pieces) > len(drafts):
        lines = np.add.reduceat(lines, firsts, axis=0)
    lines += np.array([made.base for made in drafts])[:, :, None]
    for made, mine, found in zip(drafts, ranks, lines, strict=True):
        if made.squares is not None:
            _mind_neighbours(found, mine, made.squares, topology.local)
    return lines


def _mind_neighbours(lines: Floats, ranks: tuple[int, ...], squares: Floats, local: int) -> None:
    """Squares between pieces of one host do not cross; each piece is within a host here."""
    owners = len(ranks) // len(squares)
    hosts = [rank // local for rank in ranks[::owners]]
    if len(set(hosts)) == len(hosts):
        return
    same = np.equal.outer(hosts, hosts).astype(np.float64)
    sent = squares * (same.sum(1) - 1.0)[:, None]
    received = same @ squares - squares
    for line, amount in enumerate((sent, received)):
        lines[line, list(ranks)] += amount[:, 0].repeat(owners)
        cards = np.bincount(hosts, weights=amount[:, 1], minlength=lines.shape[1] // local)
        lines[3 + line] -= owners * cards.repeat(local)


def draft(
    unit: Unit,
    option: Option,
    ranks: tuple[int, ...],
    *,
    topology: Topology,
    rates: Rates,
    state: RuleState,
) -> Draft:
    """The draft of an option on as many ranks as ``ranks`` has."""
    return draft_alike([unit], option, ranks, topology=topology, rates=rates, state=state)[0]


def draft_alike(
    units: Sequence[Unit],
    option: Option,
    ranks: tuple[int, ...],
    *,
    topology: Topology,
    rates: Rates,
    state: RuleState,
) -> list[Draft]:
    """`draft` of many units at once, which differ in names, rows and accesses only."""
    scale = scale_to_seconds(rates)
    held = np.zeros((len(units), len(ranks)), dtype=np.int64)
    tables: list[list[Part]] = []
    for i in range(len(units[0].tables)):
        first, *others = (unit.tables[i] for unit in units)
        placed = [option.place(first, i, ranks), *others]  # the first speaks for all
        held += alike_bytes(placed, placed[0].rest, state=state)
        accesses = [unit.accesses[i] for unit in units]
        tables.append(expect_alike(placed, accesses, topology=topology, state=state, rates=rates))
    columns = list(zip(*tables, strict=True))  # of each piece, the part of every table
    owners = len(ranks) // len(columns)
    runs = [list(run) for _, run in groupby(columns, key=lambda p: [id(part) for part in p])]
    lines = [_piece_lines(run[0], owners, topology, scale) for run in runs]
    base = scale @ sum(part.base for parts in columns for part in parts)
    base[3:] *= topology.local
    squares = np.array([sum(part.squares for part in parts) for parts in columns])
    has_squares: list[bool] = np.any(squares, axis=0).tolist()
    kinds = frozenset(part.kind for parts in columns for part in parts if part.kind)
    sent = sum(
        (_mean_sent(part, owners, topology) for parts in columns for part in parts),
        np.zeros(len(units)),
    )
    needs, per_byte = held.max(1).tolist(), np.array([scale[0, 0], scale[3, 2]])
    return [
        Draft(
            option,
            topology,
            base[:, i],
            tuple(
                Piece(len(run), near[:, i], owner[:, i])
                for run, (near, owner) in zip(runs, lines, strict=True)
            ),
            squares[:, i, None] * per_byte if has_squares[i] else None,
            held[i],
            needs[i],
            kinds | {"squares"} if has_squares[i] else kinds,
            float(sent[i]),
        )
        for i in range(len(units))
    ]


def _piece_lines(
    parts: Sequence[Part], owners: int, topology: Topology, scale: Floats
) -> tuple[Floats, Floats]:
    """The near and owner lines of a `Piece`, of every unit."""
    near = scale @ sum(part.near + part.host / owners for part in parts)
    owner = scale @ sum(part.owner for part in parts)
    near[3:] = topology.local * near[3:] + owner[3:]
    return near, owner[:3]


def _mean_sent(part: Part, owners: int, topology: Topology) -> Floats:
    """Bytes a rank sends because of one piece; wherever its owners are, the sum is the same."""
    spread = owners * (topology.local * part.near + part.owner) + topology.local * part.host
    line = part.base + spread / topology.world
    found: Floats = line[0] + line[2]
    return found


def scale_to_seconds(rates: Rates) -> Floats:
    """``[5, 9]``: from the lines of a load to those of a draft in seconds."""
    scale = np.zeros((5, LINES))
    for line, link in ((0, 0), (1, 1), (3, 2), (4, 3)):
        rate = rates.host_bytes_per_s if link < 2 else rates.cross_bytes_per_s
        scale[line, link] = 1.0 / rate
    scale[2, 8] = 1.0
    return scale
