"""Mean squares of rows, added in an order that no split of the columns changes."""

from torch import Tensor

from rowmesh.placement.columns import num_blocks

__all__ = ["block_squares", "mean_of_blocks", "mean_squares"]


def block_squares(grad: Tensor, *, dim: int) -> Tensor:
    """``[n, blocks]``: the squares of each column block of ``grad``, added up.

    Args:
        grad: ``[n, columns]``, contiguous: whole blocks of the columns of a table.
        dim: Columns of the table, which fix its blocks (`rowmesh.placement.columns`).
    """
    width = dim // num_blocks(dim)
    return grad.square().view(-1, width).sum(1).view(len(grad), grad.shape[1] // width)


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
