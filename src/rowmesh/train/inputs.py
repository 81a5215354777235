"""Batches checked before they reach the model; what is wrong with one reaches all ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rowmesh.errors import InputError, RowmeshError
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.train.ranking import check_groups

__all__ = ["checked"]


class _Rejected:
    """In the place of features: reading them raises.

    A forward reads its features while it fills its status word, so that all ranks raise the
    sentence at the same step; an exception before the forward would leave the others waiting.
    """

    def __init__(self, error: RowmeshError) -> None:
        self._error = error

    def keys(self) -> list[str]:
        raise InputError(str(self._error))

    values = lengths = keys

    def stride(self) -> int:
        return 0


def checked(
    batches: Iterator[Batch], *, num_dense: int, first_step: int, device: torch.device, what: str
) -> Iterator[Batch]:
    """The batches on ``device``; the first bad one becomes one whose forward raises, and ends.

    Bad is: dense features not ``[B, num_dense]`` fp32 or not finite, labels not ``[B]`` or not 0
    or 1, groups without exactly one label 1, or an `InputError` or `OSError` of the source itself.
    Ids are checked by the forward.

    Args:
        what: ``step`` or ``held-out batch``, for the sentence.
    """
    step = first_step
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            _check(batch, num_dense)
        except (RowmeshError, OSError) as error:
            yield _reject(InputError(f"{what} {step}: {_words(error)}"), num_dense, device)
            return
        yield batch.to(device)
        step += 1


def _check(batch: Batch, num_dense: int) -> None:
    dense, labels = batch.dense_features, batch.labels
    count = batch.sparse_features.stride()
    if list(dense.shape) != [count, num_dense] or dense.dtype != torch.float32:
        raise InputError(
            f"dense features must be float32 of shape {[count, num_dense]}, got {dense.dtype} of "
            f"shape {list(dense.shape)}"
        )
    if (place := _first(~dense.isfinite())) is not None:
        sample, column = place
        value = float(dense[sample, column])
        raise InputError(f"dense column {column}, sample {sample} is {value}, but must be finite")
    if list(labels.shape) != [count]:
        raise InputError(f"labels must have shape {[count]}, got {list(labels.shape)}")
    if (place := _first((labels != 0) & (labels != 1))) is not None:
        value = float(labels[place[0]])
        raise InputError(f"the label of sample {place[0]} is {value}, but must be 0 or 1")
    if batch.groups is not None:
        check_groups(labels, batch.groups)


def _first(wrong: Tensor) -> list[int] | None:
    return wrong.nonzero()[0].tolist() if bool(wrong.any()) else None


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"cannot read the data: {error.strerror} ({error.filename})"
    return str(error)


def _reject(error: RowmeshError, num_dense: int, device: torch.device) -> Batch:
    rejected: Any = _Rejected(error)
    features: KeyedJaggedTensor = rejected
    return Batch(
        dense_features=torch.zeros((0, num_dense), device=device),
        sparse_features=features,
        labels=torch.zeros(0, device=device),
    )
