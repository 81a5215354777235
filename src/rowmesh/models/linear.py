"""A linear layer whose matrix products suit the CPU; elsewhere it is torch's."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.models.products import multiply, takes_numpy

__all__ = ["Linear"]

# Floats of a cache line. The library takes a third longer where a result's rows begin anywhere:
# 19.7 against 14.8 ms for [2048, 512] @ [512, 415] (docs/kernels.md).
_LINE = 16


class Linear(nn.Linear):
    """torch's `nn.Linear`: ``y = x W^T + b``.

    On the CPU its products are torch's or numpy's (`rowmesh.models.products`); if torch's, rows of
    its input's gradient begin on cache lines, so that this gradient may have gaps between its rows.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, out_features]``."""
        by_numpy = takes_numpy(x, self.weight)
        if (by_numpy or _pays(x)) and not torch.is_autocast_enabled("cpu"):
            found: Tensor = _Linear.apply(x, self.weight, self.bias, by_numpy)  # type: ignore[no-untyped-call]
            return found
        return super().forward(x)


def _pays(x: Tensor) -> bool:
    """Whether rows of a gradient of ``x`` without gaps would begin anywhere."""
    is_matrix = x.dim() == 2 and x.device.type == "cpu"
    is_eager = not torch.compiler.is_compiling()  # the compiler lays its tensors out itself
    return is_eager and is_matrix and x.requires_grad and x.shape[1] % _LINE != 0


class _Linear(torch.autograd.Function):
    """What torch does, but for who multiplies and where the input's gradient lies."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, by_numpy: bool) -> Tensor:
        if not by_numpy:
            return F.linear(x, weight, bias)
        found = multiply(x, weight.t())
        return found if bias is None else found.add_(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.by_numpy = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        # create_graph=True: neither numpy nor out= has a gradient
        is_last = not torch.is_grad_enabled()
        product = multiply if ctx.by_numpy and is_last else torch.matmul
        of_x = product if ctx.by_numpy or not is_last else _on_lines
        return (
            of_x(grad, weight) if needs_x else None,
            product(grad.t(), x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor, weight_t: Tensor, bias_t: Tensor | None, _: None) -> Tensor:
        x, weight = ctx.saved_tensors
        found = F.linear(x_t, weight) + F.linear(x, weight_t)
        return found if bias_t is None else found + bias_t


def _on_lines(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad @ weight``."""
    columns = weight.shape[1]
    out = grad.new_empty(len(grad), columns + -columns % _LINE)[:, :columns]
    return torch.mm(grad, weight, out=out)
