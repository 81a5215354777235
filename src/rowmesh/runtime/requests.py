"""Requests: what one rank asks of one owner, in memory and as one message of ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.nn.kernels import pool
from rowmesh.runtime.sets import decode_set, encode_set, set_words

__all__ = ["NUM_COUNTS", "Request", "look_up", "num_words", "pack", "unpack"]

NUM_COUNTS = 4  # of one request in the counts message: rows, pooled ids, bags, copied rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one rank asks of one owner, or what an owner was asked: three lists of slots.

    Args:
        rows: Slots whose rows are wanted.
        pooled: Slots whose sums are wanted; a slot that continues a bag is complemented.
        copied: Rows, counted from the sum owner's first, whose gradients will come.
        weights: Of ``pooled``, or None.
        num_pooled: Bags in ``pooled``.
    """

    rows: Tensor
    pooled: Tensor
    copied: Tensor
    weights: Tensor | None
    num_pooled: int

    @property
    def num_vectors(self) -> int:
        """Vectors the owner sends back."""
        return len(self.rows) + self.num_pooled

    def counts(self) -> list[int]:
        """What the owner must know before the ids arrive."""
        return [len(self.rows), len(self.pooled), self.num_pooled, len(self.copied)]

    def num_home(self, home_slots: int) -> int:
        """How many of ``rows``, ascending, are home rows; copies for the host follow."""
        if not len(self.rows):
            return 0
        edge = torch.tensor(home_slots, dtype=self.rows.dtype, device=self.rows.device)
        return int(torch.searchsorted(self.rows, edge))

    def pooled_slots(self) -> Tensor:
        """``pooled`` without the marks of continued bags."""
        return torch.where(self.pooled < 0, ~self.pooled, self.pooled)

    def pooled_starts(self) -> Tensor:
        """Where each bag of ``pooled`` begins."""
        return (self.pooled >= 0).nonzero().squeeze(1).to(self.pooled.dtype)

    def vector_of_id(self) -> Tensor:
        """For every slot of ``rows``, then of ``pooled``: which vector it belongs to."""
        rows = torch.arange(len(self.rows), device=self.rows.device)
        if not len(self.pooled):
            return rows
        bags = torch.cumsum(self.pooled >= 0, 0) + (len(self.rows) - 1)
        return torch.cat([rows, bags])


def num_words(counts: Sequence[int], num_summed: int) -> list[int]:
    """Words of rows, pooled and copied in a message, from a request's counts."""
    rows, pooled, _, copied = counts
    return [rows, pooled, set_words(copied, num_summed)]


def pack(
    requests: Sequence[Request], num_summed: Sequence[int], *, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """One message of ids, and one of sample weights if there are any, for an owner.

    Args:
        requests: One per stack.
        num_summed: Per stack, how many copied rows the owner adds up.
        dtype: Of ids on the wire.
    """
    words = [
        part
        for r, size in zip(requests, num_summed, strict=True)
        for part in (r.rows.to(dtype), r.pooled.to(dtype), encode_set(r.copied, size, dtype=dtype))
    ]
    weights = [r.weights for r in requests if r.weights is not None]
    return torch.cat(words), torch.cat(weights) if weights else None


def unpack(
    words: Tensor,
    weights: Tensor | None,
    counts: Sequence[Sequence[int]],
    num_summed: Sequence[int],
) -> list[Request]:
    """The requests that `pack` was given, one per stack."""
    sizes = [num_words(c, n) for c, n in zip(counts, num_summed, strict=True)]
    parts = iter(words.split([n for size in sizes for n in size]))
    pieces = iter(() if weights is None else weights.split([size[1] for size in sizes]))
    return [
        Request(
            rows=next(parts),
            pooled=next(parts),
            copied=decode_set(next(parts), count[3], size),
            weights=None if weights is None else next(pieces),
            num_pooled=count[2],
        )
        for count, size in zip(counts, num_summed, strict=True)
    ]


def look_up(source: Tensor, request: Request, out: Tensor) -> None:
    """The vectors of a request: rows as they are, then bags summed."""
    num_rows, bags = len(request.rows), request.num_pooled
    parts = [(request.rows, out[:num_rows])] if num_rows else []
    if bags and bags == len(request.pooled) and request.weights is None:
        parts.append((request.pooled, out[num_rows:]))  # every bag is one row
    elif bags:
        slots, starts = request.pooled_slots(), request.pooled_starts()
        out[num_rows:] = pool(source, slots, starts, request.weights)
    for slots, part in parts:
        if part.dtype == source.dtype:
            torch.index_select(source, 0, slots, out=part)
        else:
            part.copy_(source.index_select(0, slots))
