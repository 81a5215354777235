"""Dense vectors of several features, side by side."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rowmesh.errors import InputError, did_you_mean

__all__ = ["KeyedTensor"]


class KeyedTensor:
    """Dense vectors of several features, side by side: ``[B, sum of lengths]``.

    Of features of one name, the last is what the name means.

    Args:
        keys: Names of the features.
        length_per_key: Columns of each.
        values: All of them.
        key_dim: The dimension along which they lie.
        offset_per_key: Computed here; accepted as TorchRec's cache of it.
        index_per_key: Likewise.
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
    ) -> None:
        self._keys, self._lengths, self._values = list(keys), list(length_per_key), values
        self._key_dim = key_dim

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """One tensor per feature; ``cat_dim`` is the dimension along which they are joined."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """``[B, sum(length_per_key)]``, features in the order of `keys`."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which features lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Where the vectors are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """The first column of each feature, and the end of the last."""
        return list(itertools.accumulate(self._lengths, initial=0))

    def _key_indices(self) -> dict[str, int]:  # TorchRec's own regroup asks for it
        return {key: k for k, key in enumerate(self._keys)}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise InputError(f"unknown feature {key!r}{did_you_mean(key, self._keys)}")
        k = self._key_indices()[key]
        return self._values.narrow(self._key_dim, sum(self._lengths[:k]), self._lengths[k])

    def to_dict(self) -> dict[str, Tensor]:
        """One ``[B, columns]`` view per feature."""
        parts = self._values.split(self._lengths, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    @staticmethod
    def regroup(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """A tensor for each group: its features side by side, whichever tensor they are from.

        A feature may be in several groups or none; of one that several tensors have, the last
        counts.
        """
        found: dict[str, Tensor] = {}
        for tensor in keyed_tensors:
            found |= tensor.to_dict()
        if missing := [key for group in groups for key in group if key not in found]:
            raise InputError(f"unknown feature {missing[0]!r}{did_you_mean(missing[0], found)}")
        dim = keyed_tensors[0].key_dim()
        none = keyed_tensors[0].values().narrow(dim, 0, 0)
        return [
            torch.cat([found[k] for k in group], dim=dim) if group else none for group in groups
        ]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence["KeyedTensor"],
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
    ) -> dict[str, Tensor]:
        """`regroup`, with a name for each group."""
        if len(groups) != len(keys):
            raise InputError(f"{len(keys)} names were given for {len(groups)} groups")
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """The same vectors on another device."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._lengths, values, self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Note that ``stream`` uses the vectors."""
        self._values.record_stream(stream)

    def __repr__(self) -> str:
        return f"KeyedTensor({dict(zip(self._keys, self._lengths, strict=True))})"
