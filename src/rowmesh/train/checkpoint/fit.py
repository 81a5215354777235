"""Whether a checkpoint and a model belong together, said before anything is changed."""

from typing import Any

from torch import Tensor, nn

from rowmesh.errors import InputError, did_you_mean
from rowmesh.runtime.boxes import TableTensor
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.tables import dtype_name
from rowmesh.train.checkpoint.state import check_optimizer

__all__ = ["check_fit", "describe_tables"]

_ONE_MOMENT = {"RowwiseAdagrad", "MomentumScaledRowwiseAdagrad"}
_WORDS = {"rows": "rows", "dim": "columns", "dtype": "data type"}


def describe_tables(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Rows, columns, data type and number of virtual shards of every table."""
    found = {}
    for engine in sharded_engines(model):
        for stack in engine.stacks:
            for region in (*stack.layout.home, *stack.layout.copied):
                config = engine.tables[region.table]
                found[config.name] = {
                    "rows": config.num_embeddings,
                    "dim": config.embedding_dim,
                    "dtype": dtype_name(config.data_type),
                    "shards": region.homes.num_shards,
                }
    return found


def check_fit(
    document: dict[str, Any],
    wanted: dict[str, Tensor | TableTensor],
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
) -> None:
    """Refuse a checkpoint of another model, update rule or dense optimiser.

    The number of virtual shards may differ, and so may the scale of row-wise AdaGrad: its moments
    are stored divided by it.

    Args:
        document: From metadata.json.
        wanted: Every tensor to fill, by key.
        model, optimizer: To load into.

    Raises:
        InputError: Names both sides.
    """
    _check_tables(document["tables"], describe_tables(model))
    if optimizer is not None:
        if document["rule"] is None:
            raise InputError("the checkpoint was saved without an optimiser: load optimizer=None")
        rule = type(optimizer._rule).__name__
        if document["rule"] != rule and not {document["rule"], rule} <= _ONE_MOMENT:
            raise InputError(
                f"the checkpoint's update rule is {document['rule']}, the optimiser's is {rule}"
            )
        check_optimizer(model, optimizer, document["dense_optimizer"])
    _check_names(document["tensors"], wanted)
    for key, value in wanted.items():
        shape, saved = tuple(value.shape), tuple(document["tensors"][key]["shape"])
        if isinstance(value, TableTensor):  # their rows and columns are compared above
            shape, saved = shape[2:], saved[2:]
        dtypes = document["tensors"][key]["dtype"], str(value.dtype).removeprefix("torch.")
        if shape != saved or dtypes[0] != dtypes[1]:
            raise InputError(
                f"{key!r} is {dtypes[0]} {list(saved)} in the checkpoint, "
                f"{dtypes[1]} {list(shape)} here"
            )


def _check_tables(saved: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in ours:
        if name not in saved:
            raise InputError(
                f"the model's table {name!r} is not in the checkpoint{did_you_mean(name, saved)}"
            )
    for name in saved:
        if name not in ours:
            raise InputError(
                f"the checkpoint's table {name!r} is not in the model{did_you_mean(name, ours)}"
            )
        for field, word in _WORDS.items():
            if saved[name][field] != ours[name][field]:
                raise InputError(
                    f"table {name!r}: its {word} is {saved[name][field]} in the checkpoint, "
                    f"{ours[name][field]} in the model"
                )


def _check_names(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in wanted:
        if key not in saved:
            way_out = (
                ": it was frozen, or saved without an optimiser; freeze it or load optimizer=None"
                if ".state." in key
                else did_you_mean(key, saved)
            )
            raise InputError(f"{key!r} is not in the checkpoint{way_out}")
    for key in saved:
        if key.startswith("dense.") and key not in wanted:
            raise InputError(
                f"the checkpoint's {key!r} is not in the model{did_you_mean(key, wanted)}"
            )
