"""A linear layer whose backward suits the CPU's matrix library."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Linear"]

# Floats of a cache line. The library takes a third longer where a result's rows begin anywhere:
# 19.7 against 14.8 ms for [2048, 512] @ [512, 415] (docs/kernels.md).
_LINE = 16


class Linear(nn.Linear):
    """torch's `nn.Linear`: ``y = x W^T + b``. On the CPU, rows of its input's gradient begin on
    cache lines, so that this gradient may have gaps between its rows."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, out_features]``."""
        if _pays(x) and not torch.is_autocast_enabled("cpu"):
            found: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return found
        return super().forward(x)


def _pays(x: Tensor) -> bool:
    """Whether rows of a gradient of ``x`` without gaps would begin anywhere."""
    is_matrix = x.dim() == 2 and x.device.type == "cpu"
    return is_matrix and x.requires_grad and x.shape[1] % _LINE != 0


class _Linear(torch.autograd.Function):
    """What torch does, but for where the input's gradient lies."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _on_lines(grad, weight) if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor, weight_t: Tensor, bias_t: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        found = F.linear(x_t, weight) + F.linear(x, weight_t)
        return found if bias_t is None else found + bias_t


def _on_lines(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad @ weight``."""
    if torch.is_grad_enabled():  # create_graph=True: out= has no gradient
        return grad @ weight
    columns = weight.shape[1]
    out = grad.new_empty(len(grad), columns + -columns % _LINE)[:, :columns]
    return torch.mm(grad, weight, out=out)
