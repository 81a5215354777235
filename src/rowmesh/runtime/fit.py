"""Whether given tensors fit a model: the keys they go to, or one sentence that says what not."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.errors import InputError, did_you_mean
from rowmesh.runtime.regions import NamedTable

__all__ = ["Fit", "Rename", "fit_tensors", "named_tensors", "plain_tensor"]

Rename = Callable[[str], str] | Mapping[str, str]
"""From a given key to the model's: a function, or prefixes and what replaces them."""

_SHOWN = 4  # keys named in a sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What a state dict and a model have in common, and what only one of them has.

    Attributes:
        loaded: Keys of the model that were given.
        missing: Keys of the model that were not.
        unexpected: Given keys, after renaming, that the model does not have.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def named_tensors(
    given: Mapping[str, Any],
    *,
    targets: Mapping[str, Tensor],
    tables: Iterable[NamedTable],
    rename: Rename | None,
) -> dict[str, Tensor]:
    """The given tensors under the model's keys.

    A key that is a table's name stands for the table's keys. A value may be a module with a
    ``weight`` (``nn.EmbeddingBag``, ``nn.Embedding``), or the state dict of one.
    """
    by_name = {table.config.name: table.keys for table in tables}
    renamed = _renamer(rename, given)
    found: dict[str, Tensor] = {}
    for old, value in given.items():
        if old.endswith("_extra_state"):
            continue
        new = renamed(old)
        keys = by_name[new] if new in by_name and new not in targets else (new,)
        for key in keys:
            if key in found:
                raise InputError(f"two given keys become {key!r}, one of them {old!r}")
            found[key] = plain_tensor(value, repr(old))
    return found


def _renamer(rename: Rename | None, given: Iterable[str]) -> Callable[[str], str]:
    if rename is None:
        return lambda key: key
    if callable(rename):
        return rename
    prefixes = sorted(rename, key=len, reverse=True)
    for prefix in prefixes:
        if not any(key.startswith(prefix) for key in given):
            raise InputError(f"rename: no key begins with {prefix!r}{did_you_mean(prefix, given)}")

    def replace(key: str) -> str:
        prefix = next((p for p in prefixes if key.startswith(p)), None)
        return key if prefix is None else rename[prefix] + key[len(prefix) :]

    return replace


def plain_tensor(value: Any, what: str) -> Tensor:
    """The tensor of a value, which may be a module or its state dict; ``what`` is for messages."""
    if isinstance(value, nn.Module):
        value = getattr(value, "weight", value)
    elif isinstance(value, Mapping) and set(value) == {"weight"}:
        value = value["weight"]
    if type(value) not in (Tensor, nn.Parameter):
        way_out = ": gather its shards first" if isinstance(value, Tensor) else ""
        raise InputError(f"{what} is a {type(value).__name__}, not a plain tensor{way_out}")
    if value.is_meta:
        raise InputError(f"{what} has no values (device 'meta')")
    found: Tensor = value.detach()
    return found


def fit_tensors(
    found: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    strict: bool,
    convert: bool,
) -> Fit:
    """Check keys, shapes and dtypes; ``targets`` may be on ``meta``.

    Raises:
        InputError: One sentence that names what does not fit, and the way out.
    """
    loaded = tuple(key for key in targets if key in found)
    missing = tuple(key for key in targets if key not in found)
    unexpected = tuple(key for key in found if key not in targets)
    faults = []
    if strict or not loaded:
        faults += [f"missing {_names(missing)}"] if missing else []
        faults += [f"unexpected {_names(unexpected)}"] if unexpected else []
    faults += [
        f"{key!r} has shape {list(found[key].shape)}, not {list(targets[key].shape)}"
        for key in loaded
        if found[key].shape != targets[key].shape
    ][:_SHOWN]
    faults += [
        f"{key!r} is {_word(found[key])}, not {_word(targets[key])} (convert=True rounds)"
        for key in loaded
        if found[key].dtype != targets[key].dtype
        and not _converts(found[key], targets[key], convert)
    ][:_SHOWN]
    if not faults:
        return Fit(loaded=loaded, missing=missing, unexpected=unexpected)
    way_out = ""
    if missing or unexpected:
        way_out = (
            ": use rename=, or strict=False to load what fits"
            if loaded
            else ": no key fits, use rename="
        )
    raise InputError(f"the state dict does not fit the model: {'; '.join(faults)}{way_out}")


def _converts(given: Tensor, target: Tensor, convert: bool) -> bool:
    return convert and given.is_floating_point() and target.is_floating_point()


def _names(keys: tuple[str, ...]) -> str:
    shown = ", ".join(repr(key) for key in keys[:_SHOWN])
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix(f"{torch.__name__}.")
