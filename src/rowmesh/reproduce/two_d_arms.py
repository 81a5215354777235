"""The arms of the comparison: how groups work together, and how all of them learn."""

import math
from dataclasses import dataclass
from typing import Literal

from rowmesh.errors import InputError

__all__ = ["Arm", "Learning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """How the groups of one run work together.

    Args:
        groups: M; 1 is full model parallelism.
        mode: As of `Sync`.
        scale: c, as of `MomentumScaledRowwiseAdagrad`.
        period: Steps between syncs.
        ranks: Virtual ranks, a multiple of M; 0 for M. More of them only change the order of sums.
    """

    groups: int = 1
    mode: Literal["gradients", "weights", "moments-first"] = "weights"
    scale: float = 1.0
    period: int = 1
    ranks: int = 0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.ranks % self.groups:
            raise InputError(f"{self.ranks} virtual ranks do not make {self.groups} groups")

    @property
    def world(self) -> int:
        """Virtual ranks."""
        return self.ranks or self.groups

    @property
    def name(self) -> str:
        """As ``full``, ``weights c=M``, ``moments-first``, with ``k=4`` where it is not 1."""
        if self.groups == 1:
            return "full"
        words: list[str] = [self.mode]
        if self.mode == "weights":
            known = {1.0: "1", float(self.groups): "M", math.sqrt(self.groups): "sqrt(M)"}
            words.append(f"c={known.get(self.scale, f'{self.scale:g}')}")
        return " ".join([*words, f"k={self.period}"] if self.period > 1 else words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """How every arm learns; both learning rates fall to 0 in a line.

    Args:
        steps: Training steps.
        dim: Columns of the table.
        model: `Additive`, or a DCN of one cross layer.
        dense_layers: Of the MLP on dense features of a DCN.
        dense_lr: Of Adam, on everything but the table.
        eps: Of row-wise AdaGrad.
    """

    steps: int
    dim: int = 1
    model: Literal["additive", "dcn"] = "additive"
    dense_layers: tuple[int, ...] = ()
    dense_lr: float = 0.02
    eps: float = 1e-8
