"""The linear layer is torch's; only its input's gradient lies elsewhere."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowmesh.models.linear import Linear

LAW = settings(derandomize=True, deadline=None, max_examples=40)
SIZES = [1, 2, 13, 15, 16, 17, 48, 415]


def pair(columns: int, outputs: int, *, bias: bool) -> tuple[nn.Linear, Linear]:
    """torch's layer and ours, of the same weights."""
    torch.manual_seed(columns * 1000 + outputs)
    theirs, ours = (kind(columns, outputs, bias=bias) for kind in (nn.Linear, Linear))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(layer: nn.Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The result and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    found = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    assert all(t is not None for t in found)
    return [t for t in found if t is not None]


@LAW
@given(
    samples=st.sampled_from([0, 1, 7, 64]),
    columns=st.sampled_from(SIZES),
    outputs=st.sampled_from(SIZES),
    bias=st.booleans(),
)
def test_results_and_gradients_are_torch_s(
    samples: int, columns: int, outputs: int, bias: bool
) -> None:
    theirs, ours = pair(columns, outputs, bias=bias)
    x, grad = torch.randn(samples, columns), torch.randn(samples, outputs)
    for found, expected in zip(run(ours, x, grad), run(theirs, x, grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("columns", "stride"), [(415, 416), (416, 416), (13, 16)])
def test_rows_of_the_gradient_begin_on_cache_lines(columns: int, stride: int) -> None:
    _, ours = pair(columns, 8, bias=True)
    strides: list[int] = []
    x = torch.randn(5, columns, requires_grad=True)
    wide = x * 1
    wide.register_hook(lambda grad: strides.append(grad.stride(0)))
    ours(wide).sum().backward()
    assert strides == [stride]


def test_the_gradient_has_a_gradient() -> None:
    _, ours = pair(7, 9, bias=True)
    ours.double()
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    weight, bias = ours.weight, ours.bias

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(ours, {"weight": weight, "bias": bias}, (x,)).tanh()

    assert torch.autograd.gradgradcheck(call, (x, weight, bias))


def test_frozen_weights_get_no_gradient() -> None:
    _, ours = pair(13, 8, bias=True)
    ours.weight.requires_grad_(False)
    x = torch.randn(5, 13, requires_grad=True)
    ours(x).sum().backward()
    assert ours.weight.grad is None
    assert ours.bias.grad is not None
    assert x.grad is not None


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_torch_s(inside: bool) -> None:
    theirs, ours = pair(13, 8, bias=True)
    found = []
    for layer in (theirs, ours):
        x = torch.ones(5, 13, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            if inside:
                y.sum().backward()
        if not inside:
            y.sum().backward()
        assert y.dtype == torch.bfloat16
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of torch itself
def test_transforms_of_functions_are_torch_s() -> None:
    theirs, ours = pair(13, 8, bias=True)
    x = torch.randn(5, 13)

    def total(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x).tanh().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        found, expected = (transform(total(layer))(x) for layer in (ours, theirs))
        torch.testing.assert_close(found, expected)
    rows = torch.randn(3, 5, 13)
    found, expected = (
        torch.func.vmap(torch.func.grad(total(layer)))(rows) for layer in (ours, theirs)
    )
    torch.testing.assert_close(found, expected)
