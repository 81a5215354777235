"""The rules, each on (weight, state, rows, gradient): rows distinct, gradients summed.

All arithmetic is in fp32, also for fp16 and bf16 tables, whose new values are rounded to
nearest. A row that no sample touched does not change, nor does its state. Only operations that
round each element by itself are used (no fused multiply-add, no vectorised pow, whose last bit
depends on where in a tensor an element lies): a row's new value depends on that row alone.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from rowmesh import native
from rowmesh.errors import InputError
from rowmesh.optim.squares import mean_squares
from rowmesh.placement.columns import num_blocks

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "MomentumScaledRowwiseAdagrad",
    "RowwiseAdagrad",
    "UpdateRule",
]

State = Mapping[str, Tensor]


class UpdateRule(Protocol):
    """One step for the touched rows of a table (or of a stack of tables)."""

    @property
    def lr(self) -> float:
        """Learning rate; the optimiser's param group may change it from step to step."""

    def new_state(self, num_rows: int, dim: int, *, device: torch.device) -> dict[str, Tensor]:
        """Zero state: each tensor has one entry, or one row of ``dim``, per table row."""

    @property
    def adds_squares(self) -> bool:
        """Whether a row's step needs squares of all its columns (see ``squares`` of `update`)."""

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Tensor,
        grad: Tensor,
        lr: float,
        *,
        squares: Tensor | None = None,
    ) -> None:
        """Apply one step in place.

        Args:
            weight: ``[num_rows, dim]``.
            state: What `new_state` made.
            rows: ``[n]`` distinct rows.
            grad: ``[n, dim]`` fp32, the sum over all samples.
            lr: Learning rate of this step.
            squares: ``[n]`` mean of the squared gradient over all columns of the table, where
                ``weight`` holds only some of them and the rule `adds_squares`.
        """


def _positive(rule: object, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0.0:
            raise InputError(f"{type(rule).__name__}: {name} must not be negative, got {value}")


def _move(weight: Tensor, rows: Tensor, delta: Tensor) -> None:
    """``weight[rows] += delta``, rounded to nearest where the table is low precision."""
    if weight.dtype == torch.float32:
        weight.index_add_(0, rows, delta)
    else:
        new = weight.index_select(0, rows).float().add_(delta)
        weight.index_copy_(0, rows, new.to(weight.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """``w -= lr * g``."""

    lr: float = 0.01

    adds_squares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr)

    def new_state(self, num_rows: int, dim: int, *, device: torch.device) -> dict[str, Tensor]:
        """None."""
        return {}

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Tensor,
        grad: Tensor,
        lr: float,
        *,
        squares: Tensor | None = None,
    ) -> None:
        """One step."""
        _move(weight, rows, grad * -lr)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowwiseAdagrad:
    """Row-wise AdaGrad: ``v += mean_d(g_d^2)``; ``w -= lr * g / (sqrt(v) + eps)``.

    One float of state per row.
    """

    lr: float = 0.01
    eps: float = 1e-8

    adds_squares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr, eps=self.eps)

    def new_state(self, num_rows: int, dim: int, *, device: torch.device) -> dict[str, Tensor]:
        """``v``: one float a row."""
        return {"v": torch.zeros(num_rows, device=device)}

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Tensor,
        grad: Tensor,
        lr: float,
        *,
        squares: Tensor | None = None,
    ) -> None:
        """One step."""
        _move_by_rows(weight, state["v"], rows, grad, squares, lr=lr, eps=self.eps)


def _move_by_rows(
    weight: Tensor,
    moments: Tensor,
    rows: Tensor,
    grad: Tensor,
    squares: Tensor | None,
    *,
    lr: float,
    eps: float,
    divisor: float = 1.0,
) -> None:
    """``v += squares / divisor``; ``w -= lr * g / (sqrt(v) + eps)``; None: squares of ``grad``."""
    dim = grad.shape[1]
    if native.step_rowwise_adagrad(
        weight,
        moments,
        rows,
        grad,
        width=dim // num_blocks(dim),
        squares=squares,
        divisor=divisor,
        lr=lr,
        eps=eps,
    ):
        return
    squares = mean_squares(grad) if squares is None else squares
    moment = moments.index_select(0, rows).add_(squares / divisor)
    moments.index_copy_(0, rows, moment)
    scale = -lr / _sqrt(moment).add_(eps)
    _move(weight, rows, grad * scale.unsqueeze(1))


def _sqrt(values: Tensor) -> Tensor:
    """The root, rounded to nearest.

    torch's fp32 root may be one bit off, and where depends on the CPU. In fp64 that does not
    matter: no root of an fp32 number is so close to the middle of two others.
    """
    return values.double().sqrt_().float()


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumScaledRowwiseAdagrad:
    """Row-wise AdaGrad for M groups that step apart and average their weights.

    ``v += mean_d(g_d^2) / c``; ``w -= lr * g / (sqrt(v) + eps)``, g being M times the group's
    share of the gradient. With c = M a row that few samples touch keeps the moment it would have
    without groups; with c = 1 that moment grows M times as fast, and the row stops learning. v is
    stored divided by c: another M, or a row copied everywhere, needs no rescaling.

    Args:
        lr, eps: As for `RowwiseAdagrad`.
        scale: c. ``"groups"`` is the number of groups that step apart: M where weights are
            averaged, 1 where gradients or squares of all groups are summed first, and for rows
            that every rank holds. A number is c for all rows under every plan.
    """

    lr: float = 0.01
    eps: float = 1e-8
    scale: Literal["groups"] | float = "groups"

    adds_squares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr, eps=self.eps)
        if self.scale != "groups":
            if isinstance(self.scale, str):
                raise InputError(f"scale must be 'groups' or a number, got {self.scale!r}")
            if not 0.0 < self.scale < math.inf:
                raise InputError(f"scale must be above 0 and finite, got {self.scale}")

    def for_groups(self, count: int) -> "MomentumScaledRowwiseAdagrad":
        """This rule for rows on which ``count`` groups step apart."""
        return replace(self, scale=float(count)) if self.scale == "groups" else self

    def new_state(self, num_rows: int, dim: int, *, device: torch.device) -> dict[str, Tensor]:
        """``v``: one float a row."""
        return {"v": torch.zeros(num_rows, device=device)}

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Tensor,
        grad: Tensor,
        lr: float,
        *,
        squares: Tensor | None = None,
    ) -> None:
        """One step; c = 1 if `for_groups` has not said otherwise."""
        scale = 1.0 if self.scale == "groups" else self.scale
        _move_by_rows(weight, state["v"], rows, grad, squares, lr=lr, eps=self.eps, divisor=scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad:
    """Element-wise AdaGrad: ``v_d += g_d^2``; ``w_d -= lr * g_d / (sqrt(v_d) + eps)``."""

    lr: float = 0.01
    eps: float = 1e-10

    adds_squares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr, eps=self.eps)

    def new_state(self, num_rows: int, dim: int, *, device: torch.device) -> dict[str, Tensor]:
        """``v``: one float an element."""
        return {"v": torch.zeros(num_rows, dim, device=device)}

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Tensor,
        grad: Tensor,
        lr: float,
        *,
        squares: Tensor | None = None,
    ) -> None:
        """One step."""
        moment = grad.square().add_(state["v"].index_select(0, rows))
        state["v"].index_copy_(0, rows, moment)
        _move(weight, rows, grad.mul(-lr).div_(moment.sqrt_().add_(self.eps)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Adam on touched rows, each with its own step count t.

    ``m = b1 m + (1 - b1) g``; ``v = b2 v + (1 - b2) g^2``;
    ``w -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``. Untouched rows keep m, v, t.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    adds_squares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr, eps=self.eps)
        if not all(0.0 <= b < 1.0 for b in self.betas):
            raise InputError(f"Adam: betas must be in [0, 1), got {self.betas}")

    def new_state(self, num_rows: int, dim: int, *, device: torch.device) -> dict[str, Tensor]:
        """``m`` and ``v``: one float an element; ``t``: one float a row."""
        return {
            "m": torch.zeros(num_rows, dim, device=device),
            "v": torch.zeros(num_rows, dim, device=device),
            "t": torch.zeros(num_rows, device=device),
        }

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Tensor,
        grad: Tensor,
        lr: float,
        *,
        squares: Tensor | None = None,
    ) -> None:
        """One step."""
        b1, b2 = self.betas
        first = state["m"].index_select(0, rows).mul_(b1).add_(grad * (1 - b1))
        second = state["v"].index_select(0, rows).mul_(b2).add_(grad.square().mul_(1 - b2))
        count = state["t"].index_select(0, rows).add_(1)
        for name, value in (("m", first), ("v", second), ("t", count)):
            state[name].index_copy_(0, rows, value)
        root = second.div_(_unbias(b2, count)).sqrt_().add_(self.eps)
        _move(weight, rows, first.div_(_unbias(b1, count)).div_(root).mul_(-lr))


def _unbias(beta: float, count: Tensor) -> Tensor:
    """``1 - beta^t`` per row, from a table that ends where the value is 1 in fp32."""
    table = _unbias_table(beta).to(count.device)
    return table.index_select(0, count.clamp(max=len(table) - 1).long()).unsqueeze(1)


@functools.cache
def _unbias_table(beta: float) -> Tensor:
    last = 2 if beta == 0.0 else math.ceil(-26 * math.log(2) / math.log(beta)) + 1
    return torch.tensor([1 - beta**t for t in range(last + 1)], dtype=torch.float32)
