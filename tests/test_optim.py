"""The update rules, against a loop over rows and elements, and against torch's optimisers."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowmesh.errors import InputError
from rowmesh.optim import SGD, Adagrad, Adam, RowwiseAdagrad, UpdateRule
from rowmesh.optim.squares import block_squares, mean_of_blocks, mean_squares
from rowmesh.placement.columns import column_bounds, num_blocks

LAW = settings(derandomize=True, deadline=None, max_examples=50)
CPU = torch.device("cpu")
DIMS = [1, 3, 8, 64, 65]
RULES: list[UpdateRule] = [SGD(lr=0.1), RowwiseAdagrad(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.1)]
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
Step = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: on a busy machine a second thread costs a thousand times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Row:
    """One row in Python floats (fp64), by the formulas of the docstrings."""

    def __init__(self, weight: list[float]) -> None:
        self.w, self.t = weight, 0
        self.m, self.v = [0.0] * len(weight), [0.0] * len(weight)
        self.row_v = 0.0

    def sgd(self, g: list[float], rule: Any) -> None:
        self.w = [w - rule.lr * x for w, x in zip(self.w, g, strict=True)]

    def rowwise_adagrad(self, g: list[float], rule: Any) -> None:
        self.row_v += sum(x * x for x in g) / len(g)
        scale = rule.lr / (math.sqrt(self.row_v) + rule.eps)
        self.w = [w - scale * x for w, x in zip(self.w, g, strict=True)]

    def adagrad(self, g: list[float], rule: Any) -> None:
        self.v = [v + x * x for v, x in zip(self.v, g, strict=True)]
        self.w = [
            w - rule.lr * x / (math.sqrt(v) + rule.eps)
            for w, x, v in zip(self.w, g, self.v, strict=True)
        ]

    def adam(self, g: list[float], rule: Any) -> None:
        b1, b2 = rule.betas
        self.t += 1
        for d, x in enumerate(g):
            self.m[d] = b1 * self.m[d] + (1 - b1) * x
            self.v[d] = b2 * self.v[d] + (1 - b2) * x * x
            root = math.sqrt(self.v[d] / (1 - b2**self.t)) + rule.eps
            self.w[d] -= rule.lr * (self.m[d] / (1 - b1**self.t)) / root


LOOPS: dict[type, Callable[[Row, list[float], Any], None]] = {
    SGD: Row.sgd,
    RowwiseAdagrad: Row.rowwise_adagrad,
    Adagrad: Row.adagrad,
    Adam: Row.adam,
}


def draw_steps(seed: int, num_rows: int, dim: int, num_steps: int = 4) -> tuple[Tensor, list[Step]]:
    """A weight, and steps of (distinct rows in any order, gradients)."""
    rng = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(num_steps):
        order = torch.randperm(num_rows, generator=rng)
        rows = order[: int(torch.randint(0, num_rows + 1, (1,), generator=rng))]
        steps.append((rows, torch.randn((len(rows), dim), generator=rng)))
    return torch.randn((num_rows, dim), generator=rng), steps


def run(rule: UpdateRule, weight: Tensor, steps: list[Step]) -> dict[str, Tensor]:
    """Apply the steps in place; the state and the weight afterwards."""
    state = rule.new_state(*weight.shape, device=CPU)
    for rows, grad in steps:
        rule.update(weight, state, rows, grad, rule.lr)
    return {"weight": weight, **state}


@LAW
@given(
    st.sampled_from(
        [
            *RULES,
            SGD(lr=0.0),
            RowwiseAdagrad(lr=0.5, eps=0.1),
            Adagrad(lr=0.5, eps=0.1),
            Adam(lr=0.5, betas=(0.5, 0.9), eps=0.1),
            Adam(betas=(0.0, 0.0)),
        ]
    ),
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.sampled_from([1, 3, 8]),
)
def test_rules_follow_their_formulas(rule: UpdateRule, seed: int, num_rows: int, dim: int) -> None:
    weight, steps = draw_steps(seed, num_rows, dim)
    loop = [Row(row) for row in weight.tolist()]
    found = run(rule, weight, steps)
    for rows, grad in steps:
        for row, g in zip(rows.tolist(), grad.tolist(), strict=True):
            LOOPS[type(rule)](loop[row], g, rule)
    assert found["weight"].numpy() == pytest.approx(np.array([r.w for r in loop]), abs=1e-5)
    expected: dict[type, dict[str, Any]] = {
        SGD: {},
        RowwiseAdagrad: {"v": [r.row_v for r in loop]},
        Adagrad: {"v": [r.v for r in loop]},
        Adam: {"m": [r.m for r in loop], "v": [r.v for r in loop], "t": [r.t for r in loop]},
    }
    assert found.keys() - {"weight"} == expected[type(rule)].keys()
    for name, values in expected[type(rule)].items():
        assert found[name].numpy() == pytest.approx(np.array(values), rel=1e-4, abs=1e-6)


@by_rule
def test_new_state_is_zero_and_fp32_with_an_entry_per_row(rule: UpdateRule) -> None:
    shapes: dict[type, dict[str, tuple[int, ...]]] = {
        SGD: {},
        RowwiseAdagrad: {"v": (5,)},
        Adagrad: {"v": (5, 3)},
        Adam: {"m": (5, 3), "v": (5, 3), "t": (5,)},
    }
    state = rule.new_state(5, 3, device=CPU)
    assert {name: tuple(t.shape) for name, t in state.items()} == shapes[type(rule)]
    assert all(t.dtype == torch.float32 and not t.any() for t in state.values())
    on_meta = rule.new_state(5, 3, device=torch.device("meta"))
    assert all(t.device.type == "meta" for t in on_meta.values())


@pytest.mark.parametrize(
    ("rule", "dense"),
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adagrad(lr=0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10)),
        (Adam(lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
        (
            Adam(lr=0.1, betas=(0.5, 0.75), eps=1e-3),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.75), eps=1e-3),
        ),
    ],
    ids=["SGD", "Adagrad", "Adam", "Adam-betas"],
)
@pytest.mark.parametrize("dim", [1, 65])
def test_rules_equal_the_dense_optimiser(rule: UpdateRule, dense: Any, dim: int) -> None:
    """SGD and AdaGrad with any rows; Adam only when every step touches all of them."""
    weight, steps = draw_steps(3, 9, dim, num_steps=20)
    if isinstance(rule, Adam):
        rng = torch.Generator().manual_seed(4)
        steps = [(torch.arange(9), torch.randn((9, dim), generator=rng)) for _ in steps]
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = dense([parameter])
    for rows, grad in steps:
        parameter.grad = torch.zeros_like(weight).index_copy(0, rows, grad)
        optimizer.step()
    found = run(rule, weight.clone(), steps)["weight"]
    assert torch.allclose(found, parameter.detach(), atol=2e-6, rtol=1e-5)
    assert not torch.allclose(found, weight, atol=1e-2)


def test_rowwise_adagrad_of_one_column_is_adagrad() -> None:
    weight, steps = draw_steps(5, 9, 1)
    rowwise = run(RowwiseAdagrad(lr=0.1, eps=1e-8), weight.clone(), steps)
    element = run(Adagrad(lr=0.1, eps=1e-8), weight.clone(), steps)
    assert torch.equal(rowwise["v"], element["v"].view(-1))
    assert torch.allclose(rowwise["weight"], element["weight"], atol=1e-6)


@by_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_untouched_rows_and_their_state_do_not_change(rule: UpdateRule, dtype: torch.dtype) -> None:
    weight = torch.randn((6, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, 0], weight[1, 1] = math.nan, math.inf
    before, rows, others = weight.clone(), torch.tensor([4, 2]), torch.tensor([0, 1, 3, 5])
    found = run(rule, weight, [(rows, torch.ones((2, 5)))] * 3)
    assert torch.equal(weight[others].nan_to_num(7.0), before[others].nan_to_num(7.0))
    assert bool((weight[rows] != before[rows]).all())
    for name in found.keys() - {"weight"}:
        assert not found[name][others].any()
        assert bool(found[name][rows].all())
    empty = torch.zeros(0, dtype=torch.int64)
    snapshot = {name: t.clone() for name, t in found.items()}
    rule.update(weight, found, empty, torch.zeros((0, 5)), rule.lr)
    assert all(torch.equal(t.nan_to_num(), found[n].nan_to_num()) for n, t in snapshot.items())


@by_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_tables_are_fp32_steps_rounded_to_nearest(
    rule: UpdateRule, dtype: torch.dtype
) -> None:
    weight, steps = draw_steps(7, 40, 65)
    low = weight.to(dtype)
    state, wide_state = (rule.new_state(40, 65, device=CPU) for _ in range(2))
    for rows, grad in steps:
        wide = low.float()
        rule.update(wide, wide_state, rows, grad, 0.01)
        rule.update(low, state, rows, grad, 0.01)
        assert torch.equal(low, wide.to(dtype))
        assert all(torch.equal(state[name], wide_state[name]) for name in state)


def test_low_precision_does_not_lose_steps_above_half_a_unit() -> None:
    weight = torch.ones((3, 1), dtype=torch.bfloat16)  # the next bf16 number is 1 + 2^-7
    grad = torch.tensor([[-(2.0**-8) - 2.0**-12], [-(2.0**-8) + 2.0**-12], [-(2.0**-8)]])
    SGD().update(weight, {}, torch.arange(3), grad, 1.0)
    assert weight.float().tolist() == [[1 + 2.0**-7], [1.0], [1.0]]  # a tie goes to even


@by_rule
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_new_value_depends_on_that_row_alone(
    rule: UpdateRule, dim: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(dim)
    num_rows = 41
    weight = torch.randn((num_rows, dim), generator=rng).to(dtype)
    grads = [torch.randn((num_rows, dim), generator=rng) for _ in range(3)]
    every = torch.arange(num_rows)
    together = run(rule, weight.clone(), [(every, grad) for grad in grads])
    shuffle = torch.randperm(num_rows, generator=rng)
    shuffled = run(rule, weight.clone(), [(shuffle, grad[shuffle]) for grad in grads])
    assert all(torch.equal(together[name], shuffled[name]) for name in together)
    for members in ([0], [1], [17], [40], [3, 30], list(range(5, 14))):
        rows = torch.tensor(members)
        alone = run(rule, weight.clone(), [(rows, grad[rows]) for grad in grads])
        assert all(torch.equal(alone[name][rows], t[rows]) for name, t in together.items())
        small = run(rule, weight[rows].clone(), [(torch.arange(len(rows)), g[rows]) for g in grads])
        assert all(torch.equal(small[name], t[rows]) for name, t in together.items())


@by_rule
def test_nor_does_it_depend_on_threads(rule: UpdateRule) -> None:
    """2,000 rows of 64 are enough for torch to share an operation among threads."""
    rng = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn((2000, 64), generator=rng) for _ in range(2))
    torch.set_num_threads(2)
    together = run(rule, weight.clone(), [(torch.arange(2000), grad)] * 2)
    torch.set_num_threads(1)
    for row in (0, 999, 1000, 1999):
        rows = torch.tensor([row])
        alone = run(rule, weight[rows].clone(), [(torch.tensor([0]), grad[rows])] * 2)
        assert all(torch.equal(alone[name], t[rows]) for name, t in together.items())


@pytest.mark.parametrize("dim", [1, 65])
def test_every_operation_rounds_by_itself(dim: int) -> None:
    """Bit for bit what numpy gives, which never fuses a product into a sum."""
    weight, _ = draw_steps(11, 41, dim)
    rng, rows = torch.Generator().manual_seed(12), torch.arange(41)
    steps = [(rows, torch.randn((41, dim), generator=rng)) for _ in range(3)]
    f, start = np.float32, weight.numpy().copy()
    sgd, adagrad, m, v, square = start, start, start * f(0), start * f(0), start * f(0)
    for _, grad in steps:
        g = grad.numpy()
        sgd = sgd + g * f(-0.1)
        square = square + g * g
        root = torch.from_numpy(square).sqrt().numpy()  # MKL's may be one bit off IEEE's
        adagrad = adagrad + g * f(-0.1) / (root + f(1e-10))
        m, v = m * f(0.9) + g * f(1 - 0.9), v * f(0.999) + g * g * f(1 - 0.999)
    assert np.array_equal(run(SGD(lr=0.1), weight.clone(), steps)["weight"].numpy(), sgd)
    found = run(Adagrad(lr=0.1, eps=1e-10), weight.clone(), steps)
    assert np.array_equal(found["v"].numpy(), square)
    assert np.array_equal(found["weight"].numpy(), adagrad)
    found = run(Adam(), weight.clone(), steps)
    assert np.array_equal(found["m"].numpy(), m)
    assert np.array_equal(found["v"].numpy(), v)


@by_rule
def test_gradients_may_be_views_and_are_not_changed(rule: UpdateRule) -> None:
    rng = torch.Generator().manual_seed(0)
    buffer, weight = torch.randn((9, 80), generator=rng), torch.randn((9, 65), generator=rng)
    view, rows, before = buffer[:, 3:68], torch.arange(9), buffer.clone()
    found = run(rule, weight.clone(), [(rows, view)])
    expected = run(rule, weight.clone(), [(rows, view.contiguous())])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(buffer, before)


@by_rule
def test_the_learning_rate_of_a_step_is_the_one_given(rule: UpdateRule) -> None:
    start, rows, grad = torch.ones((2, 3)), torch.arange(2), torch.ones((2, 3))
    moves = []
    for lr in (0.25, 0.5, 0.0):
        weight = start.clone()
        rule.update(weight, rule.new_state(2, 3, device=CPU), rows, grad, lr)
        moves.append(start - weight)
    assert torch.allclose(2 * moves[0], moves[1])
    assert bool((moves[0] > 0.2).all())
    assert not moves[2].any()


def test_adam_counts_steps_per_row_for_ever() -> None:
    rule, rows, grad = Adam(lr=0.5), torch.tensor([0, 1]), torch.ones((2, 1))
    state = rule.new_state(2, 1, device=CPU)
    state["m"][:], state["v"][:] = 1.0, 1.0
    state["t"][:] = torch.tensor([2.0**24, 10**6])  # corrections are 1 long before
    weight = torch.zeros((2, 1))
    rule.update(weight, state, rows, grad, 0.5)
    assert weight.view(-1).tolist() == pytest.approx([-0.5, -0.5])
    assert state["t"][1] == 10**6 + 1
    for t in (1, 2, 100, 5000, 16000, 20000):
        state["t"][:] = t - 1
        state["m"][:], state["v"][:], weight[:] = 1.0, 1.0, 0.0
        rule.update(weight, state, rows, grad, 0.5)
        expected = -0.5 / (1 - 0.9**t) * math.sqrt(1 - 0.999**t)
        assert weight[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=-1.0), "SGD: lr must not be negative, got -1.0"),
        (lambda: SGD(lr=math.nan), "SGD: lr must not be negative, got nan"),
        (lambda: RowwiseAdagrad(lr=-0.1), "RowwiseAdagrad: lr"),
        (lambda: RowwiseAdagrad(eps=-0.1), "RowwiseAdagrad: eps must not be negative, got -0.1"),
        (lambda: Adagrad(lr=-0.1), "Adagrad: lr"),
        (lambda: Adagrad(eps=-0.1), "Adagrad: eps"),
        (lambda: Adam(lr=-0.1), "Adam: lr"),
        (lambda: Adam(eps=-0.1), "Adam: eps"),
        (lambda: Adam(betas=(0.9, 1.0)), r"Adam: betas must be in \[0, 1\), got \(0.9, 1.0\)"),
        (lambda: Adam(betas=(-0.1, 0.9)), "Adam: betas"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], UpdateRule], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 12, 13, 16, 64, 100, 128])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
def test_squares_of_column_pieces_have_the_bits_of_whole_rows(dim: int, num_rows: int) -> None:
    grad = torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(dim))
    whole = mean_squares(grad)
    assert torch.allclose(whole, grad.square().mean(1), rtol=1e-6)
    for pieces in range(1, num_blocks(dim) + 1):
        parts = [grad[:, a:b].contiguous() for a, b in column_bounds(dim, pieces)]
        blocks = torch.cat([block_squares(p, dim=dim) for p in parts], dim=1)
        assert torch.equal(mean_of_blocks(blocks, dim=dim), whole)
    for row in range(num_rows):  # a row's bits do not depend on the rows beside it
        assert torch.equal(mean_squares(grad[row : row + 1]), whole[row : row + 1])


def test_a_rule_with_given_squares_steps_as_with_its_own() -> None:
    rule, grad = RowwiseAdagrad(lr=0.1), torch.randn(3, 8)
    weights = [torch.zeros(5, 4), torch.zeros(5, 8)]
    states = [rule.new_state(5, w.shape[1], device=w.device) for w in weights]
    rows = torch.tensor([0, 2, 4])
    squares = mean_squares(grad)
    rule.update(weights[0], states[0], rows, grad[:, :4], 0.1, squares=squares)
    rule.update(weights[1], states[1], rows, grad, 0.1)
    assert torch.equal(weights[0], weights[1][:, :4])
    assert torch.equal(states[0]["v"], states[1]["v"])
