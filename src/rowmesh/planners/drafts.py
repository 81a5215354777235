"""`Draft`: a unit under one option, in seconds, before it has ranks."""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost import Rates
from rowmesh.cost.expected import expect_parts
from rowmesh.cost.load import LINES, Part
from rowmesh.placement.memory import RuleState, tier_bytes
from rowmesh.planners.options import Option, Unit
from rowmesh.topology import Topology

__all__ = ["Draft", "Piece", "draft", "scale_to_seconds"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` column pieces of the same width, one after the other.

    The lines are those of a `Part`, in seconds: sent and received inside the host, memory, then
    sent and received across hosts, by the whole host's card.
    """

    count: int
    near: Floats
    host: Floats
    owner: Floats


@dataclass(frozen=True, slots=True)
class Draft:
    """What a unit costs and holds under one option on so many ranks, wherever they are.

    Args:
        option: The option.
        base: Line added to every rank.
        pieces: Of the unit's tables together.
        squares: Bytes an owner of each piece sends to its likes in every other piece.
        held: Bytes on each of the ranks, in their order.
        kinds: The exchanges that take place.
        sent: Bytes that leave a rank, over both links; mean over ranks.
    """

    option: Option
    base: Floats
    pieces: tuple[Piece, ...]
    squares: tuple[float, ...]
    held: NDArray[np.int64]
    kinds: frozenset[str]
    sent: float

    @property
    def need(self) -> int:
        """Most bytes on a rank."""
        return int(self.held.max())


def draft(
    unit: Unit,
    option: Option,
    ranks: tuple[int, ...],
    *,
    topology: Topology,
    scale: Floats,
    state: RuleState,
) -> Draft:
    """The draft of an option on as many ranks as ``ranks`` has; `scale_to_seconds` gives scale."""
    held = np.zeros(len(ranks), dtype=np.int64)
    tables: list[list[Part]] = []
    for i, table in enumerate(unit.tables):
        placed = option.place(table, i, ranks)
        held += np.array(tier_bytes(placed, placed.rest, state=state), dtype=np.int64)
        tables.append(expect_parts(placed, unit.accesses[i], topology=topology, state=state))
    columns = list(zip(*tables, strict=True))  # of each piece, the part of every table
    pieces = []
    for _, run in groupby(columns, key=lambda parts: [id(part) for part in parts]):
        same = list(run)
        lines = [np.array([part.near, part.host, part.owner]) for part in same[0]]
        pieces.append(Piece(len(same), *(sum(lines[1:], lines[0]) @ scale.T)))
    bases = [part.base for parts in columns for part in parts]
    base = scale @ sum(bases[1:], bases[0])
    squares = tuple(sum(part.squares for part in parts) for parts in columns)
    kinds = {part.kind for parts in columns for part in parts} - {""}
    if any(squares):
        kinds.add("squares")
    sent = sum(_mean_sent(part, held.size // len(columns), topology) for p in columns for part in p)
    return Draft(option, base, tuple(pieces), squares, held, frozenset(kinds), sent)


def _mean_sent(part: Part, owners: int, topology: Topology) -> float:
    """Bytes a rank sends because of one piece; wherever its owners are, the sum is the same."""
    spread = owners * (topology.local * part.near + part.owner) + topology.local * part.host
    line = part.base + spread / topology.world
    return float(line[0] + line[2])


def scale_to_seconds(rates: Rates) -> Floats:
    """``[5, 9]``: from the lines of a load in bytes to those of a draft in seconds."""
    scale = np.zeros((5, LINES))
    for line, link in ((0, 0), (1, 1), (3, 2), (4, 3)):
        rate = rates.host_bytes_per_s if link < 2 else rates.cross_bytes_per_s
        scale[line, link] = 1.0 / rate
        scale[line, 4 + link] = -rates.hidden_share / rate
    scale[2, 8] = 1.0 / rates.memory_bytes_per_s
    return scale
