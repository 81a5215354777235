"""What the models of `rowmesh.models` take."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rowmesh.features.keyed import KeyedJaggedTensor

__all__ = ["Batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What the models of `rowmesh.models` take: dense inputs, jagged ids, labels.

    Args:
        dense_features: ``[B, dense inputs]``.
        sparse_features: The ids.
        labels: ``[B]``, 0 or 1.
        true_probabilities: ``[B]`` where the data was planted: what a perfect model would say.
        groups: ``[B]`` int64 where samples are candidates to be ranked: those of one number are a
            group, whole in this batch, with one label 1.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor
    true_probabilities: Tensor | None = None
    groups: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on another device."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same batch in memory from which copies to a device need not wait."""
        return self._each(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Note that ``stream`` uses all parts."""
        for part in self._parts().values():
            part.record_stream(stream)

    def _each(self, change: Callable[[Any], Any]) -> "Batch":
        return replace(self, **{name: change(part) for name, part in self._parts().items()})

    def _parts(self) -> dict[str, Any]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if part is not None}
