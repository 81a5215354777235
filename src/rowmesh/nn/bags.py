"""From jagged features to flat bags: the ids of chosen readers, in the order of the output."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh import native
from rowmesh.errors import InputError, did_you_mean
from rowmesh.features import KeyedJaggedTensor
from rowmesh.features.ragged import offsets_of
from rowmesh.tables import TableConfig

__all__ = ["Bags", "Reader", "as_features", "check_ids", "flatten", "readers_of"]


_VARIABLE = ("variable_stride_per_key", "inverse_indices_or_none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One feature reading one table: one block of output columns, or one sequence."""

    feature: str
    table: int
    name: str


def readers_of(tables: Sequence[TableConfig]) -> list[Reader]:
    """Readers in output order; a feature that reads several tables is called feature@table."""
    names = [f for t in tables for f in t.feature_names]
    return [
        Reader(feature=f, table=i, name=f if names.count(f) == 1 else f"{f}@{table.name}")
        for i, table in enumerate(tables)
        for f in table.feature_names
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bags:
    """Ids of R readers for B samples, flattened.

    Pooled readers are laid out sample-major (bag = sample * R + reader), so that the sums are
    ``[B, R * D]`` without a copy; sequences reader-major, one bag per id.

    Args:
        ids: ``[n]`` int64.
        reader: ``[n]`` int32 reader of each id, an index into the readers asked for.
        bag: ``[n]`` int32 bag of each id, ascending.
        lengths: ``[bags]`` ids per bag.
        weights: ``[n]`` fp32 or None.
        sample: ``[n]`` sample of each id, for messages; None where bag // R tells it.
    """

    ids: Tensor
    reader: Tensor
    bag: Tensor
    lengths: Tensor
    weights: Tensor | None
    sample: Tensor | None = None


def as_features(features: object) -> KeyedJaggedTensor:
    """``features`` as our `KeyedJaggedTensor`; TorchRec's is taken by its methods.

    Raises:
        InputError: If it is not jagged features, or ids or lengths are not integers.
    """
    if not isinstance(features, KeyedJaggedTensor):
        parts = [getattr(features, m, None) for m in ("keys", "values", "lengths", "stride")]
        if not all(callable(p) for p in parts):
            raise InputError(
                f"features must be a KeyedJaggedTensor, got {type(features).__name__}; "
                f"KeyedJaggedTensor.from_dense turns plain id columns into one"
            )
        if any(getattr(features, m, lambda: None)() for m in _VARIABLE):
            raise InputError(
                "features have batch sizes of their own (a stride per key, or inverse indices): "
                "give all of them as many samples, each sample its own ids"
            )
        keys, values, lengths, stride = (p() for p in parts)  # type: ignore[misc]
        weights = getattr(features, "weights_or_none", lambda: None)()
        features = KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride)
    for what, tensor in (("ids", features.values()), ("lengths", features.lengths())):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise InputError(f"{what} must be int32 or int64, got {tensor.dtype}")
    return features


def flatten(
    features: KeyedJaggedTensor, readers: Sequence[Reader], *, pooled: bool, weighted: bool
) -> Bags:
    """The bags of ``readers``.

    Raises:
        InputError: If a feature is missing, lengths do not add up, or weights are missing, not
            fp32, or expect a gradient.
    """
    keys, num_keys = features.index_per_key(), len(features.keys())
    if len(keys) < num_keys:
        _refuse_twice(features.keys(), readers)
    for reader in readers:
        if reader.feature not in keys:
            raise InputError(
                f"feature {reader.feature!r} is missing from the batch"
                f"{did_you_mean(reader.feature, keys)}"
            )
    values, lengths, stride = features.values(), features.lengths(), features.stride()
    device = values.device
    total = int(lengths.sum())
    if total != values.numel():
        raise InputError(f"lengths add up to {total}, but {values.numel()} ids were given")
    if len(lengths) and int(lengths.min()) < 0:
        raise InputError(f"a length is negative: {int(lengths.min())}")
    chosen = torch.tensor([keys[r.feature] for r in readers], dtype=torch.int64, device=device)
    weights = _weights(features) if weighted else None
    if pooled and not weighted and len(lengths) and int(lengths.max()) * len(lengths) == total:
        return _flatten_even(values.view(num_keys, stride, -1), chosen)
    begins = offsets_of(lengths)[:-1].view(num_keys, stride).index_select(0, chosen).long()
    counts = lengths.view(num_keys, stride).index_select(0, chosen).long()
    if pooled:
        begins, counts = begins.t(), counts.t()
    begins, counts = begins.reshape(-1), counts.reshape(-1)
    per_reader = 0 if pooled else max(stride, 1)
    found = native.flatten(values, begins, counts, weights, len(readers), per_reader)
    if found is None:
        found = _spread(values, begins, counts, weights, len(readers), per_reader)
    ids, of_reader, bag, weights = found
    sample = None
    if not pooled:
        sample = bag % max(stride, 1)
        bag = torch.arange(len(bag), dtype=torch.int32, device=device)
        counts = counts.new_ones(len(bag))
    return Bags(ids=ids, reader=of_reader, bag=bag, lengths=counts, weights=weights, sample=sample)


def _refuse_twice(keys: Sequence[str], readers: Sequence[Reader]) -> None:
    """Raise for a reader's feature that is there twice: sharded, TorchRec would read the first of
    them, and unsharded the last."""
    for reader in readers:
        places = [k for k, key in enumerate(keys) if key == reader.feature]
        if len(places) > 1:
            raise InputError(
                f"feature {reader.feature!r} is in the batch {len(places)} times, at {places}: "
                f"keep the one that is meant, features.permute([...]), or give each its name"
            )


def _spread(
    values: Tensor,
    begins: Tensor,
    counts: Tensor,
    weights: Tensor | None,
    num_readers: int,
    per_reader: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Ids, readers, bags and weights of ``counts[b]`` values from ``begins[b]``, bag by bag."""
    ends = torch.cumsum(counts, 0)
    num_ids = int(ends[-1]) if len(ends) else 0
    number = torch.arange(len(counts), device=values.device)
    bag = torch.repeat_interleave(number, counts, output_size=num_ids)
    source = torch.arange(num_ids, device=values.device)
    source += (begins - ends + counts).index_select(0, bag)
    reader = bag // per_reader if per_reader else bag % num_readers
    return (
        values.index_select(0, source).long(),
        reader.to(torch.int32),
        bag.to(torch.int32),
        None if weights is None else weights.index_select(0, source),
    )


def _flatten_even(values: Tensor, chosen: Tensor) -> Bags:
    """`flatten` where every bag of the batch has the same number of ids."""
    _, stride, length = values.shape
    num_bags = stride * len(chosen)
    bag = torch.arange(num_bags, dtype=torch.int32, device=values.device)
    reader = torch.arange(len(chosen), dtype=torch.int32, device=values.device)
    return Bags(
        ids=values.index_select(0, chosen).transpose(0, 1).reshape(-1).long(),
        reader=reader.repeat_interleave(length).repeat(stride),
        bag=bag.repeat_interleave(length) if length != 1 else bag,
        lengths=torch.full((num_bags,), length, device=values.device),
        weights=None,
    )


def _weights(features: KeyedJaggedTensor) -> Tensor:
    weights = features.weights_or_none()
    if weights is None:
        raise InputError("a weighted collection needs per-sample weights in its features")
    if weights.dtype != torch.float32 or weights.requires_grad:
        raise InputError(
            f"per-sample weights are data: fp32 without gradient, got {weights.dtype}, "
            f"requires_grad={weights.requires_grad}"
        )
    return weights


def check_ids(bags: Bags, readers: Sequence[Reader], tables: Sequence[TableConfig]) -> None:
    """Raise `InputError` for the first id outside its table."""
    rows = torch.tensor([tables[r.table].num_embeddings for r in readers], device=bags.ids.device)
    if native.ids_fit(bags.ids, bags.reader, rows):
        return
    bad = (bags.ids < 0) | (bags.ids >= rows.index_select(0, bags.reader))
    if not bool(bad.any()):
        return
    i = int(bad.nonzero()[0])
    reader = readers[int(bags.reader[i])]
    table = tables[reader.table]
    sample = bags.bag[i] // len(readers) if bags.sample is None else bags.sample[i]
    raise InputError(
        f"feature {reader.feature!r}, sample {int(sample)}: id {int(bags.ids[i])} is outside table "
        f"{table.name!r} ({table.num_embeddings} rows)"
    )
