"""`rowmesh.nn.kernels`, bit for bit against loops that add in the documented order."""

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowmesh.nn.kernels import coalesce, pool, run_starts

LAW = settings(derandomize=True, deadline=None, max_examples=50)
DIMS = [1, 3, 8, 64, 65, 1030]
SEEDS = st.integers(0, 2**31)


def product(weight: Tensor | None, value: np.ndarray) -> np.ndarray:
    """Rounded to fp32 before it is added."""
    return value if weight is None else np.float32(weight) * value


def loop_pool(
    source: Tensor, positions: Tensor, starts: Tensor, weights: Tensor | None
) -> np.ndarray:
    rows = source.float().numpy()
    found = np.zeros((len(starts), source.shape[1]), np.float32)
    bounds = [*starts.tolist(), len(positions)]
    for b in range(len(starts)):
        for i in range(bounds[b], bounds[b + 1]):
            found[b] += product(None if weights is None else weights[i], rows[positions[i]])
    return found


def loop_tree(leaves: list[tuple[tuple[int, ...], np.ndarray]], depth: int) -> np.ndarray:
    """Sum of leaves (labels finest first, value): the coarsest label splits first."""
    total = np.zeros_like(leaves[0][1])
    if depth == 0:
        for _, value in leaves:
            total = total + value
    for _, node in groupby(leaves, key=lambda leaf: leaf[0][depth - 1]) if depth else ():
        total = total + loop_tree(list(node), depth - 1)
    return total


def draw_bags(seed: int, dim: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    positions = torch.randint(0, 7, (total,), generator=rng)
    starts = torch.tensor([sum(lengths[:b]) for b in range(len(lengths))], dtype=torch.int64)
    source = torch.randn((7, dim), generator=rng) * 10 ** torch.randn((7, 1), generator=rng)
    return source, positions, starts, torch.randn(total, generator=rng)


@LAW
@given(
    SEEDS,
    st.sampled_from(DIMS),
    st.lists(st.integers(0, 9), max_size=6),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_pool_adds_each_bag_in_order_from_zero(
    seed: int,
    dim: int,
    lengths: list[int],
    weighted: bool,
    index_type: torch.dtype,
    dtype: torch.dtype,
) -> None:
    source, positions, starts, drawn = draw_bags(seed, dim, lengths)
    source, weights = source.to(dtype), drawn if weighted else None
    found = pool(source, positions.to(index_type), starts.to(index_type), weights)
    assert found.dtype == torch.float32
    assert found.shape == (len(lengths), dim)
    assert np.array_equal(found.numpy(), loop_pool(source, positions, starts, weights))


def test_pool_order_matters_so_it_is_kept() -> None:
    source = torch.tensor([[1e8], [1.0], [-1e8]])
    found = pool(source, torch.tensor([0, 1, 2, 0, 2, 1]), torch.tensor([0, 3]))
    assert found.tolist() == [[0.0], [1.0]]


def test_pool_widens_before_the_sum() -> None:
    source = torch.tensor([[2048.0], [1.0]], dtype=torch.float16)  # 2049 is no fp16 number
    assert pool(source, torch.tensor([0, 1]), torch.tensor([0])).item() == 2049.0


def test_pool_rounds_products_and_leaves_its_source_alone() -> None:
    third = torch.tensor(1 / 3)
    source = torch.stack([third, third]).view(2, 1)
    found = pool(source, torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3.0, -3.0]))
    fused = float(third) * -3.0 + 1.0  # what one rounding of product and sum would leave
    assert found.item() == 0.0 != fused
    assert torch.equal(source, torch.full((2, 1), float(third)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_of_nothing(dtype: torch.dtype) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    source = torch.ones((3, 2), dtype=dtype)
    assert pool(source, none, none).shape == (0, 2)
    found = pool(source, none, torch.zeros(4, dtype=torch.int64), torch.zeros(0))
    assert found.dtype == torch.float32
    assert found.tolist() == [[0.0, 0.0]] * 4
    empty_last = pool(source, torch.tensor([0, 1]), torch.tensor([0, 0, 2]))
    assert empty_last.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


@LAW
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), max_size=12))
def test_runs_start_where_any_key_changes(drawn: list[list[int]]) -> None:
    drawn = sorted(drawn)
    columns = [torch.tensor([d[k] for d in drawn], dtype=torch.int64) for k in range(3)]
    for keys in (columns[:1], columns[:2], columns, [columns[0].int(), columns[1]]):
        tuples = list(zip(*(key.tolist() for key in keys), strict=True))
        expected = [i for i, key in enumerate(tuples) if i == 0 or key != tuples[i - 1]]
        found = run_starts(*keys)
        assert found.dtype == torch.int32
        assert found.tolist() == expected


@st.composite
def occurrences(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Rows in any order, and (rank, host) labels ascending, as gradients of ranks arrive."""
    num = draw(st.integers(0, 20))
    rows = draw(st.lists(st.integers(0, 5), min_size=num, max_size=num))
    ranks = sorted(draw(st.lists(st.integers(0, 5), min_size=num, max_size=num)))
    return rows, [(rank, rank // 2) for rank in ranks]


@LAW
@given(occurrences(), SEEDS, st.sampled_from(DIMS), st.integers(0, 2), st.booleans(), st.booleans())
def test_coalesce_adds_in_the_tree_of_labels(
    drawn: tuple[list[int], list[tuple[int, int]]],
    seed: int,
    dim: int,
    depth: int,
    weighted: bool,
    indexed: bool,
) -> None:
    rows, marks = drawn
    rng = torch.Generator().manual_seed(seed)
    num_values = 4 if indexed else len(rows)
    values = torch.randn((num_values, dim), generator=rng) * 1e3
    index = torch.randint(0, 4, (len(rows),), generator=rng) if indexed else None
    weights = torch.randn(len(rows), generator=rng) if weighted else None
    labels = [torch.tensor([m[k] for m in marks], dtype=torch.int64) for k in range(depth)]
    before = values.clone()
    found, sums = coalesce(
        torch.tensor(rows, dtype=torch.int64), values, index=index, weights=weights, labels=labels
    )
    assert found.tolist() == sorted(set(rows))
    assert sums.shape == (len(found), dim)
    assert torch.equal(values, before)
    for row, total in zip(found.tolist(), sums.numpy(), strict=True):
        leaves = [
            (marks[i][:depth], product(None if weights is None else weights[i], value))
            for i, value in enumerate((values if index is None else values[index]).numpy())
            if rows[i] == row
        ]
        assert np.array_equal(total, loop_tree(leaves, depth))


def test_coalesce_by_hand() -> None:
    values = torch.tensor([[1e8], [-1e8], [1.0], [3.0]])
    rows, ranks = torch.tensor([5, 5, 5, 2]), torch.tensor([0, 1, 1, 1])
    found, sums = coalesce(rows, values)
    assert (found.tolist(), sums.tolist()) == ([2, 5], [[3.0], [1.0]])
    _, sums = coalesce(rows, values, labels=[ranks])  # -1e8 + 1 is -1e8 in fp32
    assert sums.tolist() == [[3.0], [0.0]]


def test_three_levels_differ_from_two_and_from_none() -> None:
    """Otherwise the tree test above would not see a level that is left out."""
    rng = torch.Generator().manual_seed(0)
    values, rows = torch.randn((64, 65), generator=rng), torch.zeros(64, dtype=torch.int64)
    ranks = torch.arange(64) // 4
    trees = [(), (ranks,), (ranks, ranks // 4)]
    sums = [coalesce(rows, values, labels=labels)[1] for labels in trees]
    assert not torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[1], sums[2])
    assert torch.allclose(sums[0], sums[2], atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
def test_coalesce_of_nothing(weighted: bool, labelled: bool) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    found, sums = coalesce(
        none,
        torch.ones((3, 2)),
        index=none,
        weights=torch.zeros(0) if weighted else None,
        labels=[none] if labelled else [],
    )
    assert found.shape == (0,)
    assert sums.shape == (0, 2)


def test_coalesce_of_distinct_rows_sorts_and_weighs() -> None:
    values, rows = torch.arange(6.0).view(3, 2), torch.tensor([7, 3, 5])
    found, sums = coalesce(rows, values)
    assert (found.tolist(), sums.tolist()) == ([3, 5, 7], [[2, 3], [4, 5], [0, 1]])
    found, sums = coalesce(rows, values, weights=torch.tensor([10.0, 2.0, 1.0]))
    assert sums.tolist() == [[4, 6], [4, 5], [0, 10]]
    found, sums = coalesce(rows[:2], values, index=torch.tensor([0, 1]))
    assert (found.tolist(), sums.tolist()) == ([3, 7], [[2, 3], [0, 1]])
