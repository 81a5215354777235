"""The model of a run, built from its settings as for one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rowmesh.data import Source
from rowmesh.errors import InputError
from rowmesh.models import DCN, DIN, DLRM
from rowmesh.nn import EmbeddingBagCollection, EmbeddingCollection
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig

__all__ = ["ModelConfig", "build_model"]

_WIDEST = 1 << 16  # columns of a layer or table; a larger one is a slip of the finger


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and how large.

    Args:
        kind: ``dlrm`` or ``dcn``, for pooled features; ``din``, for histories and candidates.
        dim: Columns of every table.
        dense_layers: Hidden sizes of the MLP on dense features; in a DLRM ``dim`` follows.
        over_layers: Hidden sizes of the last MLP; one logit follows.
        cross_layers: Cross layers of a DCN.
        low_rank: Rank of their weights; None for full ones.
        attention_layers: Hidden sizes of the MLP that scores an item of a DIN's history; one score
            follows.

    Raises:
        InputError: If a number is out of range.
    """

    kind: Literal["dlrm", "dcn", "din"] = "dlrm"
    dim: int = 16
    dense_layers: tuple[int, ...] = (64, 32)
    over_layers: tuple[int, ...] = (64, 32)
    cross_layers: int = 3
    low_rank: int | None = None
    attention_layers: tuple[int, ...] = (32,)

    def __post_init__(self) -> None:
        sizes = {
            "dim": (self.dim,),
            "dense_layers": self.dense_layers,
            "over_layers": self.over_layers,
            "cross_layers": (self.cross_layers,),
            "low_rank": () if self.low_rank is None else (self.low_rank,),
            "attention_layers": self.attention_layers,
        }
        for name, given in sizes.items():
            if min(given, default=1) < 1:
                raise InputError(f"model.{name} is {min(given)}, but must be at least 1")
            if max(given, default=1) > _WIDEST:
                raise InputError(f"model.{name} is {max(given)}, but must be at most {_WIDEST}")


def build_model(
    config: ModelConfig, source: Source, *, seed: int, device: torch.device | str = "cpu"
) -> DLRM | DCN | DIN:
    """The model for ``source``: tables on ``meta``, dense layers drawn from the seed.

    Raises:
        InputError: If the model does not read the kind of tables that the source has.
    """
    tables = source.tables(config.dim)
    bags = [table for table in tables if isinstance(table, EmbeddingBagConfig)]
    sequences = [table for table in tables if isinstance(table, EmbeddingConfig)]
    _check_kind(config, source, sequences)
    pooled = EmbeddingBagCollection(tables=bags, device="meta", seed=seed) if bags else None
    over = (*config.over_layers, 1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if config.kind == "din":
            return DIN(
                EmbeddingCollection(tables=sequences, device="meta", seed=seed),
                source.num_dense,
                (*config.attention_layers, 1),
                over,
                embedding_bag_collection=pooled,
                dense_device=device,
            )
        assert pooled is not None
        if config.kind == "dlrm":
            layers = (*config.dense_layers, config.dim)
            return DLRM(pooled, source.num_dense, layers, over, dense_device=device)
        return DCN(
            pooled,
            source.num_dense,
            config.dense_layers,
            over,
            config.cross_layers,
            config.low_rank,
            dense_device=device,
        )


def _check_kind(config: ModelConfig, source: Source, sequences: Sequence[EmbeddingConfig]) -> None:
    name = type(source).__name__
    if config.kind == "din" and not sequences:
        raise InputError(
            f"model.kind is 'din', which attends to a history, but {name} has no sequence table: "
            f"set model.kind=dlrm or dcn, or data.kind=sequences"
        )
    if config.kind != "din" and sequences:
        raise InputError(
            f"model.kind is {config.kind!r}, which reads pooled tables, but {name} has the "
            f"sequence table {sequences[0].name!r}: set model.kind=din"
        )
