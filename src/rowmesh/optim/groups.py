"""What groups that step apart do with an update rule, and how they come together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.optim.rules import MomentumScaledRowwiseAdagrad, RowwiseAdagrad, UpdateRule

__all__ = ["Rules", "mean_of_groups"]


class Rules:
    """The update rule of rows whose groups step ``apart`` or together.

    A momentum-scaled rule is row-wise AdaGrad for rows that are stepped with the gradient, or the
    squares, of all ranks: their moment is the one without groups already.
    """

    def __init__(self, rule: UpdateRule, *, has_groups: bool) -> None:
        self.together = rule
        self._rule = rule
        if isinstance(rule, MomentumScaledRowwiseAdagrad):
            if has_groups:
                self.together = RowwiseAdagrad(lr=rule.lr, eps=rule.eps)
            else:
                self.together = rule.for_groups(1)

    def apart(self, count: int) -> UpdateRule:
        """Of rows on which ``count`` groups step apart."""
        if isinstance(self._rule, MomentumScaledRowwiseAdagrad) and count > 1:
            return self._rule.for_groups(count)
        return self.together


def mean_of_groups(values: Sequence[Tensor]) -> Tensor:
    """``sum of values / M``, added in order in fp32; an element that all agree on stays as it is.

    So rows that no group touched, and rows that all hold alike, keep their bits.
    """
    total = values[0].float()
    alike = torch.ones_like(values[0], dtype=torch.bool)
    for value in values[1:]:
        total = total + value.float()
        alike &= value == values[0]
    mean = total.div_(len(values)) if len(values) > 1 else total
    return torch.where(alike, values[0], mean.to(values[0].dtype))
