"""Ids of several features for the samples of one batch."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import InputError, did_you_mean
from rowmesh.features.jagged import JaggedTensor
from rowmesh.features.ragged import Ragged, join_weights, offsets_of, parts_at

__all__ = ["KeyedJaggedTensor"]


class KeyedJaggedTensor(Ragged):
    """Ids of several features for the samples of one batch.

    Key-major: all samples of the first feature, then all of the second.
    ``lengths[f * B + b]`` ids belong to feature f of sample b::

                   sample 0    sample 1
        user       [7]         [3]             values  7 3 | 1 2 4
        items      [1, 2]      [4]             lengths 1 1 | 2 1

    Features may have one name, as after `permute`: asked for by that name, it is the last of them.
    Every feature has B samples: a number of samples for each feature, and indices that expand
    them, are refused.

    Args:
        keys: Names of the features.
        values: All ids.
        weights: A weight for each.
        lengths: ``[F * B]``.
        offsets: ``[F * B + 1]``, where each bag starts. One of both is enough.
        stride: B; by default what the number of lengths gives.
        stride_per_key_per_rank: Refused unless None.
        stride_per_key: B for every feature, or refused.
        length_per_key: Ids of each feature, if they are known: they need not be counted then.
        lengths_offset_per_key: This and what follows is computed here; accepted as TorchRec's
            caches are.
        offset_per_key: Likewise.
        index_per_key: Likewise.
        jt_dict: Likewise.
        inverse_indices: Refused unless None.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
        jt_dict: Mapping[str, JaggedTensor] | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> None:
        self._keys = list(keys)
        strides = {*(stride_per_key or ()), *(() if stride is None else (stride,))}
        _refuse_variable(stride_per_key_per_rank, inverse_indices, strides)
        super().__init__(values, weights, lengths, offsets)
        num_bags = self._num_bags
        if strides or not self._keys:
            stride = strides.pop() if strides else 0
        else:
            stride = num_bags // len(self._keys)
        if num_bags != stride * len(self._keys):
            raise InputError(
                f"{'offsets' if lengths is None else 'lengths'} has {num_bags} entries, but "
                f"{len(self._keys)} features of {stride} samples need {stride * len(self._keys)}"
            )
        self._stride = stride
        self._counted: tuple[int, list[int]] | None = None
        if length_per_key is not None:
            self._take_counts(length_per_key)

    def _take_counts(self, length_per_key: Sequence[int]) -> None:
        counts = list(length_per_key)
        if len(counts) != len(self._keys) or sum(counts) != len(self._values):
            raise InputError(
                f"{len(counts)} features have {sum(counts)} ids by their lengths, but "
                f"{len(self._values)} ids of {len(self._keys)} features were given"
            )
        self._counted = self._version(), counts

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """No features and no samples."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        return KeyedJaggedTensor(
            [],
            torch.empty(0, dtype=values_dtype, device=device),
            weights,
            torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """From key-major values and lengths; checks that the lengths add up.

        Raises:
            InputError: If a length is negative or their sum is not the number of values.
        """
        _refuse_variable(stride_per_key_per_rank, inverse_indices)
        return KeyedJaggedTensor(keys, values, weights, lengths, stride=stride)._checked()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """From key-major values and offsets; checks that they begin at 0 and add up.

        Raises:
            InputError: If they do not begin at 0, fall, or do not end at the number of values.
        """
        if offsets.numel() and int(offsets[0]):
            raise InputError(f"offsets begin at {int(offsets[0])}, but the first bag begins at 0")
        _refuse_variable(stride_per_key_per_rank, inverse_indices)
        return KeyedJaggedTensor(keys, values, weights, None, offsets, stride)._checked()

    def _checked(self) -> "KeyedJaggedTensor":
        lengths = self.lengths()
        total, smallest = int(lengths.sum()), int(lengths.min()) if lengths.numel() else 0
        if total != len(self._values) or smallest < 0:
            raise InputError(
                f"lengths add up to {total} (smallest {smallest}), but "
                f"{len(self._values)} values were given"
            )
        return self.sync()

    @staticmethod
    def from_dict(jt_dict: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """From one `JaggedTensor` per feature; all must have the same number of samples."""
        if not jt_dict:
            raise InputError("from_dict needs at least one feature")
        strides = {key: jagged.lengths().numel() for key, jagged in jt_dict.items()}
        if len(set(strides.values())) > 1:
            raise InputError(f"features have different numbers of samples: {strides}")
        parts = list(jt_dict.values())
        return KeyedJaggedTensor(
            list(jt_dict),
            torch.cat([p.values() for p in parts]),
            join_weights([p.weights_or_none() for p in parts]),
            torch.cat([p.lengths() for p in parts]),
        )

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """TorchRec's name of `from_dict`."""
        return KeyedJaggedTensor.from_dict(jt_dict)

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
                    lengths=torch.full(
                        (len(column),),
                        1 if column.dim() == 1 else column.shape[1],
                        dtype=torch.int32,
                        device=column.device,
                    ),
                )
                for key, column in columns.items()
            }
        )

    @staticmethod
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The features of all, one after the other; all must have the same number of samples."""
        if not kjt_list:
            raise InputError("concat needs at least one KeyedJaggedTensor")
        strides = [part.stride() for part in kjt_list]
        if len(set(strides)) > 1:
            raise InputError(f"features have different numbers of samples: {strides}")
        return KeyedJaggedTensor(
            [key for part in kjt_list for key in part.keys()],  # noqa: SIM118
            torch.cat([part.values() for part in kjt_list]),
            join_weights([part.weights_or_none() for part in kjt_list]),
            torch.cat([part.lengths() for part in kjt_list]),
            stride=strides[0],
        )

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def stride(self) -> int:
        """Number of samples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Number of samples of each feature: the same for all."""
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """False: every feature has the same number of samples."""
        return False

    def inverse_indices_or_none(self) -> None:
        """None: samples are not expanded."""

    def index_per_key(self) -> dict[str, int]:
        """The place of each feature; of those of one name, of the last."""
        return {key: k for k, key in enumerate(self._keys)}

    def length_per_key(self) -> list[int]:
        """Ids of each feature; counted once, and again if the lengths were changed in place."""
        if self._counted is None or self._counted[0] != self._version():
            lengths = self.lengths().view(len(self._keys), self._stride)
            self._take_counts(lengths.sum(1, dtype=torch.int64).tolist())
            assert self._counted is not None
        return self._counted[1]

    def offset_per_key(self) -> list[int]:
        """Where the ids of each feature start, and the end of the last."""
        return list(itertools.accumulate(self.length_per_key(), initial=0))

    def lengths_offset_per_key(self) -> list[int]:
        """Where the lengths of each feature start, and the end of the last."""
        return [self._stride * f for f in range(len(self._keys) + 1)]

    def _version(self) -> int:
        """Changes whenever lengths or offsets are changed in place."""
        told = [t for t in (self._lengths, self._offsets) if t is not None]
        return sum(0 if t.is_inference() else int(t._version) for t in told)

    def sync(self) -> "KeyedJaggedTensor":
        """Count the ids of each feature now; returns the same features."""
        self.length_per_key()
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise InputError(f"unknown feature {key!r}{did_you_mean(key, self._keys)}")
        f = self.index_per_key()[key]
        start, stop = self.offset_per_key()[f : f + 2]
        return JaggedTensor(
            self._values[start:stop],
            None if self._weights is None else self._weights[start:stop],
            self.lengths()[f * self._stride : (f + 1) * self._stride],
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """One `JaggedTensor` per feature.

        Args:
            compute_offsets: Whether each is given its offsets too.
        """
        counts, num_keys = self.length_per_key(), len(self._keys)
        values = self._values.split(counts) if num_keys else ()
        weights: Sequence[Tensor | None] = [None] * num_keys
        if self._weights is not None and num_keys:
            weights = self._weights.split(counts)
        lengths = self.lengths().view(num_keys, self._stride)
        offsets: Sequence[Tensor | None] = [None] * num_keys
        if compute_offsets:
            offsets = offsets_of(lengths).unbind()
        parts = zip(values, weights, lengths.unbind(), offsets, strict=True)
        return dict(zip(self._keys, itertools.starmap(JaggedTensor, parts), strict=True))

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Parts of so many features each, in their order; what no segment counts is left out."""
        if any(n < 0 for n in segments) or sum(segments) > len(self._keys):
            raise InputError(
                f"segments are {list(segments)}, but there are {len(self._keys)} features"
            )
        bounds = list(itertools.accumulate(segments, initial=0))
        return [self._part(first, last) for first, last in itertools.pairwise(bounds)]

    def _part(self, first: int, last: int) -> "KeyedJaggedTensor":
        if last - first == len(self._keys):
            return self
        bounds = self.offset_per_key()
        start, stop = bounds[first], bounds[last]
        lengths = self.lengths()[first * self._stride : last * self._stride]
        return KeyedJaggedTensor(
            self._keys[first:last],
            self._values[start:stop],
            None if self._weights is None else self._weights[start:stop],
            lengths,
            stride=self._stride,
            length_per_key=self.length_per_key()[first:last],
        )

    def permute(
        self, indices: Sequence[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """The features at ``indices``, in that order; some may be left out, or be there twice.

        Args:
            indices: Their places.
            indices_tensor: The same as a tensor; not needed here.
        """
        counts = self.length_per_key()
        for index in indices:
            if not 0 <= index < len(self._keys):
                raise InputError(f"no feature at {index}: there are {len(self._keys)}")
        lengths = self.lengths().view(len(self._keys), self._stride)
        return KeyedJaggedTensor(
            [self._keys[f] for f in indices],
            parts_at(self._values, counts, indices),
            None if self._weights is None else parts_at(self._weights, counts, indices),
            lengths[list(indices)].reshape(-1),
            stride=self._stride,
            length_per_key=[counts[f] for f in indices],
        )

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> "KeyedJaggedTensor":
        """The same features on another device; ``dtype`` is that of the weights."""
        found = self._again(lambda part: part.to(device, non_blocking=non_blocking))
        if found._weights is not None and dtype is not None:
            found._weights = found._weights.to(dtype)
        return found

    def pin_memory(self) -> "KeyedJaggedTensor":
        """The same features in memory from which copies to a device need not wait."""
        return self._again(lambda part: part.pin_memory())

    def _again(self, change: Callable[[Tensor], Tensor]) -> "KeyedJaggedTensor":
        values, weights, lengths, offsets = self._each(change)
        counts = None if self._counted is None else self.length_per_key()
        return KeyedJaggedTensor(
            self._keys, values, weights, lengths, offsets, self._stride, length_per_key=counts
        )

    def __repr__(self) -> str:
        head = (
            f"KeyedJaggedTensor({len(self._keys)} features, {self._stride} samples, "
            f"{self._values.numel()} ids)"
        )
        lines = []
        for f, key in enumerate(self._keys[:6]):
            part = self.permute([f])[key]
            bags = [b.tolist() for b in part.to_dense()[:4]]
            shown = ", ".join(str(b[:6])[:-1] + (", ...]" if len(b) > 6 else "]") for b in bags)
            lines.append(f"  {key}: {shown}{', ...' if self._stride > 4 else ''}")
        if len(self._keys) > 6:
            lines.append(f"  ... {len(self._keys) - 6} more features")
        return "\n".join([head, *lines])


def _refuse_variable(
    stride_per_key_per_rank: Any, inverse_indices: Any, strides: Collection[int] = ()
) -> None:
    """Raise `InputError` if features have numbers of samples of their own."""
    told = {
        "stride_per_key_per_rank": stride_per_key_per_rank is not None,
        "stride_per_key": len(strides) > 1,
        "inverse_indices": inverse_indices is not None,
    }
    if given := [name for name, is_given in told.items() if is_given]:
        raise InputError(
            f"{given[0]} is for a number of samples that differs by feature, which rowmesh does "
            f"not have: repeat those that are shared, so that every feature has as many"
        )
