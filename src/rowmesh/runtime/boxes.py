"""What a rank holds of every table, as boxes of the table's padded view.

In its natural order a table of R rows is the padded view [Q, S, D], Q = ceil(R / S), with row
r = (r // S, r mod S). Virtual shard j is the box [0:ceil((R - j) / S), j, c0:c1], so boxes never
hold padding. State with one number a row has the view [Q, S].
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rowmesh.placement import Homes
from rowmesh.runtime.copies import refresh_homes
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.tickets import Stack

__all__ = ["Part", "TableTensor", "shard_rows", "table_tensors"]


def shard_rows(num_rows: int, num_shards: int, shard: int) -> int:
    """Rows of virtual shard ``shard``: ceil((R - j) / S), 0 for an empty one."""
    return max(0, -(-(num_rows - shard) // num_shards))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The rows of one owner, in slot order, in memory of this rank.

    Args:
        tensor: ``[num_rows, c1 - c0]``, or ``[num_rows]`` for one number a row; not a copy.
        homes: Of the table.
        owner: Index among the owners of its column piece.
        columns: (c0, c1).
        is_written: Whether this rank writes it: exactly one rank does.
    """

    tensor: Tensor
    homes: Homes
    owner: int
    columns: tuple[int, int]
    is_written: bool

    def shards(self) -> range:
        """The virtual shards j = owner, owner + n, ... below S."""
        return range(self.owner, self.homes.num_shards, self.homes.num_owners)

    def box(self, shard: int) -> Tensor:
        """Virtual shard j as a view ``[rows, 1, c1 - c0]`` (or ``[rows, 1]``).

        Slot q * c + (j - owner) / n holds row q * S + j: one slot in c, c shards a rank.
        """
        first = (shard - self.owner) // self.homes.num_owners
        return self.tensor[first :: self.homes.width(self.owner)].unsqueeze(1)

    def holds(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``rows`` lie here."""
        found: NDArray[np.bool_] = self.homes.owners(rows) == self.owner
        return found

    def put(self, rows: NDArray[np.int64], values: Tensor, *, column: int = 0) -> None:
        """Set those of ``rows`` that lie here; ``values[i]`` belongs to ``rows[i]``, its first
        element to column c0 + ``column``."""
        here = np.flatnonzero(self.holds(rows))
        slots = torch.from_numpy(self.homes.slots(rows[here])).to(self.tensor.device)
        chosen = values.index_select(0, torch.from_numpy(here).to(values.device))
        target = self.tensor
        if target.dim() > 1:
            target = target.narrow(1, column, values.shape[1])
        target.index_copy_(0, slots, chosen.to(target.device))


@dataclass(frozen=True, kw_only=True, slots=True)
class TableTensor:
    """The weight, or one state, of one table: its padded view and this rank's parts of it.

    ``dim`` is None for one number a row.
    """

    num_rows: int
    num_shards: int
    dim: int | None
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(Q, S, D)``, or ``(Q, S)``."""
        padded = (-(-self.num_rows // self.num_shards), self.num_shards)
        return padded if self.dim is None else (*padded, self.dim)

    @property
    def num_elements(self) -> int:
        """Without padding."""
        return self.num_rows * (1 if self.dim is None else self.dim)

    def columns(self, part: Part) -> tuple[int, ...]:
        """First column and number of columns of a part's boxes; empty for one number a row."""
        return () if self.dim is None else (part.columns[0], part.columns[1] - part.columns[0])

    def staged(self) -> "TableTensor":
        """The parts this rank writes, copied to host memory."""
        mine = [p for p in self.parts if p.is_written]
        copies = [p.tensor.detach().to("cpu", copy=True) for p in mine]
        parts = [replace(p, tensor=copy) for p, copy in zip(mine, copies, strict=True)]
        return replace(self, parts=tuple(parts))


def table_tensors(model: nn.Module) -> dict[str, TableTensor]:
    """Weight and optimiser state of every table of a sharded model, on this rank.

    Keys are ``tables.<table>.weight`` and ``tables.<table>.state.<name>``: the same on all ranks,
    also where a rank holds no rows. A row's home is written by its owner in one of the groups, a
    row of a table that is copied whole by the rank that adds up its gradients; one number a row,
    which every column piece keeps, by the piece with column 0. Homes of hot rows are brought up to
    date here; who writes into the parts calls `refresh_copies` after it.
    """
    found: dict[str, TableTensor] = {}
    for engine in sharded_engines(model):
        refresh_homes(engine)
        for stack in engine.stacks:
            for region in {r.table: r for r in (*stack.layout.home, *stack.layout.copied)}.values():
                is_copied = region in stack.layout.copied
                weight = stack.copies if is_copied else stack.home
                state = stack.copies_state if is_copied else stack.home_state
                named = {"weight": weight} | {f"state.{name}": t for name, t in state.items()}
                config = engine.tables[region.table]
                for name, tensor in named.items():
                    key = f"tables.{config.name}.{name}"
                    parts = _parts(stack, region.table, tensor, engine.mesh.rank)
                    if key in found:  # column pieces of another width lie in another stack
                        parts = (*found[key].parts, *parts)
                    found[key] = TableTensor(
                        num_rows=config.num_embeddings,
                        num_shards=region.homes.num_shards,
                        dim=config.embedding_dim if tensor.dim() > 1 else None,
                        dtype=tensor.dtype,
                        parts=parts,
                    )
    return found


def _parts(stack: Stack, table: int, tensor: Tensor, rank: int) -> tuple[Part, ...]:
    """Of one table, in its stack's ``tensor``: the rank's own home rows, and all copied rows."""
    home = [r for r in stack.layout.home if r.table == table and r.rank == rank]
    copied = [r for r in stack.layout.copied if r.table == table]
    return tuple(
        Part(
            tensor=tensor[region.start : region.start + region.num_rows],
            homes=region.homes,
            owner=region.owner,
            columns=region.columns,
            is_written=region.writer == rank and (tensor.dim() > 1 or region.columns[0] == 0),
        )
        for region in (*home, *copied)
    )
