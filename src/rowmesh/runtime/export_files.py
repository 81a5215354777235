"""`rm.export_safetensors`: the whole model in files that any library reads."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from rowmesh.comm.agreement import agree
from rowmesh.comm.status import sentence_of
from rowmesh.errors import InputError
from rowmesh.runtime.export import dense_tensors, gather_table
from rowmesh.runtime.regions import dense_state, mesh_of, named_tables
from rowmesh.runtime.tensor_files import INDEX_NAME, require_safetensors, write_tensors
from rowmesh.tables import BYTES_OF

__all__ = ["export_safetensors", "pack_files"]


def export_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, max_file_bytes: int = 1 << 30
) -> None:
    """Write `full_state_dict` as safetensors; rank 0 writes, and what it writes appears at once.

    A path that ends in ``.safetensors`` becomes one file, which replaces an older one; rank 0 then
    holds the whole model. Any other path becomes a folder of files with an index
    (``model.safetensors.index.json``); rank 0 then holds ``max_file_bytes`` or one table,
    whichever is more, because tables are gathered, written and dropped one file at a time.

    Args:
        model: Sharded or not.
        path: On rank 0's file system. A folder must not exist yet.
        max_file_bytes: Of a file in a folder; a larger table has a file of its own.

    Raises:
        InputError: On all ranks, if rank 0 cannot write there or lacks the safetensors library.

    Collective:
        All ranks, if the model is sharded.
    """
    mesh, path = mesh_of(model), Path(path)
    writes = mesh is None or mesh.rank == 0
    is_file = path.suffix == ".safetensors"
    agree(mesh, None, _complaint(model, path, is_file, max_file_bytes) if writes else None)
    sizes = {k: v.numel() * v.element_size() for k, v in dense_tensors(model).items()}
    for table in named_tables(model):
        config = table.config
        each = config.num_embeddings * config.embedding_dim * BYTES_OF[config.data_type]
        sizes |= dict.fromkeys(table.keys, each)
    files = [list(sizes)] if is_file else pack_files(sizes, max_file_bytes)
    complaint = None
    tensors = _tensors(model)
    try:
        if writes:
            _write(path, files, sizes, tensors, is_file=is_file)
    except OSError as error:
        complaint = InputError(f"cannot write {path}: {sentence_of(error)}")
    for _ in tensors:  # ranks that write nothing, or no longer, still take part in every gather
        pass
    agree(mesh, None, complaint)


def pack_files(sizes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Keys in their order, cut into files of at most so many bytes; a larger tensor goes alone."""
    files: list[list[str]] = []
    used = 0
    for key, size in sizes.items():
        if not files or used + size > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(key)
        used += size
    return files


def _complaint(
    model: nn.Module, path: Path, is_file: bool, max_file_bytes: int
) -> InputError | None:
    try:
        require_safetensors()
    except InputError as error:
        return error
    if max_file_bytes < 1:
        return InputError(f"max_file_bytes is {max_file_bytes}, but must be at least 1")
    if not path.parent.is_dir():
        return InputError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir() and is_file:
        return InputError(f"cannot write {path}: it is a folder")
    if path.exists() and not is_file:
        return InputError(f"{path} exists: remove it, or export to a new folder")
    empty = [k for k, v in dense_state(model).items() if isinstance(v, Tensor) and v.is_meta]
    if empty:
        return InputError(f"{empty[0]!r} has no values (device 'meta'): shard the model first")
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor of the state dict: the dense ones first, then table after table."""
    yield from dense_tensors(model).items()
    for table in named_tables(model):
        weight = gather_table(table)
        for key in table.keys:
            yield key, weight
        del weight  # before the next one comes


def _write(
    path: Path,
    files: list[list[str]],
    sizes: Mapping[str, int],
    tensors: Iterator[tuple[str, Tensor | None]],
    *,
    is_file: bool,
) -> None:
    if is_file:
        write_tensors({k: v for k, v in tensors if v is not None}, path)
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".rowmesh-") as scratch:
        folder = Path(scratch) / path.name
        folder.mkdir()
        weight_map: dict[str, str] = {}
        for number, keys in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            found = dict(next(tensors) for _ in keys)
            assert list(found) == keys
            write_tensors({k: v for k, v in found.items() if v is not None}, folder / name)
            del found
            weight_map |= dict.fromkeys(keys, name)
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        os.replace(folder, path)
