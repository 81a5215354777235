"""Columns and their blocks: where a table may be cut, and in which order squares are added.

A table of dim D has F column blocks of D / F columns, F the largest divisor of D up to 8. The
blocks depend on D alone, so that a sum over a row's columns, made block by block and then over
the blocks in order, has the same bits however a plan cuts the table.
"""

import itertools

__all__ = ["MAX_BLOCKS", "column_bounds", "num_blocks"]

MAX_BLOCKS = 8


def num_blocks(dim: int) -> int:
    """F: the column blocks of a table of ``dim`` columns."""
    return max(f for f in range(1, MAX_BLOCKS + 1) if dim % f == 0)


def column_bounds(dim: int, pieces: int) -> list[tuple[int, int]]:
    """First and last + 1 column of each of ``pieces`` pieces: whole blocks, as even as can be."""
    blocks = num_blocks(dim)
    width = dim // blocks
    cuts = [width * (piece * blocks // pieces) for piece in range(pieces + 1)]
    return list(itertools.pairwise(cuts))
