"""What all ranks must give alike to `rm.shard` and `rm.Optimizer`, in words that can be compared.

Every rank makes these for itself from its own model, plan and settings. Where they differ nothing
would stop training: it would only be wrong (copies of a row that are not the same, updates by
different rules). So ranks compare them before anything is changed (`comm.agreement.agree_on`).
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rowmesh.errors import PlanError
from rowmesh.optim import UpdateRule
from rowmesh.placement import Plan
from rowmesh.placement.diff import describe_plan
from rowmesh.runtime.history import rates_of, word_of
from rowmesh.runtime.regions import named_tables
from rowmesh.tables import dense_parameters, named_collections

__all__ = [
    "Origin",
    "digest_of",
    "model_parts",
    "optimizer_parts",
    "sample_digest",
    "table_origins",
    "tables_to_spread",
]

_CHUNK_BYTES = 1 << 26
_SAMPLED = 1024  # rows


def model_parts(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Of a model that is about to be sharded: its tables, layers and plan, with hot rows."""
    order = [
        f"{path or 'the model'}: {' '.join(config.name for config in configs)}"
        for path, _, configs in named_collections(model)
    ]
    parts = {"the order of tables in the model": ", ".join(order)}
    dense = {id(p) for p in dense_parameters(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) in dense:
            word = "trained" if parameter.requires_grad else "frozen"
            parts[f"parameter {name!r}"] = f"{_shape(parameter)}, {word}"
    parts |= {f"buffer {name!r}": _shape(buffer) for name, buffer in model.named_buffers()}
    return parts | describe_plan(plan)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


Origin = tuple[bool, str]
"""Whether a table has values, and their digest, or what its initial ones are made of."""


def table_origins(model: nn.Module) -> dict[str, Origin]:
    """Of every table, by name, where its values come from."""
    found = {}
    for table in named_tables(model):
        config, weight = table.config, table.local.weight
        seed, (low, high) = getattr(table.collection, "seed", 0), config.init_range()
        made_of = f"of seed {seed}, from {low:.9g} to {high:.9g}"
        found[config.name] = (not weight.is_meta, made_of if weight.is_meta else digest_of(weight))
    return found


def tables_to_spread(origins: Sequence[Mapping[str, Origin]]) -> set[str]:
    """The tables whose values must come from rank 0, as others have other values or none.

    Args:
        origins: `table_origins` of every rank.

    Raises:
        PlanError: If other ranks have values and rank 0 has none, or ranks make others.
    """
    found = set()
    for name, (has_values, first) in origins[0].items():
        for rank, (theirs_has, theirs) in enumerate(mine[name] for mine in origins):
            if theirs_has and not has_values:
                raise PlanError(
                    f"table {name!r} has values on rank {rank}, but is on 'meta' on rank 0, whose "
                    f"values count: make it alike on all ranks, or on 'meta' on all but rank 0"
                )
            if theirs != first and not has_values:
                raise PlanError(
                    f"ranks disagree: the initial values of table {name!r} are {first} on rank 0 "
                    f"and {theirs} on rank {rank}: build the same model on all ranks"
                )
            if theirs != first:
                found.add(name)
    return found


@torch.no_grad()
def digest_of(tensor: Tensor) -> str:
    """A hash of a tensor's bits, made a chunk at a time."""
    state = hashlib.blake2b(digest_size=16)
    flat = tensor.detach()
    flat = flat.unsqueeze(0) if flat.dim() == 0 else flat
    row_bytes = max(1, flat[:1].numel() * flat.element_size())
    for part in flat.split(max(1, _CHUNK_BYTES // row_bytes)):
        state.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def sample_digest(tensor: Tensor) -> str:
    """A hash of some 1,024 rows, to tell files apart that every rank reads a part of."""
    return digest_of(tensor if tensor.dim() == 0 else tensor[:: max(1, len(tensor) // _SAMPLED)])


def optimizer_parts(rule: UpdateRule, dense: torch.optim.Optimizer | None) -> dict[str, str]:
    """Of an optimiser: the update rule of the tables, that of the layers, and their settings."""
    parts = {"the update rule of the tables": type(rule).__qualname__}
    settings = dataclasses.asdict(rule) if dataclasses.is_dataclass(rule) else {"lr": rule.lr}
    parts |= {f"{key} of the tables' update rule": word_of(v) for key, v in settings.items()}
    if dense is not None:
        parts["the optimiser of the layers"] = type(dense).__qualname__
        parts["its parameters"] = str(
            [[_shape(p) for p in group["params"]] for group in dense.param_groups]
        )
        parts |= rates_of(dense.param_groups)
    return parts
