"""What our jagged and keyed tensors give, by hand; `test_torchrec_types` compares at random."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rowmesh.errors import InputError
from rowmesh.features import Batch, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rowmesh.nn import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig

VALUES = torch.tensor([7, 3, 1, 2, 4])
LENGTHS = torch.tensor([1, 1, 2, 1])
WEIGHTS = torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5])


def samples() -> JaggedTensor:
    """[1, 2], [], [3], weights a tenth of it."""
    values = torch.tensor([1.0, 2.0, 3.0])
    return JaggedTensor(values, values / 10, torch.tensor([2, 0, 1]))


def drawing(**more: Any) -> KeyedJaggedTensor:
    """The drawing of `KeyedJaggedTensor`: user [7] [3], items [1, 2] [4]."""
    return KeyedJaggedTensor(["user", "items"], VALUES, WEIGHTS, LENGTHS, **more)


def told(features: KeyedJaggedTensor) -> dict[str, list[list[float]]]:
    return {key: [b.tolist() for b in part.to_dense()] for key, part in features.to_dict().items()}


def test_the_second_argument_of_a_jagged_tensor_is_its_weights() -> None:
    found = JaggedTensor(torch.tensor([1, 2, 3]), torch.ones(3), torch.tensor([2, 1]))
    assert found.weights().tolist() == [1, 1, 1]
    assert found.lengths().tolist() == [2, 1]
    by_offsets = JaggedTensor(torch.tensor([1, 2, 3]), None, None, torch.tensor([0, 2, 3]))
    assert by_offsets.lengths().tolist() == [2, 1]
    assert (by_offsets.lengths_or_none(), found.offsets_or_none()) == (None, None)
    assert by_offsets.offsets_or_none().tolist() == found.offsets().tolist() == [0, 2, 3]
    assert by_offsets.weights_or_none() is None
    # Before, lengths came second, and weights were taken for lengths without complaint.
    with pytest.raises(InputError, match=r"neither lengths nor offsets .* weights before them"):
        JaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match=r"lengths must be integers, got torch.float32 \(the pos"):
        JaggedTensor(torch.tensor([1, 2]), torch.tensor([1, 1]), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": torch.tensor([[1, 1]])}, r"one list of all bags, got shape \[1, 2\]"),
        ({"offsets": torch.tensor([0.0, 2.0])}, "offsets must be integers, got torch.float32"),
        (
            {"lengths": torch.tensor([1, 1]), "offsets": torch.tensor([0, 2])},
            "2 lengths and offsets of 1 bags were given",
        ),
        (
            {"lengths": torch.tensor([2]), "weights": torch.ones(3)},
            "3 weights were given for 2 values",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_named(
    arguments: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        JaggedTensor(torch.tensor([1, 2]), **arguments)
    with pytest.raises(InputError, match=message):
        KeyedJaggedTensor(["f"], torch.tensor([1, 2]), **arguments)


def test_jagged_tensors_as_dense_ones() -> None:
    found = samples()
    assert [s.tolist() for s in found.to_dense()] == [[1, 2], [], [3]]
    weights = found.to_dense_weights()
    assert [s.tolist() for s in weights] == [pytest.approx([0.1, 0.2]), [], pytest.approx([0.3])]
    assert found.to_padded_dense().tolist() == [[1, 2], [0, 0], [3, 0]]
    assert found.to_padded_dense(1, 9.0).tolist() == [[1], [9], [3]]
    padded = found.to_padded_dense(desired_length=3, padding_value=-1)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, -1, -1]]
    padded = found.to_padded_dense_weights(desired_length=1, padding_value=-1)
    assert torch.allclose(padded, torch.tensor([[0.1], [-1], [0.3]]))
    plain = JaggedTensor(VALUES, lengths=LENGTHS)
    assert plain.to_dense_weights() is plain.to_padded_dense_weights() is None
    assert plain.device() == torch.device("cpu")
    assert found.to("meta", non_blocking=True).weights().device.type == "meta"
    assert [p.tolist() for p in found.to("cpu").to_dense()] == [[1, 2], [], [3]]
    with pytest.raises(InputError, match="these features have no weights: weights_or_none"):
        plain.weights()


def test_jagged_tensors_of_dense_ones() -> None:
    entries = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    found = JaggedTensor.from_dense(values=entries, weights=[2 * e for e in entries])
    assert (found.values().tolist(), found.weights().tolist()) == ([1, 7, 8], [2, 14, 16])
    assert (found.lengths().tolist(), found.lengths().dtype) == ([1, 0, 2], torch.int32)
    assert JaggedTensor.from_dense([], []).weights().numel() == 0
    with pytest.raises(InputError, match="as many weights as it has values"):
        JaggedTensor.from_dense(entries, [torch.ones(3), torch.ones(0), torch.ones(0)])
    padded = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = JaggedTensor.from_dense_lengths(padded, torch.tensor([1, 2]), padded * 10)
    assert (found.values().tolist(), found.weights().tolist()) == ([1, 4, 5], [10, 40, 50])
    assert JaggedTensor.from_dense_lengths(padded, torch.tensor([0, 0])).weights_or_none() is None


def test_empty_tensors_have_no_samples() -> None:
    for kind in (JaggedTensor, KeyedJaggedTensor):
        found = kind.empty(True, "cpu", torch.int64, torch.float16, torch.int64)
        assert found.values().dtype == found.lengths().dtype == torch.int64
        assert found.weights().dtype == torch.float16
        assert found.lengths().numel() == found.values().numel() == 0
        assert kind.empty().weights_or_none() is None
    assert KeyedJaggedTensor.empty().keys() == []
    assert KeyedJaggedTensor.empty().stride() == 0
    assert JaggedTensor.empty().to_dense() == []


def test_features_by_lengths_by_offsets_or_both() -> None:
    offsets = torch.tensor([0, 1, 2, 4, 5])
    both = KeyedJaggedTensor(["user", "items"], VALUES, WEIGHTS, LENGTHS, offsets, 2)
    by_offsets = KeyedJaggedTensor(["user", "items"], VALUES, WEIGHTS, offsets=offsets)
    for found in (drawing(), drawing(stride=2), drawing(stride_per_key=[2, 2]), both, by_offsets):
        assert told(found) == {"user": [[7], [3]], "items": [[1, 2], [4]]}
        assert (found.stride(), found.stride_per_key()) == (2, [2, 2])
        assert found.offsets().tolist() == [0, 1, 2, 4, 5]
        assert found.lengths().tolist() == [1, 1, 2, 1]
        assert found.length_per_key() == [2, 3]
        assert found.offset_per_key() == [0, 2, 5]
        assert found.lengths_offset_per_key() == [0, 2, 4]
        assert found.index_per_key() == {"user": 0, "items": 1}
        assert found["items"].weights().tolist() == [2.5, 3.5, 4.5]
        assert found.weights().tolist() == WEIGHTS.tolist()
        assert found.variable_stride_per_key() is False
        assert found.inverse_indices_or_none() is None
        assert found.sync() is found
    assert (by_offsets.lengths_or_none(), drawing().offsets_or_none()) == (None, None)
    with pytest.raises(InputError, match="these features have no weights"):
        KeyedJaggedTensor(["f"], VALUES, lengths=torch.tensor([5])).weights()
    with pytest.raises(InputError, match="offsets has 3 entries, but 2 features of 2 samples"):
        KeyedJaggedTensor(["a", "b"], VALUES, offsets=torch.tensor([0, 1, 2, 5]), stride=2)


def test_lengths_changed_in_place_are_counted_again() -> None:
    lengths = LENGTHS.clone()
    found = KeyedJaggedTensor(["user", "items"], VALUES, lengths=lengths)
    assert found.length_per_key() == [2, 3]
    lengths.copy_(torch.tensor([0, 1, 3, 1]))
    assert found.length_per_key() == [1, 4]
    assert told(found) == {"user": [[], [7]], "items": [[3, 1, 2], [4]]}


def test_counts_that_are_given_must_add_up() -> None:
    assert drawing(length_per_key=[2, 3]).offset_per_key() == [0, 2, 5]
    for counts in ([2, 2], [5]):
        with pytest.raises(InputError, match=r"ids by their lengths, but 5 ids of 2 features"):
            drawing(length_per_key=counts)
    short = KeyedJaggedTensor(["f"], VALUES, lengths=torch.tensor([4]))
    with pytest.raises(InputError, match="1 features have 4 ids by their lengths, but 5 ids"):
        short.length_per_key()


@pytest.mark.parametrize(
    "arguments",
    [
        {"stride_per_key_per_rank": [[2], [1]]},
        {"stride_per_key": [2, 1]},
        {"stride_per_key": [3, 3], "stride": 2},
        {"inverse_indices": (["user", "items"], torch.zeros(2, 2))},
    ],
)
def test_samples_that_differ_by_feature_are_refused_by_name(arguments: dict[str, Any]) -> None:
    name = next(iter(arguments))
    sentence = f"{name} is for a number of samples that differs by feature, which rowmesh does not"
    with pytest.raises(InputError, match=sentence):
        drawing(**arguments)
    if name != "stride_per_key":
        for make, places in (
            (KeyedJaggedTensor.from_lengths_sync, LENGTHS),
            (KeyedJaggedTensor.from_offsets_sync, torch.tensor([0, 1, 2, 4, 5])),
        ):
            with pytest.raises(InputError, match=sentence):
                make(["user", "items"], VALUES, places, **arguments)


def test_from_offsets_sync_checks_its_offsets() -> None:
    offsets = torch.tensor([0, 1, 2, 4, 5])
    found = KeyedJaggedTensor.from_offsets_sync(["user", "items"], VALUES, offsets, WEIGHTS, 2)
    assert told(found) == {"user": [[7], [3]], "items": [[1, 2], [4]]}
    assert found.weights().tolist() == WEIGHTS.tolist()
    for bad, message in (
        ([1, 2, 5], "offsets begin at 1"),
        ([0, 2, 4], "add up to 4"),
        ([0, 6, 5], "smallest -1"),
    ):
        with pytest.raises(InputError, match=message):
            KeyedJaggedTensor.from_offsets_sync(["f"], VALUES, torch.tensor(bad))
    given = KeyedJaggedTensor.from_lengths_sync(["user", "items"], VALUES, LENGTHS, WEIGHTS, 2)
    assert told(given) == told(found)


def test_split_gives_parts_of_so_many_features() -> None:
    first, nothing, second = drawing().split([1, 0, 1])
    assert told(first) == {"user": [[7], [3]]}
    assert told(second) == {"items": [[1, 2], [4]]}
    assert second.weights().tolist() == [2.5, 3.5, 4.5]
    assert (nothing.keys(), nothing.stride(), nothing.values().numel()) == ([], 2, 0)
    assert nothing.values().dtype == torch.int64
    whole = drawing()
    assert whole.split([2])[0] is whole
    assert [part.keys() for part in whole.split([1])] == [["user"]]
    for segments in ([3], [1, 2], [-1, 2]):
        with pytest.raises(InputError, match=r"segments are .*, but there are 2 features"):
            whole.split(segments)


def test_permute_reorders_leaves_out_and_repeats() -> None:
    found = drawing().permute([1, 0])
    assert told(found) == {"items": [[1, 2], [4]], "user": [[7], [3]]}
    assert found.weights().tolist() == [2.5, 3.5, 4.5, 0.5, 1.5]
    assert told(drawing().permute([1])) == {"items": [[1, 2], [4]]}
    twice = drawing().permute([0, 1, 0], torch.tensor([0, 1, 0]))
    assert (twice.keys(), twice.values().tolist()) == (
        ["user", "items", "user"],
        [7, 3, 1, 2, 4, 7, 3],
    )
    none = drawing().permute([])
    assert (none.keys(), none.stride(), none.values().numel()) == ([], 2, 0)
    for index in (2, -1):
        with pytest.raises(InputError, match=f"no feature at {index}: there are 2"):
            drawing().permute([index])


def test_concat_joins_features() -> None:
    other = KeyedJaggedTensor(["seen"], torch.tensor([9]), torch.ones(1), torch.tensor([0, 1]))
    found = KeyedJaggedTensor.concat([drawing(), other])
    assert told(found) == {"user": [[7], [3]], "items": [[1, 2], [4]], "seen": [[], [9]]}
    assert found.weights().tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 1.0]
    plain = KeyedJaggedTensor(["seen"], torch.tensor([9]), lengths=torch.tensor([0, 1]))
    three = KeyedJaggedTensor(["x"], torch.tensor([9]), lengths=torch.tensor([0, 1, 0]))
    for parts, message in (
        ([], "concat needs at least one"),
        ([drawing(), plain], "either every feature has weights, or none has"),
        ([plain, three], r"different numbers of samples: \[2, 3\]"),
    ):
        with pytest.raises(InputError, match=message):
            KeyedJaggedTensor.concat(parts)


def test_features_by_name_and_back() -> None:
    parts = drawing().to_dict()
    assert parts["items"].offsets_or_none().tolist() == [0, 2, 3]
    assert drawing().to_dict(compute_offsets=False)["items"].offsets_or_none() is None
    for make in (KeyedJaggedTensor.from_jt_dict, KeyedJaggedTensor.from_dict):
        assert told(make(parts)) == told(drawing())
    assert KeyedJaggedTensor.empty().to_dict() == {}


def test_of_features_of_one_name_the_last_is_meant() -> None:
    lengths = torch.tensor([1, 1, 0, 1, 2, 0])
    found = KeyedJaggedTensor(["a", "b", "a"], torch.tensor([1, 2, 3, 4, 5]), lengths=lengths)
    assert [b.tolist() for b in found["a"].to_dense()] == [[4, 5], []]
    assert told(found) == {"a": [[4, 5], []], "b": [[], [3]]}
    assert found.index_per_key() == {"a": 2, "b": 1}
    assert found.length_per_key() == [2, 1, 2]
    assert repr(found).splitlines()[1:] == ["  a: [1], [2]", "  b: [], [3]", "  a: [4, 5], []"]
    vectors = KeyedTensor(["a", "b", "a"], [1, 1, 2], torch.tensor([[1, 2, 3, 4]]))
    assert vectors["a"].tolist() == vectors.to_dict()["a"].tolist() == [[3, 4]]


def test_a_collection_refuses_a_feature_that_is_there_twice_only_if_it_reads_it() -> None:
    fields = {"num_embeddings": 8, "embedding_dim": 2}
    bags = EmbeddingBagCollection([EmbeddingBagConfig(name="t", feature_names=["b"], **fields)])
    sequences = EmbeddingCollection([EmbeddingConfig(name="t", feature_names=["a"], **fields)])
    found = KeyedJaggedTensor(["a", "b", "a"], torch.tensor([1, 2, 3]), lengths=torch.ones(3).int())
    assert torch.equal(bags(found)["b"], bags.embedding_bags["t"].weight[2:3])
    with pytest.raises(InputError, match=r"feature 'a' is in the batch 2 times, at \[0, 2\]: keep"):
        sequences(found)
    kept = sequences(found.permute([1, 2]))["a"].values()
    assert torch.equal(kept, sequences.embeddings["t"].weight[3:4])


def test_features_move_with_all_their_parts() -> None:
    offsets = torch.tensor([0, 1, 2, 4, 5])
    for features in (drawing(), drawing(offsets=offsets), drawing().sync()):
        found = features.to("cpu", True, torch.float64)
        assert found.weights().dtype == torch.float64
        assert found.values().dtype == torch.int64
        assert told(found) == told(features)
        moved = features.to("meta")
        assert {t.device.type for t in (moved.values(), moved.weights(), moved.offsets())} == {
            "meta"
        }
    assert features.to("meta").length_per_key() == [2, 3]  # known before


@pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="torch pins memory for an accelerator only"
)
def test_features_and_batches_pin_their_memory() -> None:
    found = Batch(dense_features=torch.ones(2, 1), sparse_features=drawing(), labels=torch.ones(2))
    assert found.pin_memory().sparse_features.values().is_pinned()
    assert told(found.pin_memory().sparse_features) == told(drawing())
    found.sparse_features.record_stream(torch.Stream())


def columns() -> KeyedTensor:
    return KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1, 2, 3], [4, 5, 6]]))


def test_keyed_tensors_tell_their_columns() -> None:
    found = columns()
    assert (found.key_dim(), found.offset_per_key()) == (1, [0, 1, 3])
    assert found.device() == torch.device("cpu")
    assert found.to("meta", True)["b"].shape == (2, 2)
    assert found.to("meta").device().type == "meta"
    rows = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1], [2], [3]]), key_dim=0)
    assert rows["b"].tolist() == rows.to_dict()["b"].tolist() == [[2], [3]]
    assert rows.to("cpu").key_dim() == 0
    parts = [torch.tensor([[1], [4]]), torch.tensor([[2, 3], [5, 6]])]
    joined = KeyedTensor.from_tensor_list(["a", "b"], parts)
    assert joined.length_per_key() == [1, 2]
    assert joined.values().tolist() == columns().values().tolist()


def test_regroup_puts_features_of_several_tensors_side_by_side() -> None:
    other = KeyedTensor(["c", "a"], [1, 1], torch.tensor([[7, 0], [8, 0]]))
    groups = [["b", "c"], ["c"], [], ["a"]]
    found = KeyedTensor.regroup([columns(), other], groups)
    assert [t.tolist() for t in found] == [
        [[2, 3, 7], [5, 6, 8]],
        [[7], [8]],
        [[], []],
        [[0], [0]],  # of two of one name, the last
    ]
    named = KeyedTensor.regroup_as_dict([columns(), other], groups[:2], ["x", "y"])
    assert {key: t.tolist() for key, t in named.items()} == {
        "x": [[2, 3, 7], [5, 6, 8]],
        "y": [[7], [8]],
    }
    with pytest.raises(InputError, match="unknown feature 'd': known are a, b, c"):
        KeyedTensor.regroup([columns(), other], [["a", "d"]])
    with pytest.raises(InputError, match="1 names were given for 2 groups"):
        KeyedTensor.regroup_as_dict([columns()], [["a"], ["b"]], ["x"])
    values = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    taken = KeyedTensor.regroup([KeyedTensor(["a", "b"], [1, 2], values)], [["b", "b"], ["a"]])
    (taken[0].sum() + 5 * taken[1].sum()).backward()
    assert values.grad.tolist() == [[5, 2, 2]]


def test_collections_tell_what_they_are() -> None:
    fields = {"num_embeddings": 8, "embedding_dim": 2}
    tables = [
        EmbeddingBagConfig(name="t", feature_names=["a", "b"], **fields),
        EmbeddingBagConfig(name="s", feature_names=["b"], **fields),
    ]
    assert EmbeddingBagCollection(tables, is_weighted=True).is_weighted() is True
    assert EmbeddingBagCollection(tables).is_weighted() is False
    assert EmbeddingBagCollection(tables).device == torch.device("cpu")
    assert EmbeddingBagCollection(tables, device="meta").device == torch.device("meta")
    assert EmbeddingBagCollection(tables).embedding_names_by_table() == [["a", "b@t"], ["b@s"]]
    one = EmbeddingConfig(name="t", feature_names=["a"], **fields)
    two = EmbeddingConfig(name="s", num_embeddings=8, embedding_dim=3, feature_names=["b"])
    assert EmbeddingCollection([one]).embedding_dim() == 2
    assert EmbeddingCollection([one]).is_weighted() is False
    with pytest.raises(InputError, match=r"tables have \[2, 3\] columns: ask embedding_configs"):
        EmbeddingCollection([one, two]).embedding_dim()
