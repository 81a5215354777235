"""Each sentence of `rowmesh.tables`, with stand-ins for TorchRec's classes."""

import dataclasses
import functools
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from rowmesh.errors import InputError
from rowmesh.nn import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.tables import (
    BYTES_OF,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    TableConfig,
    configs_of,
    dense_parameters,
    dtype_name,
    is_trainable,
    is_weighted,
    named_collections,
    parse_dtype,
)
from tests.foreign import ForeignBags, ForeignPooling, ForeignSequences, ForeignType, foreign


def bag(**changes: Any) -> EmbeddingBagConfig:
    fields: dict[str, Any] = {"name": "t", "num_embeddings": 16, "embedding_dim": 4}
    return EmbeddingBagConfig(**fields | {"feature_names": ["f"]} | changes)


@pytest.mark.parametrize(
    ("name", "dtype", "num_bytes"),
    [("fp32", torch.float32, 4), ("fp16", torch.float16, 2), ("bf16", torch.bfloat16, 2)],
)
def test_dtypes_have_short_names_in_any_case(name: str, dtype: torch.dtype, num_bytes: int) -> None:
    assert parse_dtype(name) is parse_dtype(name.upper()) is dtype
    assert dtype_name(dtype) == name
    assert BYTES_OF[dtype] == num_bytes == torch.empty(1, dtype=dtype).element_size()


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(InputError, match="unknown table dtype 'INT8': known are fp32, fp16, bf16"):
        parse_dtype("INT8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_embeddings": 0}, "'t' needs at least one row and one column.*num_embeddings=0"),
        ({"embedding_dim": 0}, "embedding_dim=0"),
        ({"embedding_dim": -3}, "embedding_dim=-3"),
        ({"data_type": torch.float64}, "'t': data_type torch.float64 is not fp32, fp16 or bf16"),
        ({"data_type": "fp32"}, "data_type fp32 is not"),
        ({"name": ""}, "'' must be non-empty"),
        ({"name": "a.b"}, "'a.b' must be non-empty and without a dot"),
        ({"feature_names": ["f", "g", "f"]}, r"'t' lists a feature twice: \['f', 'g', 'f'\]"),
    ],
)
@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_a_bad_table_is_named(
    kind: type[TableConfig], changes: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {"name": "t", "num_embeddings": 16, "embedding_dim": 4}
    with pytest.raises(InputError, match=message):
        kind(**fields | changes)


@pytest.mark.parametrize("pooling", [PoolingType.NONE, "max", 3])
def test_bags_pool_by_sum_or_mean_only(pooling: Any) -> None:
    with pytest.raises(InputError, match=r"is not sum or mean; .* use an EmbeddingCollection"):
        bag(pooling=pooling)


def test_a_pooling_equals_torchrecs_of_the_same_word() -> None:
    theirs = Enum("PoolingType", {"SUM": "SUM", "MEAN": "MEAN", "NONE": "NONE"})
    for member in theirs:
        ours = PoolingType[member.name]
        assert PoolingType(member) is PoolingType(member.name) is ours
        assert ours == member
        assert member == ours
        assert (ours != member, member != ours) == (False, False)
        others = [other for other in theirs if other is not member]
        assert all(ours != other and other != ours for other in others)
    assert PoolingType.SUM == "sum"
    assert PoolingType.SUM != ForeignPooling.SUM  # of another name: not known to mean the same
    assert {PoolingType.SUM: 1}["sum"] == 1
    assert bag(pooling=theirs.MEAN).pooling is PoolingType.MEAN
    with pytest.raises(ValueError, match="'max' is not a valid PoolingType"):
        PoolingType("max")


def test_a_configuration_takes_torchrecs_data_type() -> None:
    assert bag(data_type=ForeignType.BF16).data_type is torch.bfloat16
    with pytest.raises(InputError, match="unknown table dtype 'INT8'"):
        bag(data_type=ForeignType.INT8)


def test_defaults_and_freezing() -> None:
    config = EmbeddingBagConfig(name="t", num_embeddings=16, embedding_dim=4)
    assert config.feature_names == []
    assert config.data_type is torch.float32
    assert config.pooling is PoolingType.SUM
    assert EmbeddingConfig(name="t", num_embeddings=1, embedding_dim=1).pooling is PoolingType.NONE
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"  # type: ignore[misc]


def test_initial_range_is_one_over_the_root_of_rows_unless_given() -> None:
    assert bag().init_range() == (-0.25, 0.25)
    assert bag(weight_init_min=-1.0).init_range() == (-1.0, 0.25)
    assert bag(weight_init_max=2.0).init_range() == (-0.25, 2.0)
    assert bag(weight_init_min=0.0, weight_init_max=0.0).init_range() == (0.0, 0.0)


def test_our_collections_are_found_by_path() -> None:
    bags = EmbeddingBagCollection([bag(name="a"), bag(name="b")], device="meta")
    sequence = EmbeddingConfig(name="c", num_embeddings=2, embedding_dim=1, feature_names=["f"])
    model = nn.ModuleDict({"deep": nn.Sequential(nn.Linear(1, 1), bags)})
    model["seq"] = EmbeddingCollection([sequence], device="meta")
    found = list(named_collections(model))
    assert [(path, [c.name for c in configs]) for path, _, configs in found] == [
        ("deep.1", ["a", "b"]),
        ("seq", ["c"]),
    ]
    assert found[0][1] is bags
    assert found[0][2] == bags.embedding_bag_configs()
    assert found[1][2] == [sequence]
    assert [path for path, _, _ in named_collections(bags)] == [""]
    assert list(named_collections(nn.Linear(1, 1))) == []


def test_foreign_collections_are_found_by_their_attributes() -> None:
    mean = foreign("m", pooling=ForeignPooling.MEAN, data_type=ForeignType.FP16)
    ranged = foreign("r", pooling=ForeignPooling.SUM, weight_init_min=-2.0, weight_init_max=3.0)
    half = foreign("h", data_type=torch.bfloat16, feature_names=("x", "y"))
    model = nn.ModuleDict({"bags": ForeignBags(mean, ranged), "seq": ForeignSequences(half)})
    (_, _, bags), (_, _, sequences) = named_collections(model)
    shape = {"num_embeddings": 8, "embedding_dim": 2}
    assert bags == [
        EmbeddingBagConfig(
            name="m",
            feature_names=["m"],
            data_type=torch.float16,
            pooling=PoolingType.MEAN,
            **shape,
        ),
        EmbeddingBagConfig(
            name="r", feature_names=["r"], weight_init_min=-2.0, weight_init_max=3.0, **shape
        ),
    ]
    assert sequences == [
        EmbeddingConfig(name="h", feature_names=["x", "y"], data_type=torch.bfloat16, **shape)
    ]
    assert bags[0].pooling is PoolingType.MEAN


def test_a_foreign_type_we_do_not_store_is_named() -> None:
    with pytest.raises(InputError, match="'INT8'"):
        list(named_collections(ForeignSequences(foreign("i", data_type=ForeignType.INT8))))


def test_a_foreign_configuration_without_a_type_is_fp32() -> None:
    config = foreign("s")
    del config.data_type, config.weight_init_min, config.weight_init_max
    ((_, _, configs),) = named_collections(ForeignSequences(config))
    assert configs[0].data_type is torch.float32
    assert configs[0].init_range() == (-(8**-0.5), 8**-0.5)


@pytest.mark.parametrize("ours", [True, False])
def test_dense_parameters_are_all_but_the_tables_in_order(ours: bool) -> None:
    first, last = nn.Linear(2, 3), nn.Linear(3, 1)
    tables = EmbeddingBagCollection([bag()]) if ours else ForeignBags(foreign("t"))
    model = nn.Sequential(first, tables, nn.Sequential(last))
    found = dense_parameters(model)
    expected = [first.weight, first.bias, last.weight, last.bias]
    assert [id(p) for p in found] == [id(p) for p in expected]
    assert dense_parameters(tables) == []
    tables.extra = nn.Linear(2, 2)  # a collection's own layer is no table
    assert [id(p) for p in dense_parameters(model)[2:4]] == [
        id(p) for p in tables.extra.parameters()
    ]


def test_trainable_means_the_weight_takes_gradients() -> None:
    ours = EmbeddingBagCollection([bag(name="a"), bag(name="b")], device="meta")
    ours.embedding_bags["b"].weight.requires_grad_(False)
    sequences = ForeignSequences(foreign("a"), foreign("b"))
    sequences.embeddings["b"].weight.requires_grad_(False)
    for collection in (ours, sequences):
        assert is_trainable(collection, "a") is True
        assert is_trainable(collection, "b") is False


def test_weighted_is_an_attribute_of_ours_and_a_method_of_theirs() -> None:
    assert is_weighted(EmbeddingBagCollection([bag()], is_weighted=True, device="meta")) is True
    assert is_weighted(EmbeddingBagCollection([bag()], device="meta")) is False
    assert is_weighted(ForeignBags(weighted=True)) is True
    assert is_weighted(ForeignBags(weighted=False)) is False
    assert is_weighted(ForeignSequences()) is False


def test_an_init_function_is_taken_from_torchrecs_configurations() -> None:
    """Its default, and what else draws uniformly, is a range."""
    own = nn.init.zeros_
    cases = [
        (functools.partial(nn.init.uniform_, a=-0.5, b=0.25), (-0.5, 0.25), None),
        (functools.partial(nn.init.uniform_, b=3.0), (0.0, 3.0), None),
        (functools.partial(nn.init.normal_, std=2.0), (-(8**-0.5), 8**-0.5), "itself"),
        (functools.partial(nn.init.uniform_, generator=None), (-(8**-0.5), 8**-0.5), "itself"),
        (own, (-(8**-0.5), 8**-0.5), "itself"),
    ]
    for given, ends, kept in cases:
        (config,) = configs_of(ForeignBags(foreign("t", init_fn=given)))
        assert config.init_range() == ends
        assert config.init_fn is (given if kept else None)


class Around(nn.Module):
    """Repeats the configurations of what it is around, as models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def embedding_bag_configs(self) -> Any:
        return self.inner.embedding_bag_configs()


@pytest.mark.parametrize("ours", [True, False])
def test_a_module_around_a_collection_is_none_itself(ours: bool) -> None:
    inner = EmbeddingBagCollection([bag()]) if ours else ForeignBags(foreign("t"))
    model = nn.Sequential(Around(Around(inner)))
    assert [(path, m) for path, m, _ in named_collections(model)] == [("0.inner.inner", inner)]
    assert [c.name for c in configs_of(model[0])] == ["t"]


class OwnForward(ForeignBags):
    def forward(self, features: Any) -> Any:
        return super().forward(features)


class Own(nn.Module):
    """Tables of its own, and no collection's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({"t": nn.EmbeddingBag(8, 2)})

    def embedding_bag_configs(self) -> Any:
        return [foreign("t")]


class Sharded(nn.Module):
    __module__ = "torchrec.distributed.types"
    __qualname__ = "ShardedModule"


class Remapped(Around):
    def embedding_bag_configs(self) -> Any:
        return super().embedding_bag_configs()

    embedding_bag_configs.__module__ = "torchrec.modules.itep_embedding_modules"


class Processed(nn.Module):
    """Weights of ids that are trained."""

    __module__ = "torchrec.modules.fp_embedding_modules"
    __qualname__ = "FeatureProcessedEmbeddingBagCollection"

    def __init__(self) -> None:
        super().__init__()
        self._feature_processors = nn.ModuleDict({"f": nn.Linear(1, 1)})
        self.bags = ForeignBags(foreign("t"), weighted=True)


def test_feature_processors_may_be_frozen() -> None:
    model = Processed()
    model._feature_processors.requires_grad_(False)
    assert [path for path, _, _ in named_collections(model)] == ["bags"]


def with_own_forward() -> ForeignBags:
    found = ForeignBags(foreign("t"))
    found.forward = found.forward  # type: ignore[method-assign]
    vars(found)["forward"] = lambda features: features
    return found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Own, r"'deep\.1' of Sequential is a .*\.Own, which has tables of its own: .* put the"),
        (lambda: OwnForward(foreign("t")), "OwnForward, whose forward is its own: .* around one"),
        (with_own_forward, "ForeignBags, whose forward is its own"),
        (lambda: Remapped(ForeignBags(foreign("t"))), "Remapped, which is not supported: .* use"),
        (Processed, "FeatureProcessed.*, whose feature processors are trained .*: freeze them"),
        (Sharded, "ShardedModule, which TorchRec has sharded: .* before DistributedModelParallel"),
    ],
)
def test_what_only_looks_like_a_collection_is_refused_by_name(make: Any, message: str) -> None:
    model = nn.ModuleDict({"deep": nn.Sequential(nn.Linear(1, 1), make())})
    with pytest.raises(InputError, match=message):
        list(named_collections(model))
    with pytest.raises(InputError, match=r"^the model is a "):
        dense_parameters(make())


def test_virtual_tables_are_refused() -> None:
    with pytest.raises(InputError, match=r"'t' is a virtual table, .* leave out use_virtual_table"):
        configs_of(ForeignBags(foreign("t", use_virtual_table=True)))
