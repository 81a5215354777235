"""Each sentence of `rowmesh.features`, against plain lists of lists."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.errors import InputError
from rowmesh.features import Batch, JaggedTensor, KeyedJaggedTensor, KeyedTensor

LAW = settings(derandomize=True, deadline=None, max_examples=50)
BAG = st.lists(st.integers(0, 2**40), max_size=4)
Samples = list[list[int]]


@st.composite
def keyed_lists(draw: st.DrawFn) -> dict[str, Samples]:
    """Feature -> sample -> ids, possibly without samples or without ids."""
    num_keys, stride = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    bags = st.lists(BAG, min_size=stride, max_size=stride)
    return {f"f{k}": draw(bags) for k in range(num_keys)}


def jagged(samples: Samples, *, weighted: bool = False) -> JaggedTensor:
    flat = [i for bag in samples for i in bag]
    lengths = torch.tensor([len(bag) for bag in samples], dtype=torch.int32)
    weights = torch.tensor([i / 8 for i in flat], dtype=torch.float32) if weighted else None
    return JaggedTensor(torch.tensor(flat, dtype=torch.int64), weights, lengths)


def lists(found: JaggedTensor) -> Samples:
    return [sample.tolist() for sample in found.to_dense()]


def drawing() -> KeyedJaggedTensor:
    """The batch drawn in the docstring of `KeyedJaggedTensor`."""
    return KeyedJaggedTensor.from_lengths_sync(
        ["user", "items"], torch.tensor([7, 3, 1, 2, 4]), torch.tensor([1, 1, 2, 1])
    )


@LAW
@given(st.lists(BAG, max_size=6))
def test_sample_b_owns_its_slice_of_the_values(samples: Samples) -> None:
    found = jagged(samples)
    assert found.values().tolist() == [i for bag in samples for i in bag]
    assert found.lengths().tolist() == [len(bag) for bag in samples]
    offsets = found.offsets().tolist()
    assert len(offsets) == len(samples) + 1
    assert [found.values()[a:b].tolist() for a, b in itertools.pairwise(offsets)] == (samples)
    assert lists(found) == samples
    again = JaggedTensor.from_dense([torch.tensor(s, dtype=torch.int64) for s in samples])
    assert lists(again) == samples
    assert again.weights_or_none() is None
    assert jagged(samples, weighted=True).weights_or_none().tolist() == pytest.approx(
        [i / 8 for bag in samples for i in bag]
    )


@LAW
@given(st.lists(BAG, max_size=5), st.one_of(st.none(), st.integers(0, 5)), st.integers(-1, 1))
def test_padded_samples_are_cut_or_padded_at_the_end(
    samples: Samples, length: int | None, padding: int
) -> None:
    found = jagged(samples).to_padded_dense(length, padding_value=padding)
    size = max(map(len, samples), default=0) if length is None else length
    assert found.shape == (len(samples), size)
    assert found.tolist() == [(bag + [padding] * size)[:size] for bag in samples]


def test_padded_vectors_keep_their_gradient() -> None:
    values = torch.arange(6.0).view(3, 2).requires_grad_()
    padded = JaggedTensor(values, lengths=torch.tensor([2, 0, 1])).to_padded_dense(1, -1.0)
    assert padded.tolist() == [[[0, 1]], [[-1, -1]], [[4, 5]]]
    padded.sum().backward()
    assert values.grad.tolist() == [[1, 1], [0, 0], [1, 1]]


def test_the_drawing() -> None:
    found = drawing()
    assert found.keys() == ["user", "items"]
    assert found.values().tolist() == [7, 3, 1, 2, 4]
    assert found.lengths().tolist() == [1, 1, 2, 1]
    assert found.offsets().tolist() == [0, 1, 2, 4, 5]
    assert found.stride() == 2
    assert found.device() == torch.device("cpu")
    assert found.weights_or_none() is None
    assert lists(found["user"]) == [[7], [3]]
    assert lists(found["items"]) == [[1, 2], [4]]


@LAW
@given(keyed_lists(), st.booleans())
def test_from_dict_and_back(columns: dict[str, Samples], weighted: bool) -> None:
    found = KeyedJaggedTensor.from_dict(
        {key: jagged(samples, weighted=weighted) for key, samples in columns.items()}
    )
    flat = [i for samples in columns.values() for bag in samples for i in bag]
    assert found.keys() == list(columns)
    assert found.stride() == len(columns["f0"])
    assert found.values().tolist() == flat
    assert found.lengths().tolist() == [len(b) for samples in columns.values() for b in samples]
    offsets = found.offsets()
    assert offsets.dtype == found.lengths().dtype == torch.int32
    assert offsets.tolist() == [sum(found.lengths()[:n]) for n in range(len(found.lengths()) + 1)]
    assert {key: lists(part) for key, part in found.to_dict().items()} == columns
    if weighted:
        assert found.weights_or_none().tolist() == pytest.approx([i / 8 for i in flat])
        for key, part in found.to_dict().items():
            expected = jagged(columns[key], weighted=True).weights_or_none()
            assert torch.equal(part.weights_or_none(), expected)
    else:
        assert found.weights_or_none() is None
        assert found["f0"].weights_or_none() is None


@LAW
@given(keyed_lists())
def test_from_lengths_sync_equals_from_dict(columns: dict[str, Samples]) -> None:
    expected = KeyedJaggedTensor.from_dict(
        {k: jagged(s, weighted=True) for k, s in columns.items()}
    )
    found = KeyedJaggedTensor.from_lengths_sync(
        list(columns), expected.values(), expected.lengths(), expected.weights_or_none()
    )
    assert {key: lists(part) for key, part in found.to_dict().items()} == columns
    assert torch.equal(found.weights_or_none(), expected.weights_or_none())


def test_from_dense_takes_columns_of_one_or_several_ids() -> None:
    one, three = torch.tensor([5, 6]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = KeyedJaggedTensor.from_dense({"one": one, "three": three})
    assert lists(found["one"]) == [[5], [6]]
    assert lists(found["three"]) == [[1, 2, 3], [4, 5, 6]]
    assert lists(KeyedJaggedTensor.from_dense({"t": three.t()})["t"]) == [[1, 4], [2, 5], [3, 6]]
    empty = KeyedJaggedTensor.from_dense({"f": torch.zeros((3, 0), dtype=torch.int64)})
    assert (empty.stride(), lists(empty["f"])) == (3, [[], [], []])
    with pytest.raises(InputError, match=r"column 'f' must be \[B\] or \[B, P\], got \[1, 1, 1\]"):
        KeyedJaggedTensor.from_dense({"f": torch.zeros((1, 1, 1), dtype=torch.int64)})


def keyed(keys: Sequence[str], values: int, lengths: Sequence[int], **more: Any) -> Any:
    return KeyedJaggedTensor(keys, torch.zeros(values), lengths=torch.tensor(lengths), **more)


def test_a_keyed_jagged_tensor_names_what_is_wrong() -> None:
    assert keyed([], 0, []).stride() == 0
    assert keyed([], 0, [], stride=3).stride() == 3
    with pytest.raises(InputError, match="1 entries, but 0 features of 0 samples need 0"):
        keyed([], 0, [1])
    with pytest.raises(InputError, match="lengths has 5 entries, but 2 features of 2 samples need"):
        keyed(["a", "b"], 5, [1] * 5)
    with pytest.raises(InputError, match="2 entries, but 1 features of 3 samples need 3"):
        keyed(["a"], 2, [1, 1], stride=3)
    with pytest.raises(InputError, match="3 weights were given for 2 values"):
        keyed(["a"], 2, [1, 1], weights=torch.ones(3))
    with pytest.raises(InputError, match="unknown feature 'itmes': did you mean 'items'"):
        drawing()["itmes"]
    with pytest.raises(InputError, match="unknown feature 'zzz': known are items, user"):
        drawing()["zzz"]


def test_from_dict_names_what_is_wrong() -> None:
    with pytest.raises(InputError, match="at least one feature"):
        KeyedJaggedTensor.from_dict({})
    with pytest.raises(InputError, match=r"different numbers of samples: \{'a': 1, 'b': 2\}"):
        KeyedJaggedTensor.from_dict({"a": jagged([[1]]), "b": jagged([[1], [2]])})
    with pytest.raises(InputError, match="either every feature has weights, or none"):
        KeyedJaggedTensor.from_dict({"a": jagged([[1]], weighted=True), "b": jagged([[1]])})


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 1], r"add up to 2 \(smallest 1\), but 3 values"),
        ([2, 2], "add up to 4"),
        ([4, -1], "smallest -1"),
    ],
)
def test_from_lengths_sync_checks_that_lengths_add_up(lengths: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KeyedJaggedTensor.from_lengths_sync(["f"], torch.arange(3), torch.tensor(lengths))


def test_from_lengths_sync_without_lengths() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert KeyedJaggedTensor.from_lengths_sync(["f"], none, none).stride() == 0
    # Defect: the message takes the minimum of no lengths, a RuntimeError of torch.
    with pytest.raises(InputError, match="add up to 0"):
        KeyedJaggedTensor.from_lengths_sync(["f"], torch.arange(3), none)


@pytest.mark.parametrize("weighted", [False, True])
def test_to_moves_every_part(weighted: bool) -> None:
    found = KeyedJaggedTensor.from_dict({"f": jagged([[1, 2], []], weighted=weighted)})
    moved = found.to("meta")
    assert (moved.keys(), moved.stride(), moved.device().type) == (["f"], 2, "meta")
    assert moved.lengths().device.type == moved.values().device.type == "meta"
    if weighted:
        assert moved.weights_or_none().device.type == "meta"
    else:
        assert moved.weights_or_none() is None
    assert lists(found.to("cpu", non_blocking=True)["f"]) == [[1, 2], []]
    assert keyed([], 0, [], stride=3).to("cpu").stride() == 3


def test_representations_are_readable_and_short() -> None:
    assert repr(drawing()) == (
        "KeyedJaggedTensor(2 features, 2 samples, 5 ids)\n  user: [7], [3]\n  items: [1, 2], [4]"
    )
    assert repr(jagged([[1, 2], []])) == "JaggedTensor(2 samples, 2 values)"
    assert repr(KeyedTensor(["a", "b"], [1, 2], torch.zeros(1, 3))) == (
        "KeyedTensor({'a': 1, 'b': 2})"
    )
    column = torch.arange(100_000).view(1000, 100)
    large = KeyedJaggedTensor.from_dense({f"feature_{k}": column for k in range(100)})
    lines = repr(large).splitlines()
    assert lines[0] == "KeyedJaggedTensor(100 features, 1000 samples, 10000000 ids)"
    assert lines[1].startswith("  feature_0: [0, 1, 2, 3, 4, 5, ...], [100, 101, ")
    assert lines[1].endswith(", ...], ...")
    assert lines[-1] == "  ... 94 more features"
    assert len(lines) == 8
    assert max(map(len, lines)) < 160
    assert "f: [], [1]" in repr(KeyedJaggedTensor.from_dict({"f": jagged([[], [1]])}))
    repr(keyed(["a"], 0, []))


@LAW
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_keyed_tensor_holds_features_side_by_side(dims: list[int], num_samples: int) -> None:
    blocks = {f"f{k}": torch.rand(num_samples, dim) for k, dim in enumerate(dims)}
    found = KeyedTensor(list(blocks), dims, torch.cat(list(blocks.values()), dim=1))
    assert found.keys() == list(blocks)
    assert found.length_per_key() == dims
    assert found.values().shape == (num_samples, sum(dims))
    for parts in ({key: found[key] for key in blocks}, found.to_dict()):
        assert list(parts) == list(blocks)
        assert all(torch.equal(parts[key], block) for key, block in blocks.items())


def test_keyed_tensor_gives_views_and_names_unknown_features() -> None:
    found = KeyedTensor(["user", "item"], [1, 2], torch.zeros(2, 3))
    found.to_dict()["item"].fill_(1.0)
    found["user"].fill_(2.0)
    assert found.values().tolist() == [[2, 1, 1], [2, 1, 1]]
    with pytest.raises(InputError, match="unknown feature 'usr': did you mean 'user'"):
        found["usr"]


def batch(*, planted: bool = True) -> Batch:
    return Batch(
        dense_features=torch.rand(2, 3),
        sparse_features=drawing(),
        labels=torch.tensor([0.0, 1.0]),
        true_probabilities=torch.tensor([0.1, 0.9]) if planted else None,
    )


@pytest.mark.parametrize("planted", [False, True])
def test_batch_to_moves_every_part(planted: bool) -> None:
    moved = batch(planted=planted).to("meta")
    tensors = [moved.dense_features, moved.sparse_features.values(), moved.labels]
    tensors += [moved.true_probabilities] if planted else []
    assert {t.device.type for t in tensors} == {"meta"}
    assert (moved.true_probabilities is None) == (not planted)
    assert moved.dense_features.shape == (2, 3)
