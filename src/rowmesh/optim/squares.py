"""Mean squares of rows, added in an order that no split of the columns changes."""

import torch
from torch import Tensor

from rowmesh import native
from rowmesh.placement.columns import num_blocks

__all__ = ["block_squares", "mean_of_blocks", "mean_squares"]


def block_squares(grad: Tensor, *, dim: int) -> Tensor:
    """``[n, blocks]``: the squares of each column block of ``grad``, added up.

    Neighbours are added pairwise until one is left, an odd one at the end waiting: for 5 columns
    ((a + b) + (c + d)) + e. torch's own ``sum`` has an order that depends on the CPU.

    Args:
        grad: ``[n, columns]``, contiguous: whole blocks of the columns of a table.
        dim: Columns of the table, which fix its blocks (`rowmesh.placement.columns`).
    """
    width = dim // num_blocks(dim)
    found = native.block_squares(grad, width=width)
    if found is not None:
        return found
    sums = grad.square().view(-1, width)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        pairs = sums[:, 0 : 2 * half : 2] + sums[:, 1 : 2 * half : 2]
        sums = torch.cat([pairs, sums[:, -1:]], dim=1) if sums.shape[1] % 2 else pairs
    return sums.view(len(grad), grad.shape[1] // width)


def mean_of_blocks(blocks: Tensor, *, dim: int) -> Tensor:
    """``[n]``: all blocks of a row added in order, over ``dim``."""
    total = blocks[:, 0].clone()
    for block in range(1, blocks.shape[1]):
        total += blocks[:, block]
    return total.div_(dim)


def mean_squares(grad: Tensor) -> Tensor:
    """``mean_d(g_d^2)`` of whole rows, with the bits that split ones give."""
    dim = grad.shape[1]
    return mean_of_blocks(block_squares(grad, dim=dim), dim=dim)
