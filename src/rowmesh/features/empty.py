"""Batches like a given one, of whatever type: without samples, or the same in another object."""

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from numbers import Number
from typing import Any, TypeVar

import torch
from torch import Tensor

from rowmesh.errors import InputError

__all__ = ["another_like", "empty_like"]

T = TypeVar("T")

_NOT_SAMPLES = (str, bytes, Number, Enum, torch.device, torch.dtype, type, type(None))


def empty_like(batch: T) -> T:
    """``batch`` with no samples, of the same type, as all that is in it.

    A rank that has run out of data goes on with this until every rank has. Tensors are cut to
    ``[:0]``, so samples must lie along their first dimension; what cuts itself so, as a tensor
    dict does, is left to do it. TorchRec's jagged tensors stay TorchRec's: they are made by the
    constructor of their own class. Other objects are copied, with their attributes cut.

    Raises:
        InputError: If part of the batch is of a type of which that cannot be made.
    """
    return _like(batch, _cut, "without samples")


def another_like(batch: T) -> T:
    """The samples of ``batch`` in another object, with the same tensors.

    Raises:
        InputError: As `empty_like`.
    """
    return _like(batch, copy.copy, "again")


def _like(batch: T, leaf: Callable[[Any], Any], how: str) -> T:
    try:
        return _mapped(batch, leaf)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(
            f"cannot make a {type(batch).__name__} {how} ({error}): say what a rank whose loader "
            f"has ended goes on with, batches(loader, empty=...)"
        ) from error


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """``value`` with ``leaf`` of all that holds samples in it."""
    if isinstance(value, Tensor) or _kind(value) is not None:
        return leaf(value)
    if isinstance(value, _NOT_SAMPLES):
        return value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_mapped(item, leaf) for item in value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    if not isinstance(value, dict) and _sliced(value) is not None:
        return leaf(value)
    if isinstance(value, Mapping):
        return _mapped_mapping(value, leaf)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _mapped(getattr(value, f.name), leaf) for f in fields(value) if f.init}
        return replace(value, **changed)
    return _mapped_object(value, leaf)


def _mapped_mapping(value: Mapping[Any, Any], leaf: Callable[[Any], Any]) -> Any:
    items = {key: _mapped(item, leaf) for key, item in value.items()}
    if not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    found = copy.copy(value)
    for key, item in items.items():
        found[key] = item
    return found


def _mapped_object(value: Any, leaf: Callable[[Any], Any]) -> Any:
    names = [*getattr(value, "__dict__", ()), *_slots(type(value))]
    before = {name: getattr(value, name) for name in names if hasattr(value, name)}
    after = {name: _mapped(part, leaf) for name, part in before.items()}
    if callable(value) or all(after[name] is before[name] for name in before):
        raise TypeError(f"no samples are known in a {type(value).__name__}")
    found = copy.copy(value)
    for name, part in after.items():
        object.__setattr__(found, name, part)
    return found


def _slots(kind: type) -> Iterable[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _kind(value: Any) -> str | None:
    """Which jagged or keyed tensor it is, ours or TorchRec's, by its methods."""

    def has(*methods: str) -> bool:
        return all(callable(getattr(value, name, None)) for name in methods)

    if has("keys", "values", "lengths", "stride"):
        return "keyed jagged"
    if has("values", "lengths", "weights_or_none"):
        return "jagged"
    return "keyed" if has("keys", "values", "length_per_key") else None


def _sliced(value: Any) -> Any:
    """``value[:0]`` if that is the same type of thing with nothing in it, else None."""
    if not hasattr(type(value), "__getitem__") or not hasattr(type(value), "__len__"):
        return None
    try:
        found = value[:0]
        return found if type(found) is type(value) and len(found) == 0 else None
    except Exception:  # whatever another library's container says of a slice
        return None


def _cut(value: Any) -> Any:
    """No samples of a tensor, a jagged or keyed tensor, or what can be sliced."""
    if isinstance(value, Tensor):
        return value[:0] if value.dim() else value
    kind = _kind(value)
    if kind is None:
        return _sliced(value)
    if kind == "keyed":
        values, key_dim = value.values(), getattr(value, "key_dim", lambda: 1)()
        values = values.narrow(0 if key_dim else 1, 0, 0)
        return type(value)(value.keys(), value.length_per_key(), values, key_dim)
    weights = getattr(value, "weights_or_none", lambda: None)()
    parts = {
        "values": value.values()[:0],
        "weights": None if weights is None else weights[:0],
        "lengths": value.lengths()[:0],
    }
    if kind == "jagged":
        return type(value)(**parts)
    if not value.stride():
        return copy.copy(value)
    if hasattr(value, "to_dict"):  # TorchRec's own cannot be made of no samples, only be given
        parts["jt_dict"] = {key: _cut(part) for key, part in value.to_dict().items()}
    return type(value)(keys=list(value.keys()), stride=0, **parts)
