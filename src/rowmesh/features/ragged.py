"""What jagged tensors share: values, their weights, and where bags of them begin and end."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rowmesh.errors import InputError

__all__ = ["Ragged", "check_places", "join_weights", "offsets_of", "parts_at"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_places(lengths: Tensor | None, offsets: Tensor | None) -> int:
    """How many bags ``lengths`` or ``offsets`` tell of.

    Raises:
        InputError: If both are missing, one is no list of integers, or they contradict each other.
    """
    if lengths is None and offsets is None:
        raise InputError(
            "neither lengths nor offsets were given: say which it is, lengths=... or offsets=... "
            "(the positional order is TorchRec's, with weights before them)"
        )
    for what, given in (("lengths", lengths), ("offsets", offsets)):
        if given is not None and given.dim() != 1:
            raise InputError(
                f"{what} must be one list of all bags, got shape {list(given.shape)}: reshape(-1)"
            )
        if given is not None and given.numel() and given.dtype not in _INTEGERS:
            raise InputError(
                f"{what} must be integers, got {given.dtype} (the positional order is TorchRec's: "
                f"weights come before lengths)"
            )
    by_offsets = None if offsets is None else max(offsets.numel() - 1, 0)
    if lengths is not None and by_offsets not in (None, lengths.numel()):
        raise InputError(
            f"{lengths.numel()} lengths and offsets of {by_offsets} bags were given: they must be "
            f"of the same bags"
        )
    return lengths.numel() if lengths is not None else by_offsets or 0


def offsets_of(lengths: Tensor) -> Tensor:
    """Where each bag starts, and the end of the last, along the last dimension.

    In int64 unless lengths are int32.
    """
    dtype = torch.int32 if lengths.dtype == torch.int32 else torch.int64
    out = lengths.new_zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), dtype=dtype)
    torch.cumsum(lengths, -1, out=out[..., 1:])
    return out


def join_weights(weights: Sequence[Tensor | None]) -> Tensor | None:
    """The weights of several features, which all have some or all have none."""
    some = [w for w in weights if w is not None]
    if some and len(some) < len(weights):
        raise InputError("either every feature has weights, or none has")
    return torch.cat(some) if some else None


def parts_at(values: Tensor, counts: Sequence[int], indices: Sequence[int]) -> Tensor:
    """The parts of ``values``, of so many each, at ``indices``."""
    parts = values.split(list(counts)) if len(counts) else ()
    return torch.cat([parts[i] for i in indices]) if len(indices) else values[:0]


class Ragged:
    """Values in bags, weighted or not; a bag's are ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: Of all bags, one after the other.
        weights: A weight for each value.
        lengths: Number of values of each bag.
        offsets: Where each bag starts, and the end of the last. One of both is enough.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
    ) -> None:
        self._num_bags = check_places(lengths, offsets)
        if weights is not None and len(weights) != len(values):
            raise InputError(f"{len(weights)} weights were given for {len(values)} values")
        self._values, self._weights = values, weights
        self._lengths, self._offsets = lengths, offsets

    def values(self) -> Tensor:
        """All values, bag after bag."""
        return self._values

    def weights(self) -> Tensor:
        """Weights of the values.

        Raises:
            InputError: If there are none.
        """
        if self._weights is None:
            raise InputError("these features have no weights: weights_or_none() gives None then")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Weights of the values, if any."""
        return self._weights

    def lengths(self) -> Tensor:
        """Number of values of each bag."""
        if self._lengths is not None:
            return self._lengths
        assert self._offsets is not None
        return torch.diff(self._offsets)

    def lengths_or_none(self) -> Tensor | None:
        """The lengths, if they were given."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts, and the end of the last."""
        return offsets_of(self.lengths()) if self._offsets is None else self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets, if they were given."""
        return self._offsets

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def record_stream(self, stream: torch.Stream) -> None:
        """Note that ``stream`` uses all parts."""
        for part in (self._values, self._weights, self._lengths, self._offsets):
            if part is not None:
                part.record_stream(stream)

    def _each(
        self, change: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Values, weights, lengths and offsets, changed where they are."""
        others = (self._weights, self._lengths, self._offsets)
        weights, lengths, offsets = (None if part is None else change(part) for part in others)
        return change(self._values), weights, lengths, offsets
