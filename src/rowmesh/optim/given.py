"""What users give as optimisers, checked before anything is made of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rowmesh.errors import InputError
from rowmesh.optim import rules
from rowmesh.optim.rules import UpdateRule

__all__ = ["check_rule", "make_dense"]

_SPARSE = "sparse must be an update rule of rowmesh, as rm.RowwiseAdagrad(lr=0.05)"
_DENSE = (
    "dense must make the optimiser of the layers from the parameters it is given, as "
    "functools.partial(torch.optim.Adam, lr=1e-3)"
)


def check_rule(sparse: Any) -> UpdateRule:
    """``sparse``, if it is an update rule.

    Raises:
        InputError: Says what it is instead, and which rule is like it.
    """
    parts = ("lr", "new_state", "update", "adds_squares")
    if not isinstance(sparse, type) and all(hasattr(sparse, part) for part in parts):
        rule: UpdateRule = sparse
        return rule
    kind = sparse if isinstance(sparse, type) else type(sparse)
    like = f"; the rule of that name is rm.{kind.__name__}(lr=...)"
    raise InputError(f"{_SPARSE}, got {_name(sparse)}{like if kind.__name__ in _known() else ''}")


def _known() -> Sequence[str]:
    return [name for name in rules.__all__ if name != "UpdateRule"]


def make_dense(dense: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimiser that ``dense`` makes of ``parameters``; None for none.

    Raises:
        InputError: If it makes none, or one of other parameters.
    """
    if not parameters:
        return None
    if isinstance(dense, torch.optim.Optimizer) or not callable(dense):
        raise InputError(f"{_DENSE}, got {_name(dense)}")
    made = dense(list(parameters))
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"{_DENSE}, but what was given made {_name(made)}")
    if isinstance(made, torch.optim.LBFGS):
        raise InputError("dense made an LBFGS, which runs forwards itself: take another optimiser")
    known = {id(parameter) for parameter in parameters}
    for parameter in (p for group in made.param_groups for p in group["params"]):
        if parameter.requires_grad and id(parameter) not in known:
            raise InputError(
                f"dense made an optimiser of a parameter of shape {list(parameter.shape)} that is "
                f"no trained layer of the sharded model: its gradients would not be summed over "
                f"ranks; make it part of the model before rm.shard"
            )
    return made


def _name(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__module__.split('.')[0]}.{value.__name__}"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return f"an object of type {type(value).__name__}"
