"""The optimiser of a run, and its learning rate as a function of the step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import nn

from rowmesh.errors import InputError, did_you_mean
from rowmesh.optim import (
    SGD,
    Adagrad,
    Adam,
    MomentumScaledRowwiseAdagrad,
    RowwiseAdagrad,
    UpdateRule,
)
from rowmesh.runtime.optimizer import Optimizer

__all__ = ["OptimiserConfig", "make_optimizer", "set_learning_rates"]

_SPARSE: Final[dict[str, Callable[..., UpdateRule]]] = {
    "rowwise_adagrad": RowwiseAdagrad,
    "momentum_scaled_rowwise_adagrad": MomentumScaledRowwiseAdagrad,
    "adagrad": Adagrad,
    "adam": Adam,
    "sgd": SGD,
}
_DENSE: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimiserConfig:
    """How tables and layers learn.

    Args:
        sparse: Update rule of the tables: rowwise_adagrad, momentum_scaled_rowwise_adagrad,
            adagrad, adam or sgd.
        sparse_lr: Its learning rate before the schedule.
        sparse_eps: Its eps, where it has one; None for the rule's own. A row-wise AdaGrad with a
            large one moves rare rows by lr * gradient / eps, less far than frequent ones.
        sparse_scale: The c of the momentum-scaled rule; None for the number of shard groups.
        dense, dense_lr: The same for everything else: adagrad, adam or sgd.
        schedule: ``linear`` falls to 0 at the end of the run, ``constant`` does not fall.
        warmup_steps: Steps in which the learning rate rises to the schedule.

    Raises:
        InputError: If a number is out of range or a name is unknown.
    """

    sparse: str = "rowwise_adagrad"
    sparse_lr: float = 0.05
    sparse_eps: float | None = None
    sparse_scale: float | None = None
    dense: str = "adagrad"
    dense_lr: float = 0.05
    schedule: Literal["linear", "constant"] = "linear"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, known in (("sparse", _SPARSE), ("dense", _DENSE)):
            word, lr = getattr(self, name), getattr(self, f"{name}_lr")
            if word not in known:
                raise InputError(f"unknown {name} optimiser {word!r}{did_you_mean(word, known)}")
            if not 0.0 <= lr < float("inf"):
                raise InputError(f"optimiser.{name}_lr is {lr}, but must be from 0 and finite")
        if self.sparse_eps is not None:
            if self.sparse == "sgd":
                raise InputError("optimiser.sparse is sgd, which has no eps: leave out sparse_eps")
            if not 0.0 < self.sparse_eps < float("inf"):
                raise InputError(f"optimiser.sparse_eps is {self.sparse_eps}, but must be above 0")
        if self.sparse_scale is not None:
            if self.sparse != "momentum_scaled_rowwise_adagrad":
                raise InputError(
                    f"optimiser.sparse is {self.sparse}, which has no scale: leave out "
                    f"sparse_scale, or choose momentum_scaled_rowwise_adagrad"
                )
            if not 0.0 < self.sparse_scale < float("inf"):
                raise InputError(
                    f"optimiser.sparse_scale is {self.sparse_scale}, but must be above 0"
                )
        if self.warmup_steps < 0:
            raise InputError(f"optimiser.warmup_steps is {self.warmup_steps}, but must be from 0")

    def factor(self, step: int, *, num_steps: int) -> float:
        """What multiplies both learning rates at ``step`` (from 0) of ``num_steps``.

        ``min(1, (step + 1) / (warmup_steps + 1)) * (1 - step / num_steps)``, the last factor only
        if the schedule is linear: a function of the step alone, so a resumed run needs no state.
        """
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return warm * (1 - step / num_steps) if self.schedule == "linear" else warm

    @property
    def make_dense(self) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        """Makes the optimiser of the dense parameters."""
        return functools.partial(_DENSE[self.dense], lr=self.dense_lr)

    @property
    def rule(self) -> UpdateRule:
        """The update rule of the tables."""
        given = {"eps": self.sparse_eps, "scale": self.sparse_scale}
        given = {name: value for name, value in given.items() if value is not None}
        return _SPARSE[self.sparse](lr=self.sparse_lr, **given)


def make_optimizer(config: OptimiserConfig, model: nn.Module) -> Optimizer:
    """The optimiser of a sharded model."""
    return Optimizer(model, dense=config.make_dense, sparse=config.rule)


def set_learning_rates(
    config: OptimiserConfig, optimizer: Optimizer, *, step: int, num_steps: int
) -> float:
    """Set the learning rates of ``step`` and return that of the tables."""
    factor = config.factor(step, num_steps=num_steps)
    for group in optimizer.param_groups:
        is_sparse = group.get("name") == "sparse"
        group["lr"] = factor * (config.sparse_lr if is_sparse else config.dense_lr)
    return factor * config.sparse_lr
