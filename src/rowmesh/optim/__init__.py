"""Update rules, exact and deterministic: one step per touched row from its summed gradient."""

from rowmesh.optim.rules import (
    SGD,
    Adagrad,
    Adam,
    MomentumScaledRowwiseAdagrad,
    RowwiseAdagrad,
    UpdateRule,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "MomentumScaledRowwiseAdagrad",
    "RowwiseAdagrad",
    "UpdateRule",
]
