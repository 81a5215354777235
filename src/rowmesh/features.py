"""Jagged features: ids per sample and feature, and the pooled vectors that come back.

Names, layouts and methods follow TorchRec's sparse tensors, so that a model written for one
reads the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import InputError, did_you_mean

__all__ = ["Batch", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "empty_like"]


def _offsets(lengths: Tensor) -> Tensor:
    out = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=out[1:])
    return out


class JaggedTensor:
    """Values with a length per sample: sample b owns ``values[offsets[b]:offsets[b + 1]]``."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._values, self._lengths, self._weights = values, lengths, weights

    @staticmethod
    def from_dense(samples: Sequence[Tensor]) -> "JaggedTensor":
        """One entry of ``samples`` per sample."""
        lengths = torch.tensor([len(s) for s in samples], dtype=torch.int32)
        values = torch.cat(list(samples)) if samples else torch.empty(0, dtype=torch.int64)
        return JaggedTensor(values, lengths.to(values.device))

    def values(self) -> Tensor:
        """All values, sample after sample."""
        return self._values

    def lengths(self) -> Tensor:
        """Number of values of each sample."""
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        """Weights of the values, if any."""
        return self._weights

    def offsets(self) -> Tensor:
        """Where each sample starts, and the end of the last."""
        return _offsets(self._lengths)

    def to_dense(self) -> list[Tensor]:
        """One tensor per sample."""
        return list(torch.split(self._values, self._lengths.tolist()))

    def to_padded_dense(self, length: int | None = None, *, padding: float = 0.0) -> Tensor:
        """``[B, length, ...]``: samples cut or padded at the end to one length."""
        if length is None:
            length = int(self._lengths.max()) if self._lengths.numel() else 0
        num_samples = self._lengths.numel()
        shape = (num_samples, length, *self._values.shape[1:])
        sample = torch.repeat_interleave(
            torch.arange(num_samples, device=self._values.device), self._lengths
        )
        start = self.offsets()[:-1].index_select(0, sample)
        place = torch.arange(len(self._values), device=self._values.device) - start
        keep = place < length
        out = self._values.new_full(shape, padding)
        return out.index_put((sample[keep], place[keep]), self._values[keep])

    def __repr__(self) -> str:
        return f"JaggedTensor({self._lengths.numel()} samples, {len(self._values)} values)"


class KeyedJaggedTensor:
    """Ids of several features for the samples of one batch.

    Key-major: all samples of the first feature, then all of the second.
    ``lengths[f * B + b]`` ids belong to feature f of sample b::

                   sample 0    sample 1
        user       [7]         [3]             values  7 3 | 1 2 4
        items      [1, 2]      [4]             lengths 1 1 | 2 1
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        *,
        lengths: Tensor,
        stride: int | None = None,
    ) -> None:
        self._keys = list(keys)
        if len(set(self._keys)) != len(self._keys):
            raise InputError(f"a feature is named twice in {self._keys}")
        if stride is None:
            if not self._keys:
                raise InputError("a batch without features needs its number of samples: stride")
            stride = lengths.numel() // len(self._keys)
        if lengths.numel() != stride * len(self._keys):
            raise InputError(
                f"lengths has {lengths.numel()} entries, but {len(self._keys)} features of "
                f"{stride} samples need {stride * len(self._keys)}"
            )
        if weights is not None and weights.numel() != values.numel():
            raise InputError(f"{weights.numel()} weights were given for {values.numel()} ids")
        self._values, self._weights, self._lengths = values, weights, lengths
        self._stride = stride

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """From key-major values and lengths; checks that the lengths add up.

        Raises:
            InputError: If a length is negative or their sum is not the number of values.
        """
        total, smallest = int(lengths.sum()), int(lengths.min()) if lengths.numel() else 0
        if total != values.numel() or smallest < 0:
            raise InputError(
                f"lengths add up to {total} (smallest {smallest}), but "
                f"{values.numel()} values were given"
            )
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths)

    @staticmethod
    def from_dict(features: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """From one `JaggedTensor` per feature; all must have the same number of samples."""
        if not features:
            raise InputError("from_dict needs at least one feature")
        strides = {key: jagged.lengths().numel() for key, jagged in features.items()}
        if len(set(strides.values())) > 1:
            raise InputError(f"features have different numbers of samples: {strides}")
        parts = list(features.values())
        weights = [p.weights_or_none() for p in parts]
        some = [w for w in weights if w is not None]
        if some and len(some) < len(weights):
            raise InputError("either every feature has weights, or none has")
        return KeyedJaggedTensor(
            list(features),
            torch.cat([p.values() for p in parts]),
            torch.cat(some) if some else None,
            lengths=torch.cat([p.lengths() for p in parts]),
        )

    @staticmethod
    def from_dense(columns: Mapping[str, Tensor]) -> "KeyedJaggedTensor":
        """From plain id columns: ``[B]`` (one id a sample) or ``[B, P]`` (P ids a sample)."""
        for key, column in columns.items():
            if column.dim() not in (1, 2):
                raise InputError(f"column {key!r} must be [B] or [B, P], got {list(column.shape)}")
        return KeyedJaggedTensor.from_dict(
            {
                key: JaggedTensor(
                    column.reshape(-1),
                    torch.full(
                        (len(column),),
                        1 if column.dim() == 1 else column.shape[1],
                        dtype=torch.int32,
                        device=column.device,
                    ),
                )
                for key, column in columns.items()
            }
        )

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """All ids, key-major."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """Weights of the ids, if any."""
        return self._weights

    def lengths(self) -> Tensor:
        """``[F * B]``: ids per feature and sample, key-major."""
        return self._lengths

    def offsets(self) -> Tensor:
        """``[F * B + 1]``: where each bag starts."""
        return _offsets(self._lengths)

    def stride(self) -> int:
        """Number of samples."""
        return self._stride

    def device(self) -> torch.device:
        """Where the ids are."""
        return self._values.device

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise InputError(f"unknown feature {key!r}{did_you_mean(key, self._keys)}")
        f = self._keys.index(key)
        first, last = f * self._stride, (f + 1) * self._stride
        start = int(self._lengths[:first].sum())
        stop = start + int(self._lengths[first:last].sum())
        weights = None if self._weights is None else self._weights[start:stop]
        return JaggedTensor(self._values[start:stop], self._lengths[first:last], weights)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """One `JaggedTensor` per feature."""
        return {key: self[key] for key in self._keys}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """The same features on another device."""
        moved = [
            None if t is None else t.to(device, non_blocking=non_blocking)
            for t in (self._values, self._weights, self._lengths)
        ]
        values, weights, lengths = moved
        assert values is not None
        assert lengths is not None
        return KeyedJaggedTensor(self._keys, values, weights, lengths=lengths, stride=self._stride)

    def __repr__(self) -> str:
        head = (
            f"KeyedJaggedTensor({len(self._keys)} features, {self._stride} samples, "
            f"{self._values.numel()} ids)"
        )
        lines = []
        for key in self._keys[:6]:
            bags = [b.tolist() for b in self[key].to_dense()[:4]]
            shown = ", ".join(str(b[:6])[:-1] + (", ...]" if len(b) > 6 else "]") for b in bags)
            lines.append(f"  {key}: {shown}{', ...' if self._stride > 4 else ''}")
        if len(self._keys) > 6:
            lines.append(f"  ... {len(self._keys) - 6} more features")
        return "\n".join([head, *lines])


class KeyedTensor:
    """Dense vectors of several features, side by side: ``[B, sum of lengths]``."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """``[B, sum(length_per_key)]``, features in the order of `keys`."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._lengths

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise InputError(f"unknown feature {key!r}{did_you_mean(key, self._keys)}")
        k = self._keys.index(key)
        start = sum(self._lengths[:k])
        return self._values[:, start : start + self._lengths[k]]

    def to_dict(self) -> dict[str, Tensor]:
        """One ``[B, columns]`` view per feature."""
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))

    def __repr__(self) -> str:
        return f"KeyedTensor({dict(zip(self._keys, self._lengths, strict=True))})"


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

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        true, groups = self.true_probabilities, self.groups
        return replace(
            self,
            dense_features=self.dense_features.to(device),
            sparse_features=self.sparse_features.to(device),
            labels=self.labels.to(device),
            true_probabilities=None if true is None else true.to(device),
            groups=None if groups is None else groups.to(device),
        )


def empty_like(batch: Any) -> Any:
    """``batch`` with no samples: tensors are cut to ``[:0]``, containers keep their shape.

    A rank that has run out of data goes on with this until every rank has.
    """
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if all(callable(getattr(batch, m, None)) for m in ("keys", "values", "lengths", "stride")):
        return _no_samples(batch)  # a KeyedJaggedTensor, ours or TorchRec's
    if isinstance(batch, JaggedTensor):
        parts = (batch.values(), batch.lengths(), batch.weights_or_none())
        return JaggedTensor(*(None if part is None else part[:0] for part in parts))  # type: ignore[arg-type]
    if isinstance(batch, KeyedTensor):
        return KeyedTensor(batch.keys(), batch.length_per_key(), batch.values()[:0])
    if isinstance(batch, Mapping):
        return {key: empty_like(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(empty_like(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(empty_like(value) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: empty_like(getattr(batch, f.name)) for f in fields(batch)})
    if batch is None or isinstance(batch, str | bytes | int | float):
        return batch
    raise InputError(
        f"cannot make a {type(batch).__name__} without samples: say what it is, "
        f"mesh.batches(loader, empty=...)"
    )


def _no_samples(features: Any) -> KeyedJaggedTensor:
    weights = getattr(features, "weights_or_none", lambda: None)()
    return KeyedJaggedTensor(
        list(features.keys()),
        features.values()[:0],
        None if weights is None else weights[:0],
        lengths=features.lengths()[:0],
        stride=0,
    )
