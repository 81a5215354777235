"""Pairwise dot products of the vectors of a sample, and their gradient."""

import torch
from torch import Tensor

from rowmesh.native.library import library, pointer, takes

__all__ = ["pairwise_dots", "pairwise_dots_backward"]

_FLOAT = (torch.float32,)


def pairwise_dots(dense: Tensor, vectors: Tensor) -> Tensor | None:
    """``[B, D + F (F + 1) / 2]``: ``dense`` [B, D], then <v_i, v_j> for i < j, v_0 = dense.

    A product is added over columns from the first to the last, fused multiply-adds from zero.

    Args:
        dense: v_0.
        vectors: ``[B, F, D]``, v_1 to v_F.
    """
    lib = library()
    if lib is None or not _fit(dense, vectors):
        return None
    count, dim = vectors.shape[1] + 1, vectors.shape[2]
    out = dense.new_empty((len(dense), dim + count * (count - 1) // 2))
    sizes = (len(dense), count, dim)
    done = lib.rm_dots(*sizes, pointer(dense), pointer(vectors), pointer(out))
    return out if done == 0 else None


def pairwise_dots_backward(
    dense: Tensor, vectors: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Gradients of both arguments of `pairwise_dots`, ``grad`` being that of its result.

    A vector's is the sum over the others from the first to the last of <gradient of the
    product> * vector, fused multiply-adds from zero; the dense one's own is added last.

    Args:
        dense: As for `pairwise_dots`.
        vectors: Likewise.
        grad: Its rows may have gaps between them.
    """
    lib = library()
    if lib is None or not _fit(dense, vectors) or grad.dim() != 2 or len(grad) != len(dense):
        return None
    count, dim = vectors.shape[1] + 1, vectors.shape[2]
    if grad.shape[1] != dim + count * (count - 1) // 2 or not takes(grad[0], dtypes=_FLOAT):
        return None
    grads = torch.empty_like(dense), torch.empty_like(vectors)
    done = lib.rm_dots_backward(
        *(len(dense), count, dim),
        *(pointer(dense), pointer(vectors), pointer(grad), grad.stride(0)),
        *(pointer(t) for t in grads),
    )
    return grads if done == 0 else None


def _fit(dense: Tensor, vectors: Tensor) -> bool:
    """Whether they are ``[B, D]`` and ``[B, F, D]``, none of them 0, and C may read them."""
    return (
        takes(dense, vectors, dtypes=_FLOAT)
        and vectors.dim() == 3
        and vectors.numel() > 0
        and dense.shape == (vectors.shape[0], vectors.shape[2])
    )
