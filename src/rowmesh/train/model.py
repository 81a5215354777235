"""The model of a run, built from its settings as for one device."""

from dataclasses import dataclass
from typing import Literal

import torch

from rowmesh.data import Source
from rowmesh.errors import InputError
from rowmesh.models import DCN, DLRM
from rowmesh.nn import EmbeddingBagCollection

__all__ = ["ModelConfig", "build_model"]

_WIDEST = 1 << 16  # columns of a layer or table; a larger one is a slip of the finger


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and how large.

    Args:
        kind: ``dlrm`` or ``dcn``.
        dim: Columns of every table.
        dense_layers: Hidden sizes of the MLP on dense features; in a DLRM ``dim`` follows.
        over_layers: Hidden sizes of the last MLP; one logit follows.
        cross_layers: Cross layers of a DCN.
        low_rank: Rank of their weights; None for full ones.

    Raises:
        InputError: If a number is out of range.
    """

    kind: Literal["dlrm", "dcn"] = "dlrm"
    dim: int = 16
    dense_layers: tuple[int, ...] = (64, 32)
    over_layers: tuple[int, ...] = (64, 32)
    cross_layers: int = 3
    low_rank: int | None = None

    def __post_init__(self) -> None:
        sizes = {
            "dim": (self.dim,),
            "dense_layers": self.dense_layers,
            "over_layers": self.over_layers,
            "cross_layers": (self.cross_layers,),
            "low_rank": () if self.low_rank is None else (self.low_rank,),
        }
        for name, given in sizes.items():
            if min(given, default=1) < 1:
                raise InputError(f"model.{name} is {min(given)}, but must be at least 1")
            if max(given, default=1) > _WIDEST:
                raise InputError(f"model.{name} is {max(given)}, but must be at most {_WIDEST}")


def build_model(
    config: ModelConfig, source: Source, *, seed: int, device: torch.device | str = "cpu"
) -> DLRM | DCN:
    """The model for ``source``: tables on ``meta``, dense layers drawn from the seed."""
    tables = EmbeddingBagCollection(tables=source.tables(config.dim), device="meta", seed=seed)
    over = (*config.over_layers, 1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if config.kind == "dlrm":
            layers = (*config.dense_layers, config.dim)
            return DLRM(tables, source.num_dense, layers, over, dense_device=device)
        return DCN(
            tables,
            source.num_dense,
            config.dense_layers,
            over,
            config.cross_layers,
            config.low_rank,
            dense_device=device,
        )
