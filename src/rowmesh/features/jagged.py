"""Values with a length per sample."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.errors import InputError
from rowmesh.features.ragged import Ragged, offsets_of

__all__ = ["JaggedTensor"]


class JaggedTensor(Ragged):
    """Values with a length per sample: sample b owns ``values[offsets[b]:offsets[b + 1]]``.

    Args:
        values: ``[n, ...]``, sample after sample.
        weights: A weight for each value.
        lengths: Number of values of each sample.
        offsets: Where each sample starts, and the end of the last. One of both is enough.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """No samples."""
        none = torch.empty(0, dtype=lengths_dtype, device=device)
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return JaggedTensor(values, weights, none, none.clone())

    @staticmethod
    def from_dense(
        values: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> "JaggedTensor":
        """One entry of ``values``, and of ``weights``, per sample."""
        lengths = torch.tensor([len(sample) for sample in values], dtype=torch.int32)
        flat = torch.cat(list(values)) if values else torch.empty(0, dtype=torch.int64)
        flat_weights = None
        if weights is not None:
            if [len(sample) for sample in weights] != lengths.tolist():
                raise InputError("every sample needs as many weights as it has values")
            flat_weights = torch.cat(list(weights)) if weights else torch.empty(0)
        return JaggedTensor(flat, flat_weights, lengths.to(flat.device))

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "JaggedTensor":
        """The first ``lengths[b]`` of ``values[b]``: ``[B, N, ...]``, padded to one length."""
        mask = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        chosen = None if weights is None else weights[mask]
        return JaggedTensor(values[mask], chosen, lengths)

    def to_dense(self) -> list[Tensor]:
        """One tensor per sample."""
        return list(torch.split(self._values, self.lengths().tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of each sample, if there are any."""
        if self._weights is None:
            return None
        return list(torch.split(self._weights, self.lengths().tolist()))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """``[B, desired_length, ...]``: samples cut or padded at the end to one length.

        Args:
            desired_length: Default that of the longest sample.
            padding_value: What follows the values of a shorter one.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """The weights, as `to_padded_dense` gives the values, if there are any."""
        if self._weights is None:
            return None
        return self._padded(self._weights, desired_length, padding_value)

    def _padded(self, values: Tensor, length: int | None, padding: float) -> Tensor:
        lengths = self.lengths()
        num_samples = lengths.numel()
        if length is None:
            length = int(lengths.max()) if num_samples else 0
        number = torch.arange(num_samples, device=values.device)
        sample = torch.repeat_interleave(number, lengths.to(number.device))
        place = torch.arange(len(sample), device=values.device)
        place = place - offsets_of(lengths)[:-1].index_select(0, sample)
        keep = place < length
        out = values.new_full((num_samples, length, *values.shape[1:]), padding)
        return out.index_put((sample[keep], place[keep]), values[: len(sample)][keep])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "JaggedTensor":
        """The same samples on another device."""
        return JaggedTensor(*self._each(lambda part: part.to(device, non_blocking=non_blocking)))

    def __repr__(self) -> str:
        return f"JaggedTensor({self._num_bags} samples, {len(self._values)} values)"
