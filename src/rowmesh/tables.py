"""Table configurations, named as in TorchRec, and how to read them off any model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from rowmesh.errors import InputError

__all__ = [
    "BYTES_OF",
    "MAX_DIM",
    "MAX_ROWS",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "PoolingType",
    "TableConfig",
    "dense_parameters",
    "dtype_name",
    "is_trainable",
    "is_weighted",
    "named_collections",
    "parse_dtype",
]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_ROWS, MAX_DIM = 1 << 48, 1 << 16  # of a table: bytes of any share stay far below 2^63
BYTES_OF = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class PoolingType(StrEnum):
    """How the rows of a bag become one vector; NONE keeps one vector per id (sequences)."""

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"


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
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)
    data_type: torch.dtype = torch.float32
    weight_init_min: float | None = None
    weight_init_max: float | None = None

    def __post_init__(self) -> None:
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise InputError(
                f"table {self.name!r} needs at least one row and one column, got "
                f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"
            )
        if self.num_embeddings > MAX_ROWS or self.embedding_dim > MAX_DIM:
            raise InputError(
                f"table {self.name!r} has {self.num_embeddings:,} rows of {self.embedding_dim:,} "
                f"columns, but may have {MAX_ROWS:,} of {MAX_DIM:,} at most"
            )
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
        words = [str(p) for p in PoolingType]
        if str(self.pooling) in words:  # "mean" is as good as PoolingType.MEAN
            object.__setattr__(self, "pooling", PoolingType(str(self.pooling)))
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


def named_collections(model: nn.Module) -> Iterator[tuple[str, Any, list[TableConfig]]]:
    """Path, module and table configurations of every embedding collection in ``model``.

    Collections are known by their attributes (``embedding_bag_configs()`` or
    ``embedding_configs()``), so TorchRec's are found too, without importing it.
    """
    for path, module in model.named_modules():
        for attribute, kind in (
            ("embedding_bag_configs", EmbeddingBagConfig),
            ("embedding_configs", EmbeddingConfig),
        ):
            configs = getattr(module, attribute, None)
            if callable(configs):
                yield path, module, [_own_config(c, kind) for c in configs()]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters that are not tables, in the model's order."""
    tables = {
        id(parameter)
        for _, module, _ in named_collections(model)
        for parameter in module.parameters()
    }
    return [p for p in model.parameters() if id(p) not in tables]


def is_trainable(collection: Any, name: str) -> bool:
    """Whether table ``name`` of a collection (ours or TorchRec's) takes gradients."""
    tables = getattr(collection, "embedding_bags", None) or collection.embeddings
    return bool(tables[name].weight.requires_grad)


def is_weighted(collection: Any) -> bool:
    """Whether a collection (ours or TorchRec's) takes a weight per id."""
    flag = getattr(collection, "is_weighted", False)
    return bool(flag() if callable(flag) else flag)


def _own_config(config: Any, kind: type[TableConfig]) -> TableConfig:
    if isinstance(config, TableConfig):
        return config
    dtype = getattr(config, "data_type", torch.float32)
    low, high = (getattr(config, f"weight_init_{end}", None) for end in ("min", "max"))
    fields: dict[str, Any] = {
        "name": config.name,
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "feature_names": list(config.feature_names),
        "data_type": dtype if isinstance(dtype, torch.dtype) else parse_dtype(dtype.value),
        "weight_init_min": low,
        "weight_init_max": high,
    }
    if kind is EmbeddingBagConfig:
        fields["pooling"] = PoolingType(str(config.pooling.value).lower())
    return kind(**fields)
