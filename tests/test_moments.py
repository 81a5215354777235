"""Groups that step apart: the rule with scaled moments, the mean, and the laws of both."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.errors import InputError
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.optim import MomentumScaledRowwiseAdagrad, RowwiseAdagrad, UpdateRule
from rowmesh.optim.groups import mean_of_groups, rule_apart
from rowmesh.placement import (
    Copies,
    MeshShape,
    Plan,
    Split,
    Sync,
    TablePlan,
    Tier,
    make_hot_set,
)
from rowmesh.tables import PoolingType

LAW = settings(derandomize=True, deadline=None, max_examples=40)
CPU = torch.device("cpu")
ROWS, DIM = 12, 4
RULES: list[UpdateRule] = [
    rm.SGD(lr=0.1),
    rm.RowwiseAdagrad(lr=0.1),
    rm.Adagrad(lr=0.1),
    rm.Adam(lr=0.1),
    MomentumScaledRowwiseAdagrad(lr=0.1),
    MomentumScaledRowwiseAdagrad(lr=0.1, scale=3.0),
]
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
Sample = tuple[int, Sequence[float]]  # a row, and what its gradient is times the global batch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: on a busy machine a second thread costs a thousand times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tilted(nn.Module):
    """``loss = <v, x> + curve * |v|^2 / 2``: gradient x + curve * v of the sample's row v."""

    def __init__(self, curve: float = 0.0) -> None:
        super().__init__()
        config = rm.EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
        )
        self.ebc = rm.EmbeddingBagCollection(tables=[config], device="meta", seed=3)
        self.curve = curve

    def forward(self, batch: Batch) -> Tensor:
        vectors = self.ebc(batch.sparse_features).values()
        tilt = (vectors * batch.dense_features).sum(1)
        return tilt + 0.5 * self.curve * vectors.square().sum(1)


def part(samples: Sequence[Sample]) -> Batch:
    rows = torch.tensor([row for row, _ in samples], dtype=torch.int64)
    return Batch(
        dense_features=torch.tensor([list(x) for _, x in samples]).reshape(-1, DIM),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(["f"], rows, torch.ones_like(rows)),
        labels=torch.zeros(len(rows)),
    )


def plan(
    world: int,
    groups: int,
    *,
    mode: Any = "weights",
    period: int = 1,
    layout: Any = "contiguous",
    hot: Sequence[int] = (),
    tree: Any = "flat",
    local: int = 1,
) -> Plan:
    size = world // groups
    mesh = MeshShape(hosts=world // local, local=local, group=size, layout=layout)
    ranks = tuple(range(size)) if layout == "contiguous" else tuple(range(0, world, groups))
    split = Split(kind="boxes", rows="all") if size > 1 else Split()
    tiers = [Tier(ranks=ranks, split=split)]
    if hot:
        rows = make_hot_set("t", np.asarray(sorted(hot)))
        tiers.insert(0, Tier(ranks=tuple(range(world)), copies=Copies.WORLD, rows=rows))
    table = TablePlan(
        name="t",
        collection="ebc",
        num_embeddings=ROWS,
        embedding_dim=DIM,
        data_type="fp32",
        pooling=PoolingType.SUM,
        feature_names=("f",),
        virtual_shards=32,
        tiers=tuple(tiers),
    )
    sync = Sync(mode=mode, period=period)
    return Plan(mesh=mesh, tables=(table,), sync=sync, tree=tree).validate()


def train(
    how: Plan, rule: UpdateRule, steps: Sequence[Sequence[Sequence[Sample]]], curve: float = 0.0
) -> rm.Oracle:
    """``steps[step][rank]`` are samples."""
    dense = functools.partial(torch.optim.SGD, lr=0.1)
    oracle = rm.Oracle(Tilted(curve), dense=dense, sparse=rule, plan=how)
    for parts in steps:
        oracle.step([part(samples) for samples in parts])
    return oracle


def random_steps(seed: int, world: int, *, num_steps: int = 3) -> list[list[list[Sample]]]:
    """Ranks with 0 to 4 samples; the first rank has none in the first step."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, (num_steps, world))
    sizes[0, 0], sizes[0, -1] = 0, max(sizes[0, -1], 1)
    return [
        [
            [(int(rng.integers(ROWS)), rng.normal(size=DIM).tolist()) for _ in range(size)]
            for size in of_step
        ]
        for of_step in sizes
    ]


# MomentumScaledRowwiseAdagrad


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        ("group", "scale must be 'groups' or a number, got 'group'"),
        (0.0, "scale must be above 0 and finite, got 0.0"),
        (-1.0, "above 0"),
        (float("inf"), "finite"),
        (float("nan"), "got nan"),
    ],
)
def test_a_scale_is_positive_and_finite(scale: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        MomentumScaledRowwiseAdagrad(scale=scale)
    with pytest.raises(InputError, match="lr must not be negative"):
        MomentumScaledRowwiseAdagrad(lr=-1.0)


def test_for_groups_is_the_number_of_groups_unless_a_scale_was_given() -> None:
    assert MomentumScaledRowwiseAdagrad(lr=0.3).for_groups(8).scale == 8.0
    assert MomentumScaledRowwiseAdagrad(lr=0.3).for_groups(8).lr == 0.3
    assert MomentumScaledRowwiseAdagrad(scale=2.5).for_groups(8).scale == 2.5


def update(rule: UpdateRule, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weights and v of rows that start at 0."""
    weight = torch.zeros_like(grads[0])
    state, rows = rule.new_state(*weight.shape, device=CPU), torch.arange(len(weight))
    for grad in grads:
        rule.update(weight, state, rows, grad.clone(), rule.lr)
    return weight, state["v"]


@LAW
@given(seed=st.integers(0, 10**6), dim=st.sampled_from([1, 3, 8, 65]))
def test_a_scale_of_1_has_the_bits_of_rowwise_adagrad(seed: int, dim: int) -> None:
    grads = list(torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(seed)))
    expected = update(RowwiseAdagrad(lr=0.1), grads)
    for rule in (
        MomentumScaledRowwiseAdagrad(lr=0.1, scale=1.0),
        MomentumScaledRowwiseAdagrad(lr=0.1),  # for_groups has not said otherwise
    ):
        for found, wanted in zip(update(rule, grads), expected, strict=True):
            assert torch.equal(found, wanted)


@LAW
@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 100.0))
def test_v_is_stored_divided_by_c(seed: int, scale: float) -> None:
    grads = list(torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(seed)))
    _, moments = update(MomentumScaledRowwiseAdagrad(lr=0.1, scale=scale), grads)
    expected = sum(grad.double().square().mean(1) for grad in grads) / scale
    assert torch.allclose(moments.double(), expected, rtol=1e-5)


@LAW
@given(seed=st.integers(0, 10**6), scale=st.floats(0.25, 16.0))
def test_without_eps_a_scale_is_a_factor_of_the_learning_rate(seed: int, scale: float) -> None:
    # lr * g / sqrt(v / c) = lr * sqrt(c) * g / sqrt(v): papers/two_d says what follows
    grads = list(torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(seed)))
    scaled, _ = update(MomentumScaledRowwiseAdagrad(lr=0.1, eps=0.0, scale=scale), grads)
    plain, _ = update(RowwiseAdagrad(lr=0.1 * scale**0.5, eps=0.0), grads)
    assert torch.allclose(scaled, plain, rtol=1e-4, atol=1e-6)


def test_another_number_of_groups_needs_no_rescaling() -> None:
    # a row that one group touches: v after 4 groups, then 2, is that of full model parallelism
    rule, grad = MomentumScaledRowwiseAdagrad(lr=0.1), torch.full((1, DIM), 0.25)
    v = torch.zeros(1)
    for count in (4, 2):
        copies = []
        for group in range(count):
            state = {"v": v.clone()}
            if group == 0:
                weight = torch.zeros(1, DIM)
                rows = torch.tensor([0])
                rule.for_groups(count).update(weight, state, rows, grad * count, 0.1)
            copies.append(state["v"])
        v = mean_of_groups(copies)
    assert float(v) == pytest.approx(2 * 0.25**2)


# rule_apart and mean_of_groups


def test_the_rule_of_rows_that_groups_step_together_or_apart() -> None:
    scaled = MomentumScaledRowwiseAdagrad(lr=0.3, eps=0.5, scale="groups")
    for count in (1, 4):
        assert rule_apart(scaled, count) == replace(scaled, scale=float(count))
        assert rule_apart(replace(scaled, scale=2.0), count) == replace(scaled, scale=2.0)
        for rule in RULES[:4]:
            assert rule_apart(rule, count) is rule


def test_the_mean_is_added_in_order_in_fp32() -> None:
    values = [torch.tensor([x]) for x in (1e8, -1e8, 3.0, 1.0)]
    assert mean_of_groups(values).item() == 1.0
    assert mean_of_groups([values[2], values[0], values[1], values[3]]).item() == 0.25  # 3 is lost


@LAW
@given(
    value=st.floats(-1e4, 1e4, width=16),
    count=st.integers(1, 16),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_an_element_that_all_agree_on_keeps_its_bits(
    value: float, count: int, dtype: torch.dtype
) -> None:
    alike = torch.tensor([value / 3, 1.0]).to(dtype)
    values = [alike.clone() for _ in range(count)]
    assert torch.equal(mean_of_groups(values), alike)
    values[-1][1] += 1  # the other element of the same tensor does not
    found = mean_of_groups(values)
    assert found[0] == alike[0]
    assert found.dtype == dtype
    assert float(found[1]) == pytest.approx(1 + 1 / count, rel=1e-2)


def test_fp16_is_added_in_fp32_and_rounded_once() -> None:
    values = [torch.tensor([x], dtype=torch.float16) for x in (60000.0, 60000.0, 3.0)]
    wanted = torch.tensor([120003.0 / 3], dtype=torch.float32).half()  # the sum is beyond fp16
    assert torch.equal(mean_of_groups(values), wanted)


# The laws of the stored moment


@pytest.mark.parametrize("groups", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [1, 2])
def test_moments_of_rare_and_of_correlated_rows(groups: int, size: int) -> None:
    world = groups * size
    same = (0.5, -1.0, 0.25, 2.0)
    steps: list[list[list[Sample]]] = []
    for step in range(3):
        parts: list[list[Sample]] = [[(1, same)] for _ in range(world)]  # row 1: alike in all
        parts[step % world].append((0, (0.3 + step, 1.0, -0.7, 0.1)))  # row 0: of one group
        steps.append(parts)
    full = train(plan(world, 1), RowwiseAdagrad(), steps).states["t"]["v"]
    expected = {
        ("weights", 1.0): (groups, 1.0),
        ("weights", float(groups)): (1.0, 1 / groups),
        ("moments-first", 1.0): (1.0, 1 / groups),
        ("gradients", 1.0): (1.0, 1.0),
    }
    for (mode, scale), wanted in expected.items():
        rule = MomentumScaledRowwiseAdagrad(scale=scale)
        moments = train(plan(world, groups, mode=mode), rule, steps).states["t"]["v"]
        assert (moments[:2] / full[:2]).tolist() == pytest.approx(wanted, rel=1e-5)
        assert torch.count_nonzero(moments[2:]) == 0
    for mode in ("weights", "moments-first"):  # c is M, and 1 where squares are summed first
        found = train(plan(world, groups, mode=mode), MomentumScaledRowwiseAdagrad(), steps)
        ratios = (found.states["t"]["v"][:2] / full[:2]).tolist()
        assert ratios == pytest.approx((1.0, 1 / groups), rel=1e-5)


@LAW
@given(
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([2, 4]),
    size=st.sampled_from([1, 2]),
    layout=st.sampled_from(["contiguous", "strided"]),
    mode=st.sampled_from(["weights", "moments-first"]),
)
def test_sgd_synced_every_step_is_full_model_parallelism(
    seed: int, groups: int, size: int, layout: str, mode: str
) -> None:
    steps = random_steps(seed, groups * size)  # uneven groups, and one with no samples
    full = train(plan(groups * size, 1), rm.SGD(lr=0.1), steps, curve=1.0)
    how = plan(groups * size, groups, mode=mode, layout=layout)
    found = train(how, rm.SGD(lr=0.1), steps, curve=1.0)
    assert torch.allclose(found.weight("t"), full.weight("t"), rtol=1e-5, atol=1e-6)


@by_rule
def test_summed_gradients_are_full_model_parallelism(rule: UpdateRule) -> None:
    steps = random_steps(1, 4)
    flat = train(plan(4, 1), rule, steps, curve=1.0)
    hosts = train(plan(4, 1, tree="host-first", local=2), rule, steps, curve=1.0)
    same = [  # the same sums in the same order
        (flat, plan(4, 4, mode="gradients")),
        (hosts, plan(4, 2, mode="gradients", tree="host-first", local=2)),
    ]
    for full, how in same:
        found = train(how, rule, steps, curve=1.0)
        assert torch.equal(found.weight("t"), full.weight("t"))
        for name, state in found.states["t"].items():
            assert torch.equal(state, full.states["t"][name])
    other = train(plan(4, 2, mode="gradients", layout="strided"), rule, steps, curve=1.0)
    assert torch.allclose(other.weight("t"), flat.weight("t"), rtol=1e-5, atol=1e-5)


@LAW
@given(
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([2, 4]),
    mode=st.sampled_from(["weights", "moments-first"]),
    period=st.integers(1, 3),
    rule=st.sampled_from(RULES),
)
def test_all_copies_are_alike_after_a_sync_and_only_then(
    seed: int, groups: int, mode: str, period: int, rule: UpdateRule
) -> None:
    steps = random_steps(seed, groups, num_steps=2 * period)
    how = plan(groups, groups, mode=mode, period=period)
    oracle = train(how, rule, steps[:-1], curve=1.0)
    before = [weight["t"].clone() for weight in oracle._copies()[0]]
    is_alike = all(torch.equal(w, before[0]) for w in before)
    stepped = period > 1 and any(samples for parts in steps[period:-1] for samples in parts)
    assert is_alike == (not stepped)
    oracle.step([part(samples) for samples in steps[-1]])
    weights, states = oracle._copies()
    for weight, state in zip(weights, states, strict=True):
        assert torch.equal(weight["t"], weights[0]["t"])
        assert all(torch.equal(state["t"][k], states[0]["t"][k]) for k in state["t"])


def test_a_row_that_one_group_touched_moves_by_its_step_over_all_groups() -> None:
    grad = torch.tensor([0.5, -1.0, 0.25, 2.0])
    parts: list[list[Sample]] = [[(0, grad.tolist())], [(1, [1.0] * DIM)], [], [(2, [1.0] * DIM)]]
    steps = [parts, [[], [(3, [1.0] * DIM)], [], []]]
    before = train(plan(4, 4), RULES[0], []).weight("t").clone()
    for scale in (1.0, 4.0):
        rule = MomentumScaledRowwiseAdagrad(lr=0.1, eps=0.0, scale=scale)
        found = train(plan(4, 4), rule, steps).weight("t")
        mine = 4 * grad / 3  # M times the group's share of a batch of 3
        delta = -0.1 * mine / (mine.square().mean() / scale).sqrt()
        assert torch.allclose(found[0], before[0] + delta / 4, rtol=1e-5)
        assert not torch.allclose(found[0], before[0] + delta, rtol=1e-2)  # mean over touchers
        assert torch.equal(found[4:], before[4:])


@by_rule
@pytest.mark.parametrize("mode", ["gradients", "weights", "moments-first"])
@pytest.mark.parametrize("period", [1, 3])
def test_rows_on_every_rank_are_stepped_as_without_groups(
    rule: UpdateRule, mode: str, period: int
) -> None:
    steps, hot = random_steps(5, 4, num_steps=4), [0, 3, 7, 11]
    full = train(plan(4, 1), rule, steps)
    how = plan(4, 4, mode=mode, period=1 if mode == "gradients" else period, hot=hot)
    oracle = train(how, rule, steps)
    for weight, state in zip(*oracle._copies(), strict=True):  # also between syncs
        assert torch.equal(weight["t"][hot], full.weight("t")[hot])
        for name, values in state["t"].items():
            assert torch.equal(values[hot], full.states["t"][name][hot])
