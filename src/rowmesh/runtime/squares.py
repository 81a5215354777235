"""Column squares: owners of a row's columns tell each other their part of its squared gradient.

Row-wise AdaGrad needs the mean over all columns of a row. Each owner of a column piece sends the
squares of its column blocks, and every one adds all blocks in column order
(`rowmesh.optim.squares`): the same bits on all of them, and those of a table that is not split.
Pieces are asked for the same rows by everyone, so owners know how many rows to expect. Of hot rows
every rank, or one of every host, has all columns and adds their squares by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.comm.exchange import Lane
from rowmesh.optim.squares import block_squares, mean_of_blocks
from rowmesh.placement.columns import num_blocks
from rowmesh.runtime.embeddings import ShardedEngine
from rowmesh.runtime.gradients import RowGradient
from rowmesh.runtime.places import Region

__all__ = ["ColumnSquares"]


@dataclass(frozen=True, slots=True)
class _Share:
    """A region of this rank, and all regions (its own too) that hold other columns of its rows."""

    stack: int
    mine: Region
    row: Sequence[Region]  # in column order
    block: int  # columns of a block

    def blocks(self, region: Region) -> int:
        return (region.columns[1] - region.columns[0]) // self.block


@dataclass(frozen=True, slots=True)
class _Hot:
    """Hot rows of this rank: the stack, the kind of gradient, and their first row in it."""

    stack: int
    kind: str
    region: Region
    start: int


class ColumnSquares:
    """Adds the squares of one engine's split tables over their column pieces."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine, self._sequence = engine, 0
        self._shares, self._hot = _shares(engine), _hot_rows(engine)
        self._channel = engine.pool.channel(f"column squares of {engine.path}", Lane.GRADS)

    def add(self, gradients: Sequence[RowGradient]) -> list[Tensor | None]:
        """Of each gradient, the mean squares of its rows; None where columns are not split.

        Collective:
            All ranks that hold split columns, after the same backwards.
        """
        self._sequence += 1
        if not (self._shares or self._hot):
            return [None] * len(gradients)
        with self._engine.mesh.trace.phase("column squares"):
            home = self._add(gradients) if self._shares else {}
            hot = self._add_hot(gradients) if self._hot else {}
        return [
            home.get(g.stack) if g.kind == "home" else hot.get(i) for i, g in enumerate(gradients)
        ]

    def _add_hot(self, gradients: Sequence[RowGradient]) -> dict[int, Tensor]:
        """By number of the gradient, the mean squares of its rows, which are copies."""
        places: dict[_Hot, tuple[int, int, int]] = {}  # of a region: gradient, slice
        found: dict[int, Tensor] = {}
        for i, gradient in enumerate(gradients):
            which = (gradient.stack, gradient.kind)
            regions = [hot for row in self._hot for hot in row if (hot.stack, hot.kind) == which]
            if not regions:
                continue
            edges = [hot.start for hot in regions]
            edges += [hot.start + hot.region.num_rows for hot in regions]
            edge_rows = torch.tensor(edges, dtype=gradient.rows.dtype, device=gradient.rows.device)
            cuts = torch.searchsorted(gradient.rows, edge_rows).tolist()
            found[i] = gradient.grad.new_empty(len(gradient.rows))
            for hot, first, last in zip(regions, cuts, cuts[len(regions) :], strict=False):
                if first < last:
                    places[hot] = (i, first, last)
        for row in self._hot:
            parts = [places[hot] for hot in row if hot in places]
            dim = row[-1].region.columns[1]
            blocks = [block_squares(gradients[i].grad[a:b], dim=dim) for i, a, b in parts]
            for i, first, last in parts:
                found[i][first:last] = mean_of_blocks(torch.cat(blocks, dim=1), dim=dim)
        return found

    def _add(self, gradients: Sequence[RowGradient]) -> dict[int, Tensor]:
        """By stack, the mean squares of the rows in its home's gradient."""
        parts = {g.stack: g for g in gradients if g.kind == "home"}
        mine = [_part(share, parts[share.stack]) for share in self._shares if share.stack in parts]
        shares = [share for share in self._shares if share.stack in parts]
        peers = sorted({r.rank for share in shares for r in share.row if r is not share.mine})
        sends, received = [], {}
        for peer in peers:
            ours, sizes = [], []
            for share, squares in zip(shares, mine, strict=True):
                for region in share.row:
                    if region.rank == peer:
                        ours.append(squares.reshape(-1))
                        sizes.append(len(squares) * share.blocks(region))
            sends.append((peer, torch.cat(ours)))
            received[peer] = (ours[0].new_empty(sum(sizes)), sizes)
        self._channel.post(
            self._sequence,
            sends=sends,
            receives=[(peer, buffer) for peer, (buffer, _) in received.items()],
            edge="column squares",
        ).wait()
        pieces = {p: iter(buffer.split(sizes)) for p, (buffer, sizes) in received.items()}
        found: dict[int, list[Tensor]] = {}
        for share, squares in zip(shares, mine, strict=True):
            blocks = [
                squares
                if r is share.mine
                else next(pieces[r.rank]).view(len(squares), share.blocks(r))
                for r in share.row
            ]
            dim = share.row[-1].columns[1]
            found.setdefault(share.stack, []).append(
                mean_of_blocks(torch.cat(blocks, dim=1), dim=dim)
            )
        return {stack: torch.cat(means) for stack, means in found.items()}


def _part(share: _Share, gradient: RowGradient) -> Tensor:
    """``[rows, blocks]`` squares of the region's rows."""
    start = share.mine.start
    edges = torch.tensor([start, start + share.mine.num_rows], device=gradient.rows.device)
    first, last = torch.searchsorted(gradient.rows, edges.to(gradient.rows.dtype)).tolist()
    return block_squares(gradient.grad[first:last], dim=share.row[-1].columns[1])


def _shares(engine: ShardedEngine) -> list[_Share]:
    """Of this rank, in the order of tables: slot order within a stack, the same on its peers."""
    regions = [
        (stack, region)
        for stack, s in enumerate(engine.stacks)
        if s.layout.trainable and s.layout.dim < s.layout.table_dim
        for region in s.layout.home
    ]
    found = []
    for stack, mine in regions:
        if mine.rank == engine.mesh.rank:
            row = [r for _, r in regions if (r.table, r.owner) == (mine.table, mine.owner)]
            row.sort(key=lambda r: r.columns[0])
            dim = engine.stacks[stack].layout.table_dim
            found.append(_Share(stack, mine, row, dim // num_blocks(dim)))
    return sorted(found, key=lambda share: share.mine.table)


def _hot_rows(engine: ShardedEngine) -> list[list[_Hot]]:
    """Regions of this rank that hold columns of the same hot rows, in column order."""
    rank, local = engine.mesh.rank, engine.mesh.topology.local
    rows: dict[tuple[object, ...], list[_Hot]] = {}
    for stack, s in enumerate(engine.stacks):
        layout = s.layout
        if layout.trainable and layout.dim < layout.table_dim:
            first = layout.home_slots[rank]
            mine = [_Hot(stack, "copies", r, r.start) for r in layout.hot]
            mine += [
                _Hot(stack, "host", r, first + r.start)
                for r in layout.host_copies
                if r.holder == rank % local
            ]
            for hot in mine:
                region = hot.region
                which = (region.table, region.owner, region.tier, region.group)
                rows.setdefault(which, []).append(hot)
    return [sorted(row, key=lambda hot: hot.region.columns[0]) for row in rows.values()]
