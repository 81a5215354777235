"""What groups that step apart do with an update rule, and how they come together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.optim.rules import MomentumScaledRowwiseAdagrad, UpdateRule

__all__ = ["mean_of_groups", "rule_apart"]


def rule_apart(rule: UpdateRule, count: int) -> UpdateRule:
    """The rule of rows on which ``count`` groups step apart, 1 if all ranks step together."""
    if isinstance(rule, MomentumScaledRowwiseAdagrad):
        return rule.for_groups(count)
    return rule


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
