"""Steps of optimisers on touched rows."""

import torch
from torch import Tensor

from rowmesh.native.library import is_wide, library, pointer, takes

__all__ = ["block_squares", "step_rowwise_adagrad"]

_FLOAT = (torch.float32,)


def block_squares(grad: Tensor, *, width: int) -> Tensor | None:
    """``[n, columns / width]``: squares of blocks (`rowmesh.optim.squares`)."""
    lib = library()
    if lib is None or not takes(grad, dtypes=_FLOAT) or not grad.shape[1]:
        return None
    out = grad.new_empty((len(grad), grad.shape[1] // width))
    done = lib.rm_block_squares(len(grad), pointer(grad), grad.shape[1], width, pointer(out))
    return out if done == 0 else None


def step_rowwise_adagrad(
    weight: Tensor,
    moments: Tensor,
    rows: Tensor,
    grad: Tensor,
    *,
    width: int,
    squares: Tensor | None,
    divisor: float,
    lr: float,
    eps: float,
) -> bool:
    """``v += squares / divisor``; ``w -= lr * g / (sqrt(v) + eps)``; False if nothing was done.

    Args:
        weight: ``[num_rows, dim]``, changed in place.
        moments: ``[num_rows]``, changed in place.
        rows: ``[n]`` distinct.
        grad: ``[n, dim]``.
        width: Columns of a block whose squares are added first.
        squares: ``[n]`` mean squares; None for those of ``grad``.
        divisor, lr, eps: Of the rule.
    """
    lib = library()
    if lib is None or not takes(rows) or weight.is_inference():
        return False
    if not takes(weight, moments, grad, squares, dtypes=_FLOAT) or not grad.shape[1]:
        return False
    sizes = {len(rows), len(grad), len(rows) if squares is None else len(squares)}
    if len(sizes) > 1 or grad.shape[1:] != weight.shape[1:] or len(moments) != len(weight):
        return False
    done = lib.rm_rowwise_adagrad(
        *(len(rows), pointer(rows), is_wide(rows), pointer(grad), grad.shape[1], width),
        *(pointer(squares), divisor, -lr, eps),
        *(len(weight), pointer(moments), pointer(weight)),
    )
    if done != 0:
        return False
    for changed in (weight, moments):
        torch.autograd.graph.increment_version(changed)  # as torch's in-place operations do
    return True
