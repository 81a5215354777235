"""`rm.load_full_state_dict` and `rm.load_pretrained`: whole tensors into a model."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowmesh.comm.agreement import agree
from rowmesh.errors import InputError, did_you_mean
from rowmesh.runtime.alike import sample_digest
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.export import dense_tensors
from rowmesh.runtime.fit import Fit, Rename, fit_tensors, named_tensors, plain_tensor
from rowmesh.runtime.importing import Ints, set_rows
from rowmesh.runtime.regions import NamedTable, mesh_of, named_tables, send_bytes
from rowmesh.runtime.tensor_files import open_array, open_tensors

__all__ = ["load_full_state_dict", "load_pretrained"]

Path = str | os.PathLike[str]


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | Path | None,
    *,
    strict: bool = True,
    convert: bool = False,
    rename: Rename | None = None,
) -> Fit:
    """Load plain whole tensors into a model, sharded under any plan or not sharded.

    The inverse of `full_state_dict`, to the bit. Only values are set: optimiser state and the
    plan stay as they are. Nothing changes if anything does not fit.

    Args:
        model: Tables on ``meta`` get memory, on the device of their values.
        state_dict: Tensors by key, of which rank 0's count (other ranks may pass None); or a file
            or folder that every rank can read, each just its rows: what `export_safetensors` or
            ``torch.save`` wrote. Keys are TorchRec's; a table's name alone will do. Values are
            plain tensors, modules with a ``weight`` such as ``nn.EmbeddingBag``, or their state
            dicts.
        strict: Every key of the model must be given, and no other.
        convert: Round other floating dtypes to the model's, which otherwise must agree.
        rename: From a given key to the model's: a function, or a mapping of prefixes to what
            replaces them, the longest that matches first.

    Returns:
        The keys loaded, missing and unexpected; the same on all ranks.

    Raises:
        InputError: On all ranks, before anything changes, naming the keys that do not fit.

    Collective:
        All ranks, if the model is sharded.
    """
    mesh, tables = mesh_of(model), named_tables(model)
    is_file = isinstance(state_dict, str | os.PathLike)
    targets = dense_tensors(model) | {k: _blank(t) for t in tables for k in t.keys}
    found: dict[str, Tensor] = {}
    fit, complaint = None, None
    digests: dict[str, str] = {}
    if is_file or mesh is None or mesh.rank == 0:
        try:
            given = _given(state_dict)
            found = named_tensors(given, targets=targets, tables=tables, rename=rename)
            fit = fit_tensors(found, targets, strict=strict, convert=convert)
            _check_memory(model, fit)
            if is_file and mesh is not None and mesh.world > 1:
                digests = {key: sample_digest(found[key]) for key in fit.loaded if key in found}
        except InputError as error:
            complaint = error
    notes = agree(mesh, (is_file, fit, digests), complaint)
    fit = notes[0][1]
    assert fit is not None
    if any(kind != notes[0][0] or (kind and theirs != fit) for kind, theirs, _ in notes):
        raise InputError("all ranks must load the same file, or tensors that rank 0 has")
    _check_alike([theirs for _, _, theirs in notes])
    _set_dense(model, found, fit, spread=not is_file)
    for table in tables:
        key = next((k for k in table.keys if k in fit.loaded), None)
        if key is not None:
            count = table.config.num_embeddings
            set_rows(table, found.get(key), None, count=count, spread=not is_file)
    return fit


def _check_alike(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise if what ranks have read is not from one file.

    Args:
        digests: Of every rank, by key.
    """
    for rank, theirs in enumerate(digests):
        for key, digest in theirs.items():
            if digest != digests[0][key]:
                raise InputError(
                    f"all ranks must load the same file, but {key!r} on rank {rank} has other "
                    f"values than on rank 0: copy rank 0's file, or give rank 0's tensors"
                )


def _given(state_dict: Any) -> Mapping[str, Any]:
    if isinstance(state_dict, str | os.PathLike):
        return open_tensors(state_dict)
    if isinstance(state_dict, Mapping):
        return state_dict
    raise InputError(
        f"the state dict is a {type(state_dict).__name__}: give tensors by key, or a file's path"
    )


def _blank(table: NamedTable) -> Tensor:
    """The table's shape and dtype."""
    config = table.config
    shape = (config.num_embeddings, config.embedding_dim)
    dtype = config.data_type if table.engine is not None else table.local.weight.dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def _check_memory(model: nn.Module, fit: Fit) -> None:
    for key, tensor in dense_tensors(model).items():
        if tensor.is_meta and key in fit.loaded:
            raise InputError(f"{key!r} of the model has no memory (device 'meta'): make it on one")


@torch.no_grad()
def _set_dense(model: nn.Module, found: Mapping[str, Tensor], fit: Fit, *, spread: bool) -> None:
    engines = sharded_engines(model)
    for key, tensor in dense_tensors(model).items():
        if key not in fit.loaded:
            continue
        if key in found:
            tensor.copy_(found[key])
        if engines and spread:
            data = tensor.to(engines[0].mesh.device).contiguous()
            everyone = list(range(engines[0].mesh.world))
            send_bytes(engines[0], data, source=0, targets=everyone)
            tensor.copy_(data)


def load_pretrained(
    model: nn.Module,
    table: str,
    vectors: Any,
    *,
    rows: Sequence[int] | Tensor | Ints | None = None,
    trainable: bool | None = None,
) -> None:
    """Set rows of one table to given vectors, rounded to the table's dtype.

    Rows that are not given keep their values; of a table on ``meta`` they get their initial ones.

    Args:
        model: Sharded or not.
        table: Name of the table.
        vectors: ``[n, columns]`` as a tensor, an array or a module with a ``weight``, of which
            rank 0's count (other ranks may pass None); or a ``.npy`` or ``.safetensors`` file
            that every rank can read, each just its rows.
        rows: ``[n]`` distinct ids the vectors belong to; default 0 .. n - 1. Rank 0's count.
        trainable: Let training change the table, or freeze it; default as it is. A plan depends
            on it, so a sharded model cannot change it any more.

    Raises:
        InputError: On all ranks, before anything changes.

    Collective:
        All ranks, if the model is sharded.
    """
    mesh, tables = mesh_of(model), {t.config.name: t for t in named_tables(model)}
    is_file = isinstance(vectors, str | os.PathLike)
    is_first = mesh is None or mesh.rank == 0
    values, ids, complaint = None, None, None
    try:
        if table not in tables:
            raise InputError(f"the model has no table {table!r}{did_you_mean(table, tables)}")
        _check_trainable(tables[table], trainable)
        if is_file or is_first:
            values = _vectors(vectors, tables[table])
        if is_first:
            assert values is not None
            ids = _ids(rows, values, tables[table])
    except InputError as error:
        complaint = error
    count = None if values is None else len(values)
    digest = {table: sample_digest(values)} if is_file and values is not None else {}
    notes = agree(mesh, (is_file, count, ids, digest), complaint)
    _, count, ids, _ = notes[0]
    if any(kind != notes[0][0] or (kind and n != count) for kind, n, *_ in notes):
        raise InputError("all ranks must load the same file, or vectors that rank 0 has")
    _check_alike([theirs for *_, theirs in notes])
    assert count is not None
    set_rows(tables[table], values, ids, count=count, spread=not is_file)
    if trainable is not None and tables[table].engine is None:
        tables[table].local.weight.requires_grad_(trainable)


def _check_trainable(table: NamedTable, trainable: bool | None) -> None:
    if trainable is None or table.engine is None:
        return
    layouts = [s.layout for s in table.engine.stacks if table.index in s.layout.tables]
    if layouts[0].trainable != trainable:
        word = "trainable" if layouts[0].trainable else "frozen"
        raise InputError(
            f"table {table.config.name!r} was sharded {word}: call load_pretrained with "
            f"trainable={trainable} before make_plan and shard"
        )


def _vectors(vectors: Any, table: NamedTable) -> Tensor:
    name, dim = table.config.name, table.config.embedding_dim
    if isinstance(vectors, str | os.PathLike):
        vectors = open_array(vectors, name=name)
    elif isinstance(vectors, np.ndarray) and vectors.dtype.kind == "f":
        vectors = torch.from_numpy(np.require(vectors, requirements="W"))
    found = plain_tensor(vectors, f"the vectors of table {name!r}")
    if found.dim() != 2 or found.shape[1] != dim or not found.is_floating_point():
        raise InputError(
            f"the vectors of table {name!r} are {list(found.shape)} of {found.dtype}, but must be "
            f"[n, {dim}] of a floating dtype"
        )
    return found


def _ids(rows: Any, values: Tensor, table: NamedTable) -> Ints | None:
    name, limit = table.config.name, table.config.num_embeddings
    if rows is None:
        if len(values) > limit:
            raise InputError(f"{len(values)} vectors for table {name!r} of {limit} rows")
        return None
    ids = rows.cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    is_integer = ids.dtype.kind in "iu" or ids.size == 0  # an empty list has no dtype of its own
    if ids.ndim != 1 or not is_integer or len(ids) != len(values):
        raise InputError(
            f"rows of table {name!r} are {list(ids.shape)} of {ids.dtype}, but must be "
            f"[{len(values)}] integers, one for each vector"
        )
    ids = ids.astype(np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(f"row {wrong} is outside table {name!r} ({limit} rows)")
    if len(np.unique(ids)) != len(ids):
        repeated = np.sort(ids)[:-1][np.diff(np.sort(ids)) == 0][0]
        raise InputError(f"row {repeated} of table {name!r} is given twice")
    return ids
