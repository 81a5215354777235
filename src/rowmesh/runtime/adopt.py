"""TorchRec's collections, known by their attributes, become rowmesh's, in place.

Note: In place
--------------
A collection may be reached by several paths of the model, be its root, carry hooks, and be held by
objects that are no modules. All of them must see the one that is trained, so the object stays and
takes another class: its own first, for ``isinstance`` and for what a subclass adds, with the
members of rowmesh's laid over it. Its attributes stay beside those of ours. (The other order of the
bases, or our class alone, Python refuses: TorchRec's derive from ``abc.ABC``.)
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.errors import InputError
from rowmesh.nn.collections import Collection, EmbeddingBagCollection, EmbeddingCollection
from rowmesh.nn.local import LocalEngine
from rowmesh.runtime.regions import holders
from rowmesh.tables import (
    EmbeddingBagConfig,
    TableConfig,
    dtype_name,
    is_weighted,
    named_collections,
    tables_of,
)

__all__ = ["adopt_collections"]

_Collection = EmbeddingBagCollection | EmbeddingCollection
_SAME_IN_BOTH = {"_is_weighted", "_need_indices"}
_Found = tuple[str, Any, list[TableConfig]]


def adopt_collections(model: nn.Module) -> nn.Module:
    """Make TorchRec's collections in ``model`` ours, in place; returns ``model``.

    Tables keep their parameters, so those with values keep them, and those on ``meta`` are made
    later. Hooks, and the configurations a collection tells, stay.

    Raises:
        InputError: If a table, ours too, has what rowmesh would drop. Nothing has changed then.
    """
    found = list(named_collections(model))
    for path, module, configs in found:
        _check_collection(path, module, configs)
    _check_untied(model, found)
    foreign = [f for f in found if not isinstance(f[1], Collection)]
    made = [_made_like(module, configs) for _, module, configs in foreign]
    for (path, module, _), ours in zip(foreign, made, strict=True):
        if clash := (_own_attributes(ours) - _SAME_IN_BOTH) & vars(module).keys():
            raise InputError(
                f"collection {path!r} has attributes that rowmesh's have for something else: "
                f"rename its {sorted(clash)}"
            )
    for (_, module, _), ours in zip(foreign, made, strict=True):
        _become(module, ours)
    return model


def _own_attributes(ours: _Collection) -> set[str]:
    """What a collection has that other modules have not."""
    return vars(ours).keys() - vars(nn.Module()).keys()


def _made_like(module: Any, configs: Sequence[TableConfig]) -> _Collection:
    """Ours, with the parameters of a foreign collection."""
    ours: _Collection
    if isinstance(configs[0], EmbeddingBagConfig):
        weighted = is_weighted(module)
        ours = EmbeddingBagCollection(configs, device="meta", is_weighted=weighted)  # type: ignore[arg-type]
    else:
        indices = bool(getattr(module, "need_indices", lambda: False)())
        ours = EmbeddingCollection(configs, device="meta", need_indices=indices)  # type: ignore[arg-type]
    for name, table in tables_of(module).items():
        ours.table_modules()[name].weight = table.weight
    return ours


def _become(module: Any, ours: _Collection) -> None:
    vars(module).update({key: getattr(ours, key) for key in _own_attributes(ours)})
    module._modules.update(ours._modules)
    both: tuple[Any, Any] = type(module), type(ours)
    module.__class__ = _joined(*both)
    module.engine = LocalEngine(module)


@functools.cache
def _joined(foreign: Any, ours: Any) -> Any:
    """``foreign`` with the members of ``ours``, but for the configurations in TorchRec's words."""
    chain = ours.__mro__[: ours.__mro__.index(nn.Module)]
    own = {key: value for base in reversed(chain) for key, value in vars(base).items()}
    for stays in ("__init__", "__doc__", "embedding_bag_configs", "embedding_configs"):
        own.pop(stays, None)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _blank, (foreign, ours), dict(vars(self))

    own["__reduce_ex__"] = reduce  # such a class has no name to be pickled by
    return type(foreign.__name__, (foreign, ours), own)


def _blank(foreign: Any, ours: Any) -> Any:
    kind = _joined(foreign, ours)
    return kind.__new__(kind)


def _check_collection(path: str, module: Any, configs: Sequence[TableConfig]) -> None:
    """Refuse what the collection's own tables have and rowmesh's lookup would drop."""
    tables = tables_of(module)
    if set(tables.keys()) != {c.name for c in configs} or not configs:
        raise InputError(
            f"collection {path!r} has the tables {sorted(tables.keys())}, but its configurations "
            f"name {[c.name for c in configs]}: they must be the same"
        )
    for config in configs:
        table = tables[config.name]
        why = _why_not_table(table, config, is_ours=isinstance(module, Collection))
        if why or (why := _why_not_weight(table.weight, config)):
            where = f" of collection {path!r}" if path else ""
            raise InputError(f"table {config.name!r}{where} {why}")


def _why_not_table(table: Any, config: TableConfig, *, is_ours: bool) -> str | None:
    """What a table's module does besides handing out rows."""
    if not is_ours:
        kind = nn.EmbeddingBag if isinstance(config, EmbeddingBagConfig) else nn.Embedding
        if type(table) is not kind:
            name = type(table).__qualname__
            return f"is a {name}, not TorchRec's {kind.__name__}: put that one back"
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq"):
            value = getattr(table, option)
            if value is not None and value is not False:  # a padding_idx of 0 is one
                return f"has {option}={value}, which rowmesh has not: leave it out"
        mode = getattr(table, "mode", "none")
        if mode != str(getattr(config, "pooling", "none")):
            return f"pools by {mode}, its configuration says {config.pooling}: make them the same"  # type: ignore[attr-defined]
    if any(value for key, value in vars(table).items() if key.endswith("_hooks")):
        return "has hooks, which its lookup would skip: hook the collection instead"
    return None


def _why_not_weight(weight: Tensor, config: TableConfig) -> str | None:
    shape = (config.num_embeddings, config.embedding_dim)
    if tuple(weight.shape) != shape:
        return f"has a weight of {list(weight.shape)}, its configuration says {list(shape)}"
    if weight.dtype != config.data_type:
        return (
            f"holds {weight.dtype}, its configuration says {dtype_name(config.data_type)}: convert "
            f"the model, or set its data_type"
        )
    if getattr(weight, "_in_backward_optimizers", None):
        return (
            "has an optimiser applied in backward: leave that out and give the rule to "
            "rm.Optimizer(model, sparse=...)"
        )
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "has hooks on its gradient, which tables have not: leave them out"
    return None


def _check_untied(model: nn.Module, found: Sequence[_Found]) -> None:
    """Refuse tables whose memory anything else in the model has too: each is trained by itself."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    keys: dict[tuple[torch.device, int], list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        keys.setdefault(_memory(parameter), []).append(key)
    for _, collection, configs in found:
        for config in configs:
            held = holders(collection, config.name)
            mine = {p + key for module, key in held for p in paths.get(id(module), [])}
            weight = tables_of(collection)[config.name].weight
            others = [key for key in keys[_memory(weight)] if key not in mine]
            if others:
                raise InputError(
                    f"table {config.name!r} shares its values with {others[0]!r}, and sharding "
                    f"would untie them: let all its features read one table"
                )


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, id(tensor) if tensor.is_meta else tensor.data_ptr()
