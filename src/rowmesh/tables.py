"""Table configurations, named as in TorchRec, and how to read them off any model."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import torch
from torch import nn

from rowmesh.errors import InputError, RowmeshWarning

__all__ = [
    "BYTES_OF",
    "SKIPPED",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "PoolingType",
    "TableConfig",
    "configs_of",
    "dense_parameters",
    "dtype_name",
    "is_collection",
    "is_trainable",
    "is_weighted",
    "named_collections",
    "parse_dtype",
    "tables_of",
    "uncompiled",
    "warn_of_plain",
]

_CONFIGS = ("embedding_bag_configs", "embedding_configs")
_OURS = "rowmesh.nn.collections.Collection"
_THEIRS = tuple(
    f"torchrec.modules.embedding_modules.{kind}Collection.forward"
    for kind in ("EmbeddingBag", "Embedding")
)
_PROCESSED = "torchrec.modules.fp_embedding_modules.FeatureProcessedEmbeddingBagCollection"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BYTES_OF = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class PoolingType(StrEnum):
    """How the rows of a bag become one vector; NONE keeps one vector per id (sequences).

    Equal to the member of TorchRec's enumeration that says the same, and to its own word.
    """

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> "PoolingType | None":
        """TorchRec's member, or the word in capitals."""
        word = str(getattr(value, "value", value)).lower()
        return next((member for member in cls if member.value == word), None)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum) and type(other).__name__ == "PoolingType":
            return self.value == str(other.value).lower()
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def parse_dtype(name: str) -> torch.dtype:
    """``"fp32"``, ``"fp16"`` or ``"bf16"`` (any case) as a torch dtype."""
    try:
        return _DTYPES[name.lower()]
    except KeyError:
        raise InputError(f"unknown table dtype {name!r}: known are fp32, fp16, bf16") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a table dtype; the inverse of `parse_dtype`."""
    return next(name for name, known in _DTYPES.items() if known is dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """What `EmbeddingBagConfig` and `EmbeddingConfig` share: one table and who reads it.

    Args:
        name: Unique within the model; part of the state-dict key.
        num_embeddings: Rows.
        embedding_dim: Columns, from 1.
        feature_names: The features whose ids index this table.
        data_type: fp32, fp16 or bf16 storage. Sums and updates are in fp32.
        weight_init_min: Lower end of the uniform initial values; default -1/sqrt(rows).
        weight_init_max: Upper end; default 1/sqrt(rows).
        init_fn: Sets the initial values of the whole table in place, after those have been set.
            It is run once, with torch's generator seeded by (seed, table): values do not depend
            on the plan, if it draws from no other.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)
    data_type: torch.dtype = torch.float32
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    init_fn: Callable[[torch.Tensor], Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise InputError(
                f"table {self.name!r} needs at least one row and one column, got "
                f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"
            )
        if isinstance(self.data_type, Enum):  # TorchRec's DataType
            object.__setattr__(self, "data_type", parse_dtype(str(self.data_type.value)))
        if self.data_type not in BYTES_OF:
            raise InputError(
                f"table {self.name!r}: data_type {self.data_type} is not fp32, fp16 or bf16"
            )
        if not self.name or "." in self.name:
            raise InputError(
                f"table name {self.name!r} must be non-empty and without a dot: it is part of "
                f"the state-dict key"
            )
        low, high = self.init_range()
        if low > high:
            raise InputError(f"table {self.name!r}: weight_init_min {low} is above max {high}")
        if len(set(self.feature_names)) != len(self.feature_names):
            raise InputError(f"table {self.name!r} lists a feature twice: {self.feature_names}")

    def init_range(self) -> tuple[float, float]:
        """Lower and upper end of the initial values."""
        bound = self.num_embeddings**-0.5
        low = -bound if self.weight_init_min is None else self.weight_init_min
        return low, bound if self.weight_init_max is None else self.weight_init_max


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingBagConfig(TableConfig):
    """A table whose rows are pooled, one vector per sample and feature."""

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        TableConfig.__post_init__(self)
        with contextlib.suppress(ValueError):  # "mean" is as good as PoolingType.MEAN
            object.__setattr__(self, "pooling", PoolingType(self.pooling))
        if self.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise InputError(
                f"table {self.name!r}: pooling {self.pooling!r} is not sum or mean; "
                f"for one vector per id use an EmbeddingCollection"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig(TableConfig):
    """A table read as a sequence, one vector per id."""

    @property
    def pooling(self) -> PoolingType:
        """Always `PoolingType.NONE`."""
        return PoolingType.NONE


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(model)`` wraps, whose names count; others as they are."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def named_collections(model: nn.Module) -> Iterator[tuple[str, Any, list[TableConfig]]]:
    """Path, module and table configurations of every embedding collection in ``model``.

    A collection is rowmesh's, or TorchRec's ``EmbeddingBagCollection`` or ``EmbeddingCollection``
    with TorchRec's own forward, known by names without importing it. A module around collections
    that repeats their configurations is none itself.

    Raises:
        InputError: If a module has tables, or the configurations of some, and is neither.
    """
    for path, module in uncompiled(model).named_modules():
        if uncompiled(module) is not module:
            continue  # it answers for the module inside, which follows
        if is_collection(module):
            if (configs := configs_of(module)) or not hasattr(module, "tied"):
                yield path, module, configs  # else another module is the collection of its table
        elif why := _why_not_run(module):
            parent = type(model.get_submodule(path.rpartition(".")[0])).__qualname__
            raise InputError(
                f"{f'module {path!r} of {parent}' if path else 'the model'} is a "
                f"{type(module).__module__}.{type(module).__qualname__}, {why}"
            )


def is_collection(module: nn.Module) -> bool:
    """Whether ``module`` is rowmesh's collection, or TorchRec's with the forward it came with."""
    if any(f"{base.__module__}.{base.__qualname__}" == _OURS for base in type(module).__mro__):
        return True
    return _is_torchrecs(vars(module).get("forward", type(module).forward))


def _is_torchrecs(forward: Any) -> bool:
    name = f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}"
    return name in _THEIRS


def _why_not_run(module: Any) -> str | None:
    """Why a module that looks like a collection cannot be one; None if it does not look so."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]
    if "torchrec.distributed.types.ShardedModule" in names:
        return "which TorchRec has sharded: give rowmesh the model before DistributedModelParallel"
    if _PROCESSED in names and any(
        p.requires_grad for p in module._feature_processors.parameters()
    ):
        return (
            "whose feature processors are trained through the weights of ids, which take no "
            "gradient in rowmesh: freeze them, or weigh the ids in the data"
        )
    methods = [getattr(type(module), name, None) for name in _CONFIGS]
    given = [method for method in methods if callable(method)]
    if not given:
        return None
    way_out = (
        "rowmesh runs its own and TorchRec's EmbeddingBagCollection and EmbeddingCollection with "
        "their own forward"
    )
    if any(_is_torchrecs(vars(base).get("forward")) for base in type(module).__mro__):
        return f"whose forward is its own: {way_out}; put what it adds into a module around one"
    if any(method.__module__.startswith("torchrec.") for method in given):
        return f"which is not supported: {way_out}; use one of these instead"
    inner = {c.name for m in module.modules() if is_collection(m) for c in configs_of(m)}
    if inner and {config.name for config in configs_of(module)} <= inner:
        return None
    return f"which has tables of its own: {way_out}; put the tables into one of these"


def configs_of(module: Any) -> list[TableConfig]:
    """The tables of a collection, or of what has its ``embedding_bag_configs()``."""
    for attribute, kind in zip(_CONFIGS, (EmbeddingBagConfig, EmbeddingConfig), strict=True):
        configs = getattr(module, attribute, None)
        if callable(configs):
            return [_own_config(c, kind) for c in configs()]
    return []


def tables_of(collection: Any) -> Any:
    """The modules of a collection's tables by name, ours or TorchRec's; none of a sharded one."""
    bags = getattr(collection, "embedding_bags", None)
    return collection.embeddings if bags is None else bags


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters that are not tables, in the model's order."""
    tables = {
        id(parameter)
        for _, module, _ in named_collections(model)
        for parameter in tables_of(module).parameters()
    }
    return [p for p in model.parameters() if id(p) not in tables]


SKIPPED = "_rowmesh_skipped"
"""Marks an embedding that `rowmesh.adopt` was told to leave as it is."""


def warn_of_plain(model: nn.Module, *, is_first: bool = True) -> None:
    """Say, once for a model, which plain embeddings are no tables and so stay on every rank.

    Args:
        model: Before it is sharded.
        is_first: Whether this rank is the one to say it.

    Raises:
        InputError: If the gradients of one are sparse, which dense layers' sums do not take.
    """
    tables = {id(p) for _, c, _ in named_collections(model) for p in tables_of(c).parameters()}
    found = {
        path: module
        for path, module in uncompiled(model).named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and any(id(p) not in tables for p in module.parameters())
    }
    for path, module in found.items():
        if module.sparse and any(p.requires_grad for p in module.parameters()):
            raise InputError(
                f"embedding {path!r} has sparse=True, but what is no table is summed whole over "
                f"ranks: rm.adopt(model) makes it a table; or build it with sparse=False"
            )
    sizes = [
        f"{path or type(module).__name__!r} ({module.num_embeddings} x {module.embedding_dim})"
        for path, module in found.items()
        if not hasattr(module, SKIPPED)
    ]
    if is_first and sizes and getattr(model, "_rowmesh_said", None) != sizes:
        model._rowmesh_said = sizes  # type: ignore[assignment]
        warnings.warn(
            f"left on every rank, and summed whole each step, as dense layers are: embedding "
            f"{', '.join(sizes)}; rm.adopt(model) before rm.make_plan makes tables of them, "
            f"rm.adopt(model, skip=[...]) leaves them so without a word",
            RowmeshWarning,
            stacklevel=3,
        )


def is_trainable(collection: Any, name: str) -> bool:
    """Whether table ``name`` of a collection (ours or TorchRec's) takes gradients."""
    return bool(tables_of(collection)[name].weight.requires_grad)


def is_weighted(collection: Any) -> bool:
    """Whether a collection (ours or TorchRec's) takes a weight per id."""
    flag = getattr(collection, "is_weighted", False)
    return bool(flag() if callable(flag) else flag)


def _own_config(config: Any, kind: type[TableConfig]) -> TableConfig:
    if isinstance(config, TableConfig):
        return config
    if getattr(config, "use_virtual_table", False):
        raise InputError(
            f"table {config.name!r} is a virtual table, which rowmesh does not have: leave out "
            f"use_virtual_table, and give it the rows it needs"
        )
    dtype = getattr(config, "data_type", torch.float32)
    low, high = (getattr(config, f"weight_init_{end}", None) for end in ("min", "max"))
    init_fn = getattr(config, "init_fn", None)
    if isinstance(init_fn, functools.partial) and init_fn.func is nn.init.uniform_:
        range_ = {"a": 0.0, "b": 1.0} | init_fn.keywords  # TorchRec's default is one too
        if not init_fn.args and set(range_) == {"a", "b"}:
            low, high, init_fn = range_["a"], range_["b"], None
    fields: dict[str, Any] = {
        "name": config.name,
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "feature_names": list(config.feature_names),
        "data_type": dtype if isinstance(dtype, torch.dtype) else parse_dtype(dtype.value),
        "weight_init_min": low,
        "weight_init_max": high,
        "init_fn": init_fn,
    }
    if kind is EmbeddingBagConfig:
        fields["pooling"] = PoolingType(str(config.pooling.value).lower())
    return kind(**fields)
