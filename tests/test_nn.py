"""Each sentence of `rowmesh.nn`, against torch's own embeddings and slow loops."""

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowmesh.errors import InputError
from rowmesh.features import JaggedTensor, KeyedJaggedTensor
from rowmesh.nn import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.nn.init import initial_values
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig, PoolingType

LAW = settings(derandomize=True, deadline=None, max_examples=50)
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
ROWS = 11
FEATURES = ("u", "unused", "i", "v", "w")
LOW = [torch.float16, torch.bfloat16]
both_kinds = pytest.mark.parametrize("kind", ["bags", "sequences"])


def bag(name: str, dim: int, *features: str, **more: Any) -> EmbeddingBagConfig:
    shape = {"num_embeddings": ROWS, "embedding_dim": dim}
    return EmbeddingBagConfig(name=name, feature_names=list(features), **shape | more)


def sequence(name: str, dim: int, *features: str, **more: Any) -> EmbeddingConfig:
    shape = {"num_embeddings": ROWS, "embedding_dim": dim}
    return EmbeddingConfig(name=name, feature_names=list(features), **shape | more)


def mixed(**more: Any) -> list[EmbeddingBagConfig]:
    """Shared tables, features that read two, several dims, sums and means side by side."""
    return [
        bag("a", 3, "u", "i", **more),
        bag("b", 64, "i", pooling=MEAN, **more),
        bag("c", 3, "v", pooling=MEAN, **more),
        bag("d", 1, "u", **more),
        bag("e", 1030, "w", **more),
    ]


def batch(seed: int = 0, stride: int = 5, *, weighted: bool = False) -> KeyedJaggedTensor:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * stride,), generator=rng)
    total = int(lengths.sum())
    weights = torch.randn(total, generator=rng) if weighted else None
    ids = torch.randint(0, ROWS, (total,), generator=rng)
    return KeyedJaggedTensor(FEATURES, ids, weights, lengths=lengths, stride=stride)


def one(column: Sequence[Any], *, feature: str = "f", **more: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_dense({feature: torch.tensor(column, **more)})


def torch_bags(module: EmbeddingBagCollection, features: KeyedJaggedTensor) -> Tensor:
    """The output by one nn.functional.embedding_bag a reader, with dense gradients."""
    blocks = []
    for config in module.embedding_bag_configs():
        weight = module.embedding_bags[config.name].weight.float()
        for feature in config.feature_names:
            jagged = features[feature]
            weights = jagged.weights_or_none()
            blocks.append(
                nn.functional.embedding_bag(
                    jagged.values(),
                    weight,
                    jagged.offsets(),
                    mode=str(config.pooling),
                    include_last_offset=True,
                    per_sample_weights=weights if module.is_weighted() else None,
                )
            )
    return torch.cat(blocks, dim=1)


def loop_bags(
    module: EmbeddingBagCollection, features: KeyedJaggedTensor, upstream: Tensor
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The output, and the tables' gradients added sample by sample, in fp32."""
    out, jaggeds = np.zeros(tuple(upstream.shape), np.float32), features.to_dict()
    grads: dict[str, np.ndarray] = {}
    columns: dict[str, list[tuple[str, slice]]] = {}
    start = 0
    for config in module.embedding_bag_configs():
        columns[config.name] = []
        for feature in config.feature_names:
            block = slice(start, start + config.embedding_dim)
            columns[config.name].append((feature, block))
            start = block.stop
    for config in module.embedding_bag_configs():
        weight = module.embedding_bags[config.name].weight.detach().float().numpy()
        grads[config.name] = np.zeros_like(weight)
        for sample in range(features.stride()):
            for feature, block in columns[config.name]:
                jagged = jaggeds[feature]
                part = slice(*jagged.offsets()[sample : sample + 2].tolist())
                ids = jagged.values()[part].tolist()
                factors = [np.float32(1)] * len(ids)
                if module.is_weighted():
                    factors = list(jagged.weights_or_none()[part].numpy())
                divisor = np.float32(max(len(ids), 1) if config.pooling == MEAN else 1)
                back = upstream[sample, block].numpy() / divisor
                for row, factor in zip(ids, factors, strict=True):
                    out[sample, block] += factor * weight[row]
                    grads[config.name][row] += factor * back
                out[sample, block] /= divisor
    return out, grads


def check_bags(module: EmbeddingBagCollection, features: KeyedJaggedTensor) -> None:
    found = module(features)
    upstream = torch.randn(found.values().shape, generator=torch.Generator().manual_seed(1))
    dense = torch_bags(module, features)
    parameters = [module.embedding_bags[c.name].weight for c in module.configs()]
    dense_grads = torch.autograd.grad(dense, parameters, upstream)
    out, grads = loop_bags(module, features, upstream)
    module.zero_grad()
    direct = torch.autograd.grad(found.values(), parameters, upstream, retain_graph=True)
    assert all(grad.is_coalesced() for grad in direct)
    found.values().backward(upstream)
    assert np.array_equal(found.values().detach().numpy(), out)
    assert torch.allclose(found.values(), dense, atol=1e-5)
    for config, weight, expected in zip(module.configs(), parameters, dense_grads, strict=True):
        assert weight.grad.is_sparse
        rows = weight.grad._indices()[0].tolist()  # torch drops the flag when it stores a grad
        read = [i for f in config.feature_names for i in features[f].values().tolist()]
        assert rows == sorted(set(read))
        assert np.array_equal(weight.grad.to_dense().numpy(), grads[config.name])
        assert torch.allclose(weight.grad.to_dense(), expected, atol=1e-4)


@LAW
@given(st.integers(0, 2**31), st.integers(0, 5), st.booleans())
def test_bags_and_gradients_equal_torchs_and_the_loops(
    seed: int, stride: int, weighted: bool
) -> None:
    tables = [t for t in mixed() if not (weighted and t.pooling is MEAN)]
    module = EmbeddingBagCollection(tables, is_weighted=weighted)
    check_bags(module, batch(seed, stride, weighted=weighted))


def test_output_follows_tables_and_features() -> None:
    module = EmbeddingBagCollection(mixed())
    found = module(batch())
    assert found.keys() == ["u@a", "i@a", "i@b", "v", "u@d", "w"]
    assert found.length_per_key() == [3, 3, 64, 3, 1, 1030]
    assert found.values().shape == (5, 1104)
    assert module.embedding_bag_configs() == module.configs() == mixed()
    alone = EmbeddingBagCollection([bag("e", 1030, "w")])(batch())
    assert torch.equal(alone["w"], found["w"])


def test_empty_bags_give_zeros() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    module = EmbeddingBagCollection([bag("s", 2, "f"), bag("m", 3, "f", pooling=MEAN)])
    lengths = torch.tensor([0, 1, 0])
    found = module(KeyedJaggedTensor(["f"], torch.tensor([4]), lengths=lengths)).values()
    assert not found[[0, 2]].any()
    assert bool(found[1].all())
    nothing = module(KeyedJaggedTensor(["f"], none, lengths=torch.zeros(3, dtype=torch.int64)))
    assert nothing.values().tolist() == [[0.0] * 5] * 3


@pytest.mark.parametrize("weighted", [False, True])
def test_no_samples_still_have_a_backward(weighted: bool) -> None:
    module = EmbeddingBagCollection([bag("t", 3, "u")], is_weighted=weighted)
    out = module(batch(stride=0, weighted=weighted)).values()
    assert out.shape == (0, 3)
    assert out.requires_grad
    out.sum().backward()
    assert module.embedding_bags["t"].weight.grad._nnz() == 0


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("weighted", [False, True])
def test_low_precision_is_widened_before_any_sum(dtype: torch.dtype, weighted: bool) -> None:
    tables = [t for t in mixed(data_type=dtype) if not (weighted and t.pooling is MEAN)]
    low = EmbeddingBagCollection(tables, is_weighted=weighted)
    wide = copy.deepcopy(low).float()
    features = batch(weighted=weighted)
    found, expected = low(features).values(), wide(features).values()
    assert low.embedding_bags["a"].weight.dtype == dtype
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    for out in (found, expected):
        out.sin().sum().backward()
    for config in tables:
        grad = low.embedding_bags[config.name].weight.grad
        reference = wide.embedding_bags[config.name].weight.grad.to_dense()
        assert grad.dtype == dtype
        assert torch.equal(grad.to_dense(), reference.to(dtype))


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_ids_and_lengths_of_either_width(index_type: torch.dtype) -> None:
    module, features = EmbeddingBagCollection(mixed()), batch()
    narrow = KeyedJaggedTensor(
        FEATURES, features.values().to(index_type), lengths=features.lengths().to(index_type)
    )
    assert torch.equal(module(narrow).values(), module(features).values())


class Foreign:
    """As TorchRec's: its methods, and not our class."""

    def __init__(self, ours: KeyedJaggedTensor) -> None:
        self.keys, self.values, self.lengths = ours.keys, ours.values, ours.lengths
        self.stride, self.weights_or_none = ours.stride, ours.weights_or_none


@pytest.mark.parametrize("weighted", [False, True])
def test_a_foreign_keyed_jagged_tensor_is_taken_by_its_methods(weighted: bool) -> None:
    module = EmbeddingBagCollection([bag("t", 3, "u", "v")], is_weighted=weighted)
    features = batch(weighted=weighted)
    assert torch.equal(module(Foreign(features)).values(), module(features).values())


def test_state_dict_keys_are_torchrecs() -> None:
    bags = EmbeddingBagCollection([bag("a", 2, "f"), bag("b", 3, "f")])
    assert list(bags.state_dict()) == ["embedding_bags.a.weight", "embedding_bags.b.weight"]
    sequences = EmbeddingCollection([sequence("a", 2, "f")])
    assert list(sequences.state_dict()) == ["embeddings.a.weight"]
    assert bags.table_modules() is bags.embedding_bags
    assert "(a): Table(11, 2)" in repr(bags)
    odd = EmbeddingBagCollection([bag("items", 2, "f"), bag("keys", 2, "g")])
    assert list(odd.state_dict()) == ["embedding_bags.items.weight", "embedding_bags.keys.weight"]
    assert odd.embedding_bags["items"].weight.shape == (ROWS, 2)
    assert "items" in odd.embedding_bags
    assert "f" not in odd.embedding_bags


def test_tables_can_be_listed_as_in_torchrec() -> None:
    # Defect: `Tables` has no keys, items, values, len or iter; list() gives KeyError: 0.
    tables = EmbeddingBagCollection([bag("a", 2, "f"), bag("b", 3, "g")]).embedding_bags
    assert list(tables) == ["a", "b"]
    assert len(tables) == 2
    assert [(name, table.weight.shape[1]) for name, table in tables.items()] == [("a", 2), ("b", 3)]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad
@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.Adagrad])
def test_torchs_optimisers_take_the_sparse_gradients(rule: Any) -> None:
    module = EmbeddingBagCollection(mixed())
    dense = copy.deepcopy(module)
    optimizers = [rule(m.parameters(), lr=0.1) for m in (module, dense)]
    start = copy.deepcopy(module.state_dict())
    for step in range(3):
        features = batch(step)
        outs = [module(features).values(), torch_bags(dense, features)]
        assert torch.allclose(*outs, atol=1e-5)  # also: the lookup sees the step before
        for out, optimizer in zip(outs, optimizers, strict=True):
            optimizer.zero_grad()
            out.sin().sum().backward()
            optimizer.step()
    for key, value in module.state_dict().items():
        assert torch.allclose(value, dense.state_dict()[key], atol=1e-5)
        assert not torch.equal(value, start[key])


def test_a_frozen_table_gets_no_gradient() -> None:
    module = EmbeddingBagCollection([bag("a", 3, "u"), bag("b", 3, "v")])
    module.embedding_bags["a"].weight.requires_grad_(False)
    module(batch()).values().sum().backward()
    assert module.embedding_bags["a"].weight.grad is None
    assert module.embedding_bags["b"].weight.grad is not None
    module.embedding_bags["b"].weight.requires_grad_(False)
    assert not module(batch()).values().requires_grad


def test_a_sink_takes_the_fp32_sums_instead_of_grad() -> None:
    module = EmbeddingBagCollection([bag("a", 3, "u", data_type=LOW[0]), bag("b", 3, "i")])
    wide, features = copy.deepcopy(module).float(), batch()
    received: list[tuple[int, Tensor, Tensor]] = []
    module.engine.open_sink = lambda: lambda *args: received.append(args)  # type: ignore[attr-defined]
    module(features).values().sum().backward()
    wide(features).values().sum().backward()
    assert sorted(table for table, _, _ in received) == [0, 1]
    for table, rows, sums in received:
        expected = wide.embedding_bags["ab"[table]].weight.grad.coalesce()
        assert module.embedding_bags["ab"[table]].weight.grad is None
        assert torch.equal(rows, expected.indices()[0])
        assert torch.equal(sums, expected.values())


def make(kind: str, **more: Any) -> Any:
    """Two tables of one dim, so that they share a stack, and one of another."""
    if kind == "bags":
        tables = [bag("a", 4, "u"), bag("b", 4, "i"), bag("c", 2, "v")]
        return EmbeddingBagCollection(tables, **more)
    tables = [sequence("a", 4, "u"), sequence("b", 4, "i"), sequence("c", 2, "v")]
    return EmbeddingCollection(tables, **more)


def outputs(module: Any, features: KeyedJaggedTensor) -> dict[str, Tensor]:
    found = module(features)
    if isinstance(found, dict):
        return {key: jagged.values() for key, jagged in found.items()}
    return found.to_dict()


def expect(module: Any, features: KeyedJaggedTensor) -> None:
    """The module's output is what its parameters say now."""
    for (key, found), name in zip(outputs(module, features).items(), "abc", strict=True):
        rows = module.table_modules()[name].weight[features[key].values()].float()
        if isinstance(module, EmbeddingBagCollection):
            rows = torch.stack([s.sum(0) for s in rows.split(features[key].lengths().tolist())])
        assert torch.allclose(found, rows, atol=1e-6)


@both_kinds
@pytest.mark.parametrize("warm", [False, True])
def test_a_copy_is_independent(kind: str, warm: bool) -> None:
    module, features = make(kind), batch()
    if warm:
        module(features)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.table_modules()["b"].weight.add_(1.0)
    expect(module, features)
    expect(twin, features)
    outputs(twin, features)["i"].sum().backward()
    assert twin.table_modules()["b"].weight.grad is not None
    assert module.table_modules()["b"].weight.grad is None


@both_kinds
@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_to_another_dtype_and_back(kind: str, dtype: torch.dtype) -> None:
    module, features = make(kind), batch()
    parameters = dict(module.named_parameters())
    expect(module, features)
    module.to(dtype)
    expect(module, features)
    assert all(p.dtype == dtype for p in module.parameters())
    module.to("cpu", torch.float32)
    expect(module, features)
    assert all(p is parameters[name] for name, p in module.named_parameters())
    module.table_modules()["b"].to(dtype)  # one of two that shared a stack
    expect(module, features)
    assert module.table_modules()["a"].weight.dtype == torch.float32
    assert module.table_modules()["b"].weight.dtype == dtype


@both_kinds
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_seen_by_the_next_forward(kind: str, assign: bool) -> None:
    module, other, features = make(kind), make(kind, seed=1), batch()
    before = outputs(module, features)
    module.load_state_dict(other.state_dict(), assign=assign)
    expect(module, features)
    assert not torch.equal(outputs(module, features)["u"], before["u"])
    module.table_modules()["b"].weight.data = torch.ones(ROWS, 4)
    expect(module, features)


@both_kinds
def test_meta_takes_no_memory_and_says_so_in_forward(kind: str) -> None:
    module = make(kind, device="meta")
    assert all(p.device.type == "meta" for p in module.parameters())
    with pytest.raises(InputError, match=r"table 'a' has no memory .*'meta'.*: shard the model"):
        module(batch())
    module.to_empty(device="cpu").load_state_dict(make(kind).state_dict())
    expect(module, batch())


@LAW
@given(st.integers(0, 2**31), st.integers(0, 5), st.sampled_from([torch.float32, *LOW]))
def test_sequences_equal_torchs_embeddings(seed: int, stride: int, dtype: torch.dtype) -> None:
    more = {"data_type": dtype}
    tables = [sequence("a", 3, "u", "i", **more), sequence("b", 64, "i", **more)]
    module, features = (
        EmbeddingCollection([*tables, sequence("c", 3, "w", **more)]),
        batch(seed, stride),
    )
    found = module(features)
    assert module.embedding_configs() == module.configs()
    assert list(found) == ["u", "i@a", "i@b", "w"]
    total = torch.zeros(())
    dense = {n: module.embeddings[n].weight.detach().float().requires_grad_() for n in "abc"}
    for (name, jagged), (feature, table) in zip(
        found.items(), [("u", "a"), ("i", "a"), ("i", "b"), ("w", "c")], strict=True
    ):
        assert isinstance(jagged, JaggedTensor), name
        expected = nn.functional.embedding(features[feature].values(), dense[table])
        assert jagged.values().dtype == torch.float32
        assert torch.equal(jagged.values(), expected)
        assert torch.equal(jagged.lengths(), features[feature].lengths())
        total = total + jagged.values().sin().sum() + expected.sin().sum()
    total.backward()
    for name, weight in dense.items():
        grad = module.embeddings[name].weight.grad
        assert grad._indices()[0].tolist() == weight.grad.any(1).nonzero()[:, 0].tolist()
        assert torch.allclose(grad.to_dense().float(), weight.grad, atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (one([[1, 2], [3, 11]]), r"feature 'f', sample 1: id 11 is outside table 't' \(11 rows\)"),
        (one([1, 2, -1]), r"feature 'f', sample 2: id -1 is outside table 't' \(11 rows\)"),
        (one([2**40]), "id 1099511627776 is outside"),
        (one([1], feature="g"), "feature 'f' is missing from the batch: known are g"),
        (one([1], feature="ff"), "feature 'f' is missing from the batch: did you mean 'ff'"),
        (one([1.0]), "ids must be int32 or int64, got torch.float32"),
        (
            KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]).short()),
            "lengths must be int32 or int64, got torch.int16",
        ),
        (
            KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1])),
            "lengths add up to 1, but 2 ids were given",
        ),
        (
            KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([3, -1])),
            "a length is negative: -1",
        ),
        ({"f": torch.tensor([1])}, "must be a KeyedJaggedTensor, got dict; .*from_dense"),
        (torch.tensor([1]), "must be a KeyedJaggedTensor, got Tensor"),
    ],
)
def test_bad_features_are_named(features: Any, message: str) -> None:
    module = EmbeddingBagCollection([bag("t", 3, "f")])
    with pytest.raises(InputError, match=message):
        module(features)
    if "sample" not in message:
        with pytest.raises(InputError, match=message):
            EmbeddingCollection([sequence("t", 3, "f")])(features)


def test_an_id_is_checked_against_its_own_table() -> None:
    module = EmbeddingBagCollection([bag("t", 3, "f"), bag("s", 3, "g", num_embeddings=2)])
    features = {"f": torch.tensor([10, 10]), "g": torch.tensor([1, 2])}
    with pytest.raises(InputError, match=r"feature 'g', sample 1: id 2 is outside table 's' \(2 "):
        module(KeyedJaggedTensor.from_dense(features))


def test_a_bad_id_in_a_sequence_names_its_sample() -> None:
    # Defect: "position 7", an index into all readers of the stack; feature g has two ids.
    module = EmbeddingCollection([sequence("t", 3, "f"), sequence("s", 3, "g")])
    features = {"f": torch.ones((2, 3), dtype=torch.int64), "g": torch.tensor([1, 99])}
    with pytest.raises(InputError, match=r"feature 'g', sample 1: id 99 is outside table 's'"):
        module(KeyedJaggedTensor.from_dense(features))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "needs per-sample weights"),
        (torch.ones(2, dtype=torch.float64), "fp32 without gradient, got torch.float64"),
        (torch.ones(2, requires_grad=True), "requires_grad=True"),
    ],
)
def test_bad_weights_are_named(weights: Tensor | None, message: str) -> None:
    module = EmbeddingBagCollection([bag("t", 3, "f")], is_weighted=True)
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), weights, lengths=torch.ones(2).int())
    with pytest.raises(InputError, match=message):
        module(features)


def test_weights_are_ignored_by_an_unweighted_collection() -> None:
    module, features = EmbeddingBagCollection([bag("t", 3, "u")]), batch(weighted=True)
    plain = KeyedJaggedTensor(FEATURES, features.values(), lengths=features.lengths())
    assert torch.equal(module(features).values(), module(plain).values())


def test_bad_collections_are_named() -> None:
    with pytest.raises(InputError, match=r"different names, got \[\]"):
        EmbeddingBagCollection([])
    with pytest.raises(InputError, match=r"different names, got \['t', 't'\]"):
        EmbeddingCollection([sequence("t", 3, "f"), sequence("t", 3, "g")])
    with pytest.raises(InputError, match="at least one feature"):
        EmbeddingBagCollection([bag("t", 3)])
    with pytest.raises(InputError, match="weights go with sum pooling"):
        EmbeddingBagCollection([bag("t", 3, "f", pooling=MEAN)], is_weighted=True)


def test_pooling_given_as_a_word() -> None:
    # Defect: "mean" passes the check of the configuration (a StrEnum equals its word), but the
    # collection looks for `is PoolingType.MEAN` and silently sums.
    try:
        module = EmbeddingBagCollection([bag("t", 3, "f", pooling="mean")])
    except InputError:
        return
    found = module(one([[1, 1]])).values()
    assert torch.allclose(found, module.embedding_bags["t"].weight[1:2])


def loop_value(config: EmbeddingBagConfig, row: int, column: int, seed: int) -> np.float32:
    """SplitMix64 in Python integers."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    digest = hashlib.sha256(f"{seed}/{config.name}".encode()).digest()[:8]
    inner = mix(int.from_bytes(digest, "little") + row * golden & mask)
    uniform = np.float32((mix(inner + (column + 1) * golden & mask) >> 40) * 2.0**-24)
    low, high = config.init_range()
    return uniform * np.float32(high - low) + np.float32(low)


@LAW
@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(0, 2**63),
    st.text("abc_", min_size=1, max_size=5),
)
def test_initial_values_follow_the_formula(rows: list[int], dim: int, seed: int, name: str) -> None:
    config = bag(name, dim, "f", num_embeddings=2**41)
    found = initial_values(config, torch.tensor(rows), seed=seed)
    assert found.dtype == torch.float32
    expected = [[loop_value(config, row, c, seed) for c in range(dim)] for row in rows]
    assert np.array_equal(found.numpy(), np.array(expected, np.float32))


def test_initial_values_depend_on_seed_table_row_and_column_alone() -> None:
    config, rows = bag("t", 64, "f", num_embeddings=5000), torch.arange(5000)
    every = initial_values(config, rows, seed=0)
    some = torch.tensor([4999, 3, 77, 3])
    assert torch.equal(initial_values(config, some, seed=0), every[some])
    narrow = bag("t", 5, "g", num_embeddings=5000, pooling=MEAN)
    assert torch.equal(initial_values(narrow, rows, seed=0), every[:, :5])
    for other, seed in ((config, 1), (bag("s", 64, "f", num_embeddings=5000), 0)):
        assert not (initial_values(other, rows, seed=seed) == every).all(1).any()
    tables = [bag("x", 64, "g"), config]  # beside another table, in chunks, in low precision
    assert torch.equal(EmbeddingBagCollection(tables).embedding_bags["t"].weight, every)
    half = sequence("t", 64, "f", num_embeddings=5000, data_type=LOW[0])
    assert torch.equal(EmbeddingCollection([half]).embeddings["t"].weight, every.half())
    seeded = EmbeddingBagCollection([config], seed=7).embedding_bags["t"].weight
    assert torch.equal(seeded, initial_values(config, rows, seed=7))


def test_initial_values_are_uniform_in_range_without_equal_rows() -> None:
    config = bag("t", 4, "f", num_embeddings=10**5, weight_init_min=-1.0, weight_init_max=3.0)
    found = initial_values(config, torch.arange(10**5), seed=0)
    assert -1.0 <= float(found.min()) < -0.999
    assert 2.999 < float(found.max()) <= 3.0
    counts = torch.histc(found, bins=64, min=-1.0, max=3.0)
    expected = found.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 120  # chi-square, 63 degrees
    assert len(np.unique(found.numpy().view([("", np.float32)] * 4))) == 10**5
    assert float((torch.corrcoef(found.t()) - torch.eye(4)).abs().max()) < 0.015
    neighbours = torch.stack([found[:-1].reshape(-1), found[1:].reshape(-1)])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.01
    default = initial_values(bag("t", 4, "f", num_embeddings=100), torch.arange(100), seed=0)
    assert 0.09 < float(default.abs().max()) <= 0.1
