"""Compiled kernels: every function gives what its torch path gives, bit for bit."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rowmesh as rm
from rowmesh import native
from rowmesh.errors import InputError
from rowmesh.native import library
from rowmesh.nn.bags import Bags, Reader, check_ids, flatten, readers_of
from rowmesh.nn.kernels import coalesce, run_numbers, run_starts, stable_sort
from rowmesh.optim.squares import block_squares, mean_squares
from rowmesh.runtime import routes
from rowmesh.runtime.stacks import StackLayout, lay_out
from tests.cases import Case, cases, configs

LAW = settings(derandomize=True, deadline=None, max_examples=30)
SEEDS = st.integers(0, 2**31)
DIMS = [1, 3, 8, 13, 64, 130]
INTEGERS = [torch.int32, torch.int64]

needs_library = pytest.mark.skipif(
    not native.is_available(),
    reason=f"compiled kernels: {native.describe()}; with a C compiler pip install -e . builds them",
)


@contextmanager
def plain() -> Iterator[None]:
    """The torch paths, inside."""
    with mock.patch.object(library, "_find", return_value=(None, "off")):
        yield


def bits(value: Any) -> Any:
    """Something that is equal only for equal bits; any NaN is one NaN."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            value = torch.where(value.isnan(), torch.full_like(value, torch.nan), value)
            value = value.view(torch.int32 if value.dtype == torch.float32 else torch.int16)
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, list | tuple):
        return [bits(part) for part in value]
    if is_dataclass(value):
        return [bits(getattr(value, f.name)) for f in fields(value)]
    return value


def agree(call: Callable[[], Any]) -> Any:
    """What both paths give; they must be equal."""
    with plain():
        expected = call()
    with mock.patch.object(torch, "sort", side_effect=AssertionError("the torch path")):
        found = call()
    assert bits(found) == bits(expected)
    return found


def floats(shape: tuple[int, ...], seed: int) -> Tensor:
    """Of many sizes, with zeros of both signs among them."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=rng) * 10 ** torch.randn(shape, generator=rng)
    kind = torch.rand(shape, generator=rng)
    drawn[kind < 0.1] = 0.0
    drawn[kind > 0.9] = -0.0
    return drawn


def integers(low: int, high: int, count: int, seed: int, dtype: torch.dtype) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count,), generator=rng).to(dtype)


@needs_library
@LAW
@given(
    st.sampled_from([0, 1, 2, 50, 3000]),
    st.sampled_from([1, 2, 7, 1 << 11, 1 << 20, 1 << 22, 1 << 31, 1 << 32]),
    st.booleans(),
    st.sampled_from(INTEGERS),
    SEEDS,
)
def test_sorting_is_stable_and_gives_runs(
    count: int, below: int, from_the_top: bool, dtype: torch.dtype, seed: int
) -> None:
    if dtype == torch.int32:
        below = min(below, 1 << 31)
    low = max(0, below - 20) if from_the_top else 0
    keys = integers(low, below, count, seed, dtype)
    found, order = agree(lambda: stable_sort(keys))
    starts = agree(lambda: run_starts(found))
    numbers = agree(lambda: run_numbers(order, starts))
    assert torch.equal(found, keys[order.long()])
    assert torch.equal(found[starts.long()][numbers.long()], keys)
    place = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))
    agree(lambda: routes._move(found.index_select(0, starts), order, starts, place))


@needs_library
@pytest.mark.parametrize("bad", [-1, 1 << 32, 1 << 62])
def test_keys_it_cannot_sort_are_left_to_torch(bad: int) -> None:
    keys = torch.tensor([5, bad, 3])
    assert native.stable_sort(keys) is None
    assert stable_sort(keys)[0].tolist() == sorted(keys.tolist())


@st.composite
def occurrences(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `coalesce`: labels in any order too."""
    count, dim = draw(st.sampled_from([0, 1, 2, 9, 40])), draw(st.sampled_from(DIMS))
    below, seed = draw(st.sampled_from([1, 3, 12, 1 << 31])), draw(SEEDS)
    dtype = draw(st.sampled_from(INTEGERS))
    num_values = draw(st.integers(1, 9)) if draw(st.booleans()) else None
    index = None
    if num_values is not None:
        index = integers(0, num_values, count, seed + 1, draw(st.sampled_from(INTEGERS)))
    labels = [
        integers(0, 3, count, seed + 2 + level, draw(st.sampled_from(INTEGERS)))
        for level in range(draw(st.integers(0, 3)))
    ]
    if draw(st.booleans()):
        labels = [label.sort()[0] for label in labels]
    return {
        "rows": integers(max(0, below - 12), below, count, seed, dtype),
        "values": floats((count if num_values is None else num_values, dim), seed),
        "index": index,
        "weights": floats((count,), seed + 7) if draw(st.booleans()) else None,
        "labels": labels,
    }


@needs_library
@LAW
@given(occurrences())
def test_coalesce(arguments: dict[str, Any]) -> None:
    agree(lambda: coalesce(**arguments))


@needs_library
def test_coalesce_of_special_values() -> None:
    values = torch.tensor([[torch.inf, torch.nan, -0.0, 1e-45], [-torch.inf, 1.0, -0.0, 1e-45]])
    for rows in ([4, 4], [4, 2], [1, 1]):
        agree(lambda rows=rows: coalesce(torch.tensor(rows), values))


@needs_library
def test_an_index_outside_the_values_is_torchs_error() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        coalesce(torch.tensor([0, 0]), torch.ones(2, 3), index=torch.tensor([0, 2]))


@needs_library
@LAW
@given(st.sampled_from(DIMS), st.integers(0, 9), SEEDS)
def test_squares(dim: int, count: int, seed: int) -> None:
    grad = floats((count, dim), seed)
    agree(lambda: block_squares(grad, dim=dim))
    agree(lambda: mean_squares(grad))


RULES = [
    rm.RowwiseAdagrad(lr=0.05),
    rm.RowwiseAdagrad(lr=0.3, eps=1e-3),
    rm.MomentumScaledRowwiseAdagrad(lr=0.05),
    rm.MomentumScaledRowwiseAdagrad(lr=0.05, scale=3.0),
]


@needs_library
@LAW
@given(
    st.sampled_from(RULES),
    st.sampled_from(DIMS),
    st.integers(0, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    SEEDS,
)
def test_row_wise_adagrad(
    rule: Any, dim: int, count: int, dtype: torch.dtype, given_squares: bool, seed: int
) -> None:
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:count]
    grad, weight = floats((count, dim), seed), floats((40, dim), seed + 1).to(dtype)
    squares = floats((count,), seed + 2).abs() if given_squares else None

    def step() -> list[Tensor]:
        stepped, state = weight.clone(), {"v": floats((40,), seed + 3).abs()}
        for _ in range(2):
            rule.update(stepped, state, rows, grad, rule.lr, squares=squares)
        return [stepped, state["v"]]

    agree(step)


@needs_library
def test_a_step_is_seen_by_autograd_and_refuses_rows_outside() -> None:
    weight, rule = torch.ones(4, 8), rm.RowwiseAdagrad()
    state, before = rule.new_state(4, 8, device=weight.device), weight._version
    rule.update(weight, state, torch.tensor([2]), torch.ones(1, 8), 0.1)
    assert weight._version > before
    with pytest.raises((IndexError, RuntimeError)):
        rule.update(weight, state, torch.tensor([4]), torch.ones(1, 8), 0.1)


READERS = [Reader(feature=f, table=t, name=f) for f, t in (("a", 0), ("b", 1), ("a", 2))]
TABLES = [
    rm.EmbeddingBagConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=8, feature_names=[f])
    for t, (rows, f) in enumerate(((40, "a"), (1000, "b"), (40, "a")))
]


def draw_features(lengths: list[int], dtype: torch.dtype, seed: int) -> rm.KeyedJaggedTensor:
    """Of "a", "b" and "c"; ids of "a" below 40, of "b" below 1,000."""
    third = len(lengths) // 3
    sizes = [sum(lengths[k * third : (k + 1) * third]) for k in range(3)]
    ids = [integers(0, b, n, seed, dtype) for b, n in zip((40, 1000, 5), sizes, strict=True)]
    return rm.KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.cat(ids),
        floats((sum(lengths),), seed),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=third,
    )


@st.composite
def jagged(draw: st.DrawFn) -> rm.KeyedJaggedTensor:
    samples = draw(st.integers(0, 6))
    size = st.integers(0, 9) if draw(st.booleans()) else st.just(draw(st.integers(0, 3)))
    lengths = draw(st.lists(size, min_size=3 * samples, max_size=3 * samples))
    return draw_features(lengths, draw(st.sampled_from(INTEGERS)), draw(SEEDS))


@needs_library
@LAW
@given(jagged(), st.booleans(), st.booleans())
def test_flatten_and_check(features: rm.KeyedJaggedTensor, pooled: bool, weighted: bool) -> None:
    bags = agree(lambda: flatten(features, READERS, pooled=pooled, weighted=weighted))
    agree(lambda: check_ids(bags, READERS, TABLES))
    if not len(bags.ids):
        return
    for bad in (-1, 40, 1 << 40):
        wrong = replace(bags, ids=bags.ids.clone())
        wrong.ids[-1] = bad  # of table t2, which has 40 rows
        with pytest.raises(InputError) as native_error:
            check_ids(wrong, READERS, TABLES)
        with plain(), pytest.raises(InputError) as torch_error:
            check_ids(wrong, READERS, TABLES)
        assert str(native_error.value) == str(torch_error.value)


def stacks_of(case: Case) -> Iterator[tuple[StackLayout, Bags]]:
    """Every stack of the case as rank 0 sees it, with the bags of its first batch."""
    plan, features = case.plan(), case.batch(0, 0)["features"]
    topology = rm.Topology(hosts=case.hosts, local=case.world // case.hosts)
    for number, collection in enumerate(case.collections):
        readers = readers_of(configs(case, number))
        plans = [t for t in plan.tables if t.collection == f"collections.{number}"]
        layouts = lay_out(
            plans,
            [plan.groups(t) for t in plans],
            readers,
            topology=topology,
            rank=0,
            device=torch.device("cpu"),
        )
        kind = {"pooled": collection.kind != "sequence", "weighted": collection.kind == "weighted"}
        for layout in layouts:
            mine = [readers[r] for r in layout.readers]
            yield layout, flatten(features, mine, **kind)


@needs_library
@LAW
@given(st.data(), st.sampled_from([1, 2, 4]), st.booleans())
def test_routes(data: st.DataObject, world: int, exact: bool) -> None:
    """Hot rows, copies, bags pooled by owners, without dedup, weights, shards of any number."""
    for layout, bags in stacks_of(data.draw(cases(world=world, exact=exact))):
        for wide in (False, True):
            with mock.patch.object(routes, "_INT32", -1 if wide else (1 << 31) - 1):
                agree_on_routes(layout, bags)


def agree_on_routes(layout: StackLayout, bags: Bags) -> None:
    """Whole routes agree; slots in a type of their own, so marks only where they are used."""
    bases = routes._bases(layout, len(bags.lengths))
    agree(lambda: routes._places(layout, bags, bases)[0])
    found = agree(lambda: routes.route_bags(layout, bags, training=True))
    assert found.forward.positions.dtype == torch.int32


@needs_library
@LAW
@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=6), st.booleans(), SEEDS)
def test_terms_are_kept(drawn: list[list[bool]], weighted: bool, seed: int) -> None:
    keep = torch.tensor([k for terms in drawn for k in terms], dtype=torch.bool)
    sizes = torch.tensor([len(terms) for terms in drawn], dtype=torch.int64)
    starts = (torch.cumsum(sizes, 0) - sizes).to(torch.int32)
    weights = floats((len(keep),), seed) if weighted else None
    given = routes.Sum(integers(0, 9, len(keep), seed, torch.int32), starts, weights)
    kept = agree(lambda: given.kept(keep))
    assert len(kept.positions) == int(keep.sum())


@needs_library
def test_usual_tensors_take_the_compiled_path() -> None:
    """Otherwise the laws above would compare torch with itself."""
    three = torch.arange(3, dtype=torch.int32)
    long, flag = three.long(), torch.ones(3, dtype=torch.bool)
    weight, settings = torch.ones(3, 8), {"lr": 0.1, "eps": 0.0, "divisor": 1.0, "width": 1}
    assert native.stable_sort(three.flip(0)) is not None
    assert native.run_starts(three) is not None
    assert native.run_numbers(three, three) is not None
    assert native.move_runs(three, three, long) is not None
    assert native.mark_pooled(three, three, long, three, flag) is not None
    assert native.keep_terms(flag, three, three, torch.ones(3)) is not None
    assert native.flatten(three, long, torch.ones_like(long), None, 3, 0) is not None
    assert native.ids_fit(long, three, long + 1)
    assert native.coalesce(long, weight, index=None, weights=None, labels=[three]) is not None
    assert native.block_squares(weight, width=8) is not None
    step = (weight, torch.ones(3), long, weight.clone())
    assert native.step_rowwise_adagrad(*step, squares=None, **settings)


@needs_library
def test_other_tensors_take_the_torch_path() -> None:
    strided = torch.arange(6).view(3, 2)[:, 0]
    assert native.stable_sort(strided) is None
    assert native.stable_sort(torch.arange(3).to(torch.int16)) is None
    assert native.stable_sort(torch.empty(3, dtype=torch.int64, device="meta")) is None
    assert native.block_squares(torch.ones(2, 4).double(), width=1) is None
    assert stable_sort(strided)[0].tolist() == [0, 2, 4]


def test_a_library_of_another_interface_is_not_used() -> None:
    if not native.is_available():
        pytest.skip(f"compiled kernels: {native.describe()}")
    built = library._INTERFACE
    with mock.patch.object(library, "_INTERFACE", 99):
        assert library._find.__wrapped__() == (None, f"built from interface {built}, this is 99")


def test_it_can_be_turned_off() -> None:
    library._find.cache_clear()  # as in a process that has not looked yet
    try:
        with mock.patch.dict(os.environ, {"ROWMESH_NATIVE": "0"}):
            assert not native.is_available()
            assert native.describe() == "turned off by ROWMESH_NATIVE=0"
    finally:
        library._find.cache_clear()
