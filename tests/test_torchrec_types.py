"""Our jagged and keyed tensors against TorchRec's: same arguments, same results, drawn at random.

Needs TorchRec (`pip install torchrec fbgemm-gpu-cpu`), which the tests are not run with elsewhere.
"""

import inspect
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import rowmesh as rm
from rowmesh.features import JaggedTensor, KeyedJaggedTensor, KeyedTensor, empty_like
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own
CASES = 300
OURS = {kind.__name__: kind for kind in (JaggedTensor, KeyedJaggedTensor, KeyedTensor)}
# TorchRec's own machinery: for its sharding, for copies between devices, for saving.
NOT_OURS = {
    "JaggedTensor": {"copy_", "empty_like", "size_in_bytes"},
    "KeyedTensor": {"size_in_bytes"},
    "KeyedJaggedTensor": {
        *("clear_storage", "copy_", "dist_init", "dist_labels", "dist_splits", "dist_tensors"),
        *("empty_like", "flatten_lengths", "size_in_bytes", "unsync", "inverse_indices"),
        *("length_per_key_or_none", "offset_per_key_or_none", "stride_per_key_per_rank"),
    },
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an import that warns would end the tests
        pytest.importorskip("torchrec", reason="TorchRec is not installed: nothing to compare with")
        import torchrec.sparse.jagged_tensor as module
    return module


def same(ours: Any, found: Any) -> None:
    """Equal in values, dtypes and shapes, whatever they are."""
    if isinstance(ours, Tensor):
        assert ours.dtype == found.dtype
        assert ours.shape == found.shape
        assert torch.equal(ours, found)
    elif isinstance(ours, JaggedTensor):
        assert type(found).__name__ == "JaggedTensor"
        for method in ("values", "weights_or_none", "lengths", "offsets"):
            same(getattr(ours, method)(), getattr(found, method)())
    elif isinstance(ours, KeyedJaggedTensor):
        assert type(found).__name__ == "KeyedJaggedTensor"
        for method in ("keys", "values", "weights_or_none", "lengths", "offsets", "stride"):
            same(getattr(ours, method)(), getattr(found, method)())
        for method in ("length_per_key", "offset_per_key", "index_per_key", "stride_per_key"):
            same(getattr(ours, method)(), getattr(found, method)())
        same(ours.lengths_offset_per_key(), found.lengths_offset_per_key())
    elif isinstance(ours, KeyedTensor):
        for method in ("keys", "values", "length_per_key", "offset_per_key", "key_dim", "device"):
            same(getattr(ours, method)(), getattr(found, method)())
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(found)
        for mine, other in zip(ours, found, strict=True):
            same(mine, other)
    elif isinstance(ours, dict):
        assert list(ours) == list(found)
        same(list(ours.values()), list(found.values()))
    else:
        assert ours == found


def drawn(seed: int) -> tuple[random.Random, torch.Generator]:
    return random.Random(seed), torch.Generator().manual_seed(seed)


def bags(seed: int, *, num_bags: int, dim: int | None = None) -> dict[str, Tensor]:
    """Arguments of a jagged tensor of so many bags."""
    draw, generator = drawn(seed)
    integer = draw.choice([torch.int32, torch.int64])
    lengths = torch.randint(0, 4, (num_bags,), generator=generator).to(integer)
    total = int(lengths.sum())
    shape = (total,) if dim is None else (total, dim)
    kind = torch.float32 if dim is not None else draw.choice([torch.int32, torch.int64])
    values = torch.randint(0, 100, shape, generator=generator).to(kind)
    found = {"values": values}
    if draw.random() < 0.5:
        found["weights"] = torch.rand(total, generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=integer), lengths.cumsum(0).to(integer)])
    how = draw.choice(["lengths", "offsets", "both"])
    if how != "offsets":
        found["lengths"] = lengths
    if how != "lengths":
        found["offsets"] = offsets
    return found


def keyed(seed: int, *, least: int = 0) -> dict[str, Any]:
    """Arguments of a keyed jagged tensor; every fourth has two features of one name."""
    draw, _ = drawn(seed)
    num_keys, stride = draw.randint(1, 5), draw.randint(least, 5)
    keys = [f"f{k}" for k in range(num_keys)]
    if seed % 4 == 0:
        keys[-1] = keys[0]
    found = bags(seed, num_bags=num_keys * stride)
    given = {"keys": keys, **found}
    if draw.random() < 0.5 or stride == 0:
        given["stride"] = stride
    return given


def both(theirs: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
    copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    return OURS[name](**arguments), getattr(theirs, name)(**copied)


@pytest.mark.parametrize("name", list(OURS))
def test_methods_and_arguments_are_torchrecs(theirs: Any, name: str) -> None:
    found = getattr(theirs, name)
    public = {n for n in dir(found) if not n.startswith("_")} - NOT_OURS[name]
    missing = {n for n in public if not hasattr(OURS[name], n)}
    assert missing == set()
    for method in ["__init__", "__getitem__", *public]:
        if hasattr(found, method):
            mine, other = (
                [
                    (p.name, p.default)
                    for p in inspect.signature(getattr(c, method)).parameters.values()
                ]
                for c in (OURS[name], found)
            )
            assert mine == other, method


@pytest.mark.parametrize("dim", [None, 3])
def test_jagged_tensors(theirs: Any, dim: int | None) -> None:
    for seed in range(CASES):
        draw, _ = drawn(seed)
        num_bags = draw.randint(0, 6)
        arguments = bags(seed, num_bags=num_bags, dim=dim)
        ours, found = both(theirs, "JaggedTensor", arguments)
        same(ours.lengths_or_none(), found.lengths_or_none())
        same(ours.offsets_or_none(), found.offsets_or_none())
        same(ours, found)
        same(ours.device(), found.device())
        same(ours.to("cpu", True), found.to("cpu", True))
        same(ours.to_dense(), found.to_dense())
        same(ours.to_dense_weights(), found.to_dense_weights())
        length, padding = draw.choice([None, 0, 1, 2, 5]), draw.choice([0.0, -1.0, 7.0])
        if num_bags or length is not None:  # TorchRec has no longest of no samples
            same(ours.to_padded_dense(length, padding), found.to_padded_dense(length, padding))
            named = {"desired_length": length, "padding_value": padding}
            same(ours.to_padded_dense_weights(**named), found.to_padded_dense_weights(**named))
            same(ours.to_padded_dense(), found.to_padded_dense()) if num_bags else None


def test_jagged_tensors_from_dense(theirs: Any) -> None:
    for seed in range(CASES):
        draw, generator = drawn(seed)
        sizes = [draw.randint(0, 4) for _ in range(draw.randint(1, 5))]
        values = [torch.rand(size, generator=generator) for size in sizes]
        weights = [torch.rand(size, generator=generator) for size in sizes]
        for more in ((), (weights,)):
            same(
                JaggedTensor.from_dense(values, *more),
                theirs.JaggedTensor.from_dense(values, *more),
            )
        padded = torch.rand((len(sizes), 4), generator=generator)
        given = [padded, torch.tensor(sizes), *([padded + 1] if seed % 2 else [])]
        same(
            JaggedTensor.from_dense_lengths(*given), theirs.JaggedTensor.from_dense_lengths(*given)
        )


def test_empty_tensors(theirs: Any) -> None:
    for arguments in ({}, {"is_weighted": True}, {"values_dtype": torch.int64}):
        same(
            JaggedTensor.empty(**arguments).values(),
            theirs.JaggedTensor.empty(**arguments).values(),
        )
        same(JaggedTensor.empty(**arguments).to_dense(), [])
        same(KeyedJaggedTensor.empty(**arguments), theirs.KeyedJaggedTensor.empty(**arguments))


def test_keyed_jagged_tensors(theirs: Any) -> None:
    for seed in range(CASES):
        draw, _ = drawn(seed)
        arguments = keyed(seed)
        ours, found = both(theirs, "KeyedJaggedTensor", arguments)
        same(ours.lengths_or_none(), found.lengths_or_none())
        same(ours.offsets_or_none(), found.offsets_or_none())
        same(ours, found)
        same(ours.sync(), found.sync())
        same(ours.to("cpu", False, torch.float64), found.to("cpu", False, torch.float64))
        same(ours.device(), found.device())
        same(ours.variable_stride_per_key(), found.variable_stride_per_key())
        same(ours.inverse_indices_or_none(), found.inverse_indices_or_none())
        for key in arguments["keys"]:
            same(ours[key], found[key])
        num_keys = len(arguments["keys"])
        chosen = [draw.randrange(num_keys) for _ in range(draw.randint(1, 6))]
        same(ours.permute(chosen), found.permute(chosen))
        tensor = torch.tensor(chosen, dtype=torch.int32)
        same(ours.permute(chosen, tensor), found.permute(chosen, tensor))
        segments = []
        while sum(segments) < num_keys:
            segments.append(draw.randint(1, num_keys - sum(segments)))
        same(ours.split(segments), found.split(segments))
        same(ours.split(segments[:1]), found.split(segments[:1]))


def test_keyed_jagged_tensors_as_dicts(theirs: Any) -> None:
    for seed in range(CASES):
        arguments = keyed(seed, least=1)  # TorchRec's to_dict raises IndexError of no samples
        ours, found = both(theirs, "KeyedJaggedTensor", arguments)
        for more in ({}, {"compute_offsets": False}):
            ours, found = both(theirs, "KeyedJaggedTensor", arguments)
            same(ours.to_dict(**more), found.to_dict(**more))
        same(
            KeyedJaggedTensor.from_jt_dict(ours.to_dict()),
            theirs.KeyedJaggedTensor.from_jt_dict(found.to_dict()),
        )


def test_keyed_jagged_tensors_made_and_joined(theirs: Any) -> None:
    for seed in range(CASES):
        draw, _ = drawn(seed)
        ours, found = both(theirs, "KeyedJaggedTensor", keyed(seed, least=1))
        weights, stride = ours.weights_or_none(), ours.stride()
        for more in ((), (weights,), (weights, stride)):
            given = (ours.keys(), ours.values(), ours.lengths(), *more)
            same(
                KeyedJaggedTensor.from_lengths_sync(*given),
                theirs.KeyedJaggedTensor.from_lengths_sync(*given),
            )
            given = (ours.keys(), ours.values(), ours.offsets(), *more)
            same(
                KeyedJaggedTensor.from_offsets_sync(*given),
                theirs.KeyedJaggedTensor.from_offsets_sync(*given),
            )
        order = [draw.randrange(len(ours.keys())) for _ in range(3)]
        parts, others = [ours, ours.permute(order)], [found, found.permute(order)]
        same(KeyedJaggedTensor.concat(parts), theirs.KeyedJaggedTensor.concat(others))


def vectors(seed: int, prefix: str) -> dict[str, Any]:
    draw, generator = drawn(seed)
    lengths = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    keys = [f"{prefix}{k}" for k in range(len(lengths))]
    if seed % 5 == 0:
        keys[-1] = keys[0]
    values = torch.rand((3, sum(lengths)), generator=generator)
    return {"keys": keys, "length_per_key": lengths, "values": values}


def test_keyed_tensors(theirs: Any) -> None:
    for seed in range(CASES):
        draw, _ = drawn(seed)
        arguments = vectors(seed, "a")
        if seed % 3 == 0:
            arguments |= {"values": arguments["values"].t().contiguous(), "key_dim": 0}
        ours, found = both(theirs, "KeyedTensor", arguments)
        same(ours, found)
        same(ours.to("cpu", True), found.to("cpu", True))
        same(ours.to_dict(), found.to_dict())
        for key in arguments["keys"]:
            same(ours[key], found[key])
        parts = [ours.values().narrow(ours.key_dim(), 0, n) for n in ours.length_per_key()]
        dims = (ours.key_dim(), ours.key_dim())
        same(
            KeyedTensor.from_tensor_list(ours.keys(), parts, *dims),
            theirs.KeyedTensor.from_tensor_list(ours.keys(), parts, *dims),
        )
        pairs = [
            both(theirs, "KeyedTensor", vectors(seed + n, name)) for n, name in enumerate("bc")
        ]
        mine, others = (list(column) for column in zip(*pairs, strict=True))
        names = list(dict.fromkeys(key for tensor in mine for key in tensor.keys()))  # noqa: SIM118
        groups = [draw.choices(names, k=draw.randint(1, 4)) for _ in range(draw.randint(1, 3))]
        if seed % 2:  # each once, TorchRec's other path
            groups = [names[: len(names) // 2], names[len(names) // 2 :]]
            groups = [group for group in groups if group]
        same(KeyedTensor.regroup(mine, groups), theirs.KeyedTensor.regroup(others, groups))
        same(KeyedTensor.regroup(others, groups), theirs.KeyedTensor.regroup(mine, groups))
        labels = [f"group {n}" for n in range(len(groups))]
        same(
            KeyedTensor.regroup_as_dict(mine, groups, labels),
            theirs.KeyedTensor.regroup_as_dict(others, groups, labels),
        )


def test_collections_on_either_librarys_features(theirs: Any) -> None:
    import torchrec

    tables = [("t0", ["f0", "f1"]), ("t1", ["f1", "f2"])]
    configs = [
        {"name": name, "num_embeddings": 100, "embedding_dim": 4, "feature_names": features}
        for name, features in tables
    ]
    for seed in range(40):
        weighted = seed % 2 == 1
        arguments = keyed(4 * seed + 1, least=1)
        arguments["keys"] = [f"f{k}" for k in range(len(arguments["keys"]))]
        ours, found = both(theirs, "KeyedJaggedTensor", arguments)
        if len(ours.keys()) < 3 or (weighted and ours.weights_or_none() is None):
            continue
        bags = rm.EmbeddingBagCollection(
            [rm.EmbeddingBagConfig(**config) for config in configs], is_weighted=weighted
        )
        other = torchrec.EmbeddingBagCollection(
            tables=[torchrec.EmbeddingBagConfig(**config) for config in configs],
            is_weighted=weighted,
        )
        other.load_state_dict(bags.state_dict())
        assert bags.is_weighted() is other.is_weighted() is weighted
        assert bags.device == other.device
        for features, others in ((ours, found), (found, ours)):
            mine, expected = bags(features), other(others)
            assert mine.keys() == expected.keys()
            assert torch.allclose(mine.values(), expected.values(), atol=1e-6)
        sequences = rm.EmbeddingCollection([rm.EmbeddingConfig(**config) for config in configs])
        other = torchrec.EmbeddingCollection(
            tables=[torchrec.EmbeddingConfig(**config) for config in configs]
        )
        other.load_state_dict(sequences.state_dict())
        assert sequences.embedding_dim() == other.embedding_dim()
        assert sequences.embedding_names_by_table() == other.embedding_names_by_table()
        for features, others in ((ours, found), (found, ours)):
            same(sequences(features), other(others))


def test_what_configurations_say_is_equal_whichever_library_is_asked(theirs: Any) -> None:
    import torchrec
    from torchrec.types import DataType

    fields = {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "feature_names": ["f"]}
    for word in ("SUM", "MEAN"):
        member = torchrec.PoolingType[word]
        config = rm.EmbeddingBagConfig(**fields, pooling=member, data_type=DataType.FP16)
        assert config.data_type is torch.float16
        assert config.pooling is rm.PoolingType[word]
        assert config.pooling == member
        assert member == config.pooling
        assert (config.pooling != member) is False
        assert config.pooling != torchrec.PoolingType.NONE
        module = torchrec.EmbeddingBagCollection(
            tables=[torchrec.EmbeddingBagConfig(**fields, pooling=member)]
        )
        mesh = rm.init_mesh()
        model = torch.nn.ModuleDict({"tables": module})
        rm.shard(model, rm.make_plan(model, mesh.topology), mesh)
        (adopted,) = model["tables"].embedding_bag_configs()
        assert adopted.pooling == member
        assert adopted.pooling == rm.PoolingType[word]
        mesh.close()


def test_batches_without_samples_stay_torchrecs(theirs: Any) -> None:
    import torchrec
    from tensordict import TensorDict
    from torchrec.datasets.utils import Batch
    from torchrec.distributed.test_utils.model_input import ModelInput

    for seed in range(CASES):
        _, found = both(theirs, "KeyedJaggedTensor", keyed(seed))
        empty = empty_like(found)
        assert type(empty) is theirs.KeyedJaggedTensor
        assert (empty.keys(), empty.stride(), empty.lengths().numel()) == (found.keys(), 0, 0)
        assert empty.values().dtype == found.values().dtype
        assert (empty.weights_or_none() is None) == (found.weights_or_none() is None)
        order = list(range(len(found.keys())))[::-1]
        assert empty.permute(order).split([1] * len(order))[0].values().numel() == 0
        if found.stride():
            parts = empty.to_dict()
            assert list(parts) == list(dict.fromkeys(found.keys()))
            assert {type(part) for part in parts.values()} == {theirs.JaggedTensor}
        column = theirs.KeyedTensor(["a"], [2], torch.rand(3, 2))
        assert type(empty_like(column)) is theirs.KeyedTensor
        assert empty_like(column).values().shape == (0, 2)
    _, kjt = both(theirs, "KeyedJaggedTensor", keyed(3, least=2))
    batch = Batch(torch.rand(2, 3), kjt, torch.ones(2))
    assert type(empty_like(batch)) is Batch
    assert type(empty_like(batch).sparse_features) is theirs.KeyedJaggedTensor
    inputs = ModelInput(torch.rand(2, 3), kjt, None, torch.ones(2))
    assert type(empty_like(inputs)) is ModelInput
    assert empty_like(inputs).label.shape == (0,)
    columns = TensorDict({"x": torch.rand(2, 3)}, batch_size=[2])
    assert type(empty_like(columns)) is TensorDict
    assert empty_like(columns)["x"].shape == (0, 3)
    table = torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=100, embedding_dim=4, feature_names=kjt.keys()[:1]
    )
    collection = torchrec.EmbeddingBagCollection(tables=[table])
    assert collection(empty_like(kjt)).values().shape == (0, 4)


class Permuting(torch.nn.Module):
    """Asks for methods of its features besides looking them up, as TorchRec's models do."""

    def __init__(self, collection: torch.nn.Module) -> None:
        super().__init__()
        self.tables, self.layer = collection, torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        features = batch.sparse_features
        assert type(features).__module__.startswith("torchrec")
        first, _ = features.permute([1, 0]).split([1, 1])
        counts = features.to_dict()["f0"].lengths() + first["f1"].lengths()
        pooled = self.tables(features)["f0"]
        return self.layer(pooled).squeeze(1) * counts + batch.labels


def train_unequal(mesh: rm.Mesh, depth: int) -> list[int]:
    warnings.simplefilter("ignore")
    import torchrec
    from torchrec.datasets.utils import Batch

    table = torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=100, embedding_dim=4, feature_names=["f0"]
    )
    model = Permuting(torchrec.EmbeddingBagCollection(tables=[table]))
    rm.shard(model, rm.make_plan(model, mesh.topology), mesh)
    opt = rm.Optimizer(model, dense=torch.optim.SGD, sparse=rm.SGD(lr=0.1))
    loader = [
        Batch(
            torch.rand(2, 3),
            torchrec.KeyedJaggedTensor.from_lengths_sync(
                ["f0", "f1"], torch.tensor([1, 2, 3, 4]), torch.ones(4, dtype=torch.int32)
            ),
            torch.ones(2),
        )
        for _ in range(1 + 3 * mesh.rank)
    ]
    sizes = []
    for batch in rm.Pipeline(model, depth=depth).batches(loader):
        mesh.mean(model(batch)).backward()
        opt.step()
        opt.zero_grad()
        sizes.append(batch.sparse_features.stride())
    return sizes


@pytest.mark.parametrize("depth", [1, 2])
def test_unequal_loaders_of_torchrecs_batches_end_together(theirs: Any, depth: int) -> None:
    assert run_on_ranks(2, train_unequal, depth) == [[2, 0, 0, 0], [2] * 4]
