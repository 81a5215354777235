"""The linear layer is torch's; only its input's gradient lies elsewhere."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import rowmesh as rm
from rowmesh.models import products
from rowmesh.models.linear import Linear
from rowmesh.models.products import takes_numpy

LAW = settings(derandomize=True, deadline=None, max_examples=40)
SIZES = [1, 2, 13, 15, 16, 17, 48, 415]


@pytest.fixture
def no_onednn() -> Iterator[None]:
    """Some CPUs announce bf16 that oneDNN then fails to use, with a signal or an error."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(was)


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


@pytest.mark.usefixtures("no_onednn")
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


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWMESH_PRODUCTS", "numpy")


LARGE = [32, 48, 415]


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("columns", LARGE)
@pytest.mark.parametrize("outputs", LARGE)
@pytest.mark.parametrize("samples", [0, 1, 7, 64])
def test_numpy_s_products_are_torch_s_and_do_not_depend_on_where_memory_lies(
    samples: int, columns: int, outputs: int
) -> None:
    theirs, ours = pair(columns, outputs, bias=True)
    x, grad = torch.randn(samples, columns), torch.randn(samples, outputs)
    assert takes_numpy(x, ours.weight)
    results = run(ours, x, grad)
    for found, expected in zip(results, run(theirs, x, grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    gaps = torch.empty(samples, outputs + 3)[:, 1:-2].copy_(grad)
    for found, again in zip(results, run(ours, elsewhere(x), gaps), strict=True):
        assert torch.equal(found, again)


def elsewhere(x: Tensor) -> Tensor:
    """The same values five floats behind the begin of a cache line."""
    return torch.empty(x.numel() + 5)[5:].view_as(x).copy_(x)


@pytest.mark.usefixtures("by_numpy", "no_onednn")
def test_what_numpy_cannot_do_is_torch_s() -> None:
    _, ours = pair(48, 32, bias=True)
    x = torch.randn(3, 5, 48)

    def total(x: Tensor) -> Tensor:
        return ours(x).tanh().sum()

    per_sample = torch.func.vmap(torch.func.grad(total))(x)
    one_by_one = [torch.func.grad(total)(part) for part in x]
    torch.testing.assert_close(per_sample, torch.stack(one_by_one))
    first = x[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(first), first, create_graph=True)
    torch.testing.assert_close(grad.detach(), one_by_one[0])
    grad.square().sum().backward()
    assert first.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x[0]).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours(x[0, :, :-1])
    torch.testing.assert_close(ours(x[0].to_sparse()), ours(x[0]))
    traced = make_fx(ours)(x[0])
    torch.testing.assert_close(traced(x[1]), ours(x[1]))
    x[0, 0] = torch.inf
    assert ours(x[0])[0].isnan().all()  # and no warning
    assert ours.double()(x[0].double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"ROWMESH_PRODUCTS": "torch"}, "ROWMESH_PRODUCTS=torch"),
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": ""}, "numpy may use several threads"),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "1", "vendor": "GenuineIntel"}, "MKL is at its best"),
    ],
)
def test_who_multiplies_follows_from_machine_and_environment(
    values: dict[str, str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_cpu", lambda: values.pop("vendor", "AuthenticAMD"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    config = {"Build Dependencies": {"blas": {"name": "scipy-openblas"}}}
    monkeypatch.setattr(products.np, "show_config", lambda mode: config)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    products._why_not_faster.cache_clear()
    try:
        found = products.why_torch()
    finally:
        products._why_not_faster.cache_clear()
    assert found is None if reason is None else str(found).startswith(reason)


def test_an_unknown_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWMESH_PRODUCTS", "mkl")
    with pytest.raises(rm.InputError, match="ROWMESH_PRODUCTS is 'mkl', but must be one of auto"):
        products.why_torch()
