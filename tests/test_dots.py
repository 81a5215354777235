"""Compiled pairwise dots: every sum in the order it is said to have, bit for bit."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowmesh import native
from rowmesh.models import PairwiseDots
from rowmesh.native import library
from tests.test_native import bits, floats, needs_library, plain

pytestmark = needs_library
LAW = settings(derandomize=True, deadline=None, max_examples=40)
SIZES = {
    "samples": st.integers(0, 5),
    "features": st.integers(1, 40),
    "dim": st.sampled_from([1, 3, 8, 15, 16, 17, 64]),
    "seed": st.integers(0, 2**31),
}


def in_order(left: Tensor, right: Tensor) -> Tensor:
    """``[B, n, k] @ [B, k, m]``, its sums from the first to the last of k, each term fused.

    A product of two fp32 numbers is exact in fp64; its sum is rounded there and then to fp32, which
    differs from one rounding about once in 2^29.
    """
    total = torch.zeros(len(left), left.shape[1], right.shape[2])
    left, right = left.double(), right.double()
    for k in range(left.shape[2]):
        total = (total + left[:, :, k, None] * right[:, k, None, :]).float()
    return total


def draw(samples: int, features: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Dense, vectors and the gradient of the result."""
    shapes = (
        (samples, dim),
        (samples, features, dim),
        (samples, dim + features * (features + 1) // 2),
    )
    dense, vectors, grad = (floats(shape, seed + n) for n, shape in enumerate(shapes))
    return dense, vectors, grad


@LAW
@given(**SIZES)
def test_products_are_added_over_columns_in_order(
    samples: int, features: int, dim: int, seed: int
) -> None:
    dense, vectors, _ = draw(samples, features, dim, seed)
    found = native.pairwise_dots(dense, vectors)
    if not samples:
        assert found is None
        return
    x = torch.cat((dense.unsqueeze(1), vectors), dim=1)
    products = in_order(x, x.transpose(1, 2))
    i, j = torch.triu_indices(features + 1, features + 1, offset=1)
    assert bits(found) == bits(torch.cat((dense, products[:, i, j]), dim=1))


@LAW
@given(**SIZES)
def test_gradients_are_added_over_vectors_in_order(
    samples: int, features: int, dim: int, seed: int
) -> None:
    dense, vectors, grad = draw(samples, features, dim, seed)
    gaps = torch.cat((grad, grad), dim=1)[:, : grad.shape[1]]
    found = native.pairwise_dots_backward(dense, vectors, gaps if seed % 2 else grad)
    if not samples:
        assert found is None
        return
    assert found is not None
    x = torch.cat((dense.unsqueeze(1), vectors), dim=1)
    both = torch.zeros(samples, features + 1, features + 1)
    pairs = itertools.combinations(range(features + 1), 2)
    for number, (i, j) in enumerate(pairs):
        both[:, i, j] = both[:, j, i] = grad[:, dim + number]
    expected = in_order(both, x)
    assert bits(found[0]) == bits(expected[:, 0] + grad[:, :dim])
    assert bits(found[1]) == bits(expected[:, 1:])


def test_the_layer_is_close_to_its_torch_path() -> None:
    dense, vectors, grad = (t / 10 for t in draw(300, 26, 64, 7))
    results = []
    for path in (plain, mock.MagicMock):
        inputs = [t.clone().requires_grad_() for t in (dense, vectors.flatten(1))]
        with path():
            out = PairwiseDots(26, 64)(*inputs)
            out.backward(grad)
        results.append([out.detach(), *(t.grad for t in inputs)])
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4 * float(slow.abs().mean()))
    assert any(not torch.equal(a, b) for a, b in zip(*results, strict=True)), "one path ran twice"


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda t: t.repeat(1, 1, 2)[:, :, ::2]])
def test_other_tensors_are_left_to_torch(change: object) -> None:
    dense, vectors, grad = draw(3, 4, 8, 1)
    assert callable(change)
    assert native.pairwise_dots(dense, change(vectors)) is None
    assert native.pairwise_dots_backward(dense, change(vectors), grad) is None


@pytest.mark.parametrize("size", [(3, 4), (3, 16), (2, 8), (4, 8)])
def test_sizes_that_do_not_fit_are_left_to_torch(size: tuple[int, int]) -> None:
    # Defect: rows beyond the dense vectors' end were read.
    dense, vectors, grad = draw(3, 4, 8, 1)
    assert native.pairwise_dots(torch.zeros(size), vectors) is None
    assert native.pairwise_dots_backward(torch.zeros(size), vectors, grad) is None
    for wrong in (grad[:2], grad[:, :-1], grad[0]):
        assert native.pairwise_dots_backward(dense, vectors, wrong) is None


def test_no_memory_is_no_answer() -> None:
    lib = mock.MagicMock()
    lib.rm_dots.return_value = lib.rm_dots_backward.return_value = -1
    dense, vectors, grad = draw(3, 4, 8, 1)
    with mock.patch.object(library, "_find", return_value=(lib, "full")):
        assert native.pairwise_dots(dense, vectors) is None
        assert native.pairwise_dots_backward(dense, vectors, grad) is None
