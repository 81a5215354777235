"""The bytes of a checkpoint: boxes in files, written, found again and checked.

Boxes are plain elements; nothing is pickled, and nothing read is ever unpickled. Import this
module late: DCP takes a second to import.
"""

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from rowmesh.errors import InputError, shown
from rowmesh.train.checkpoint.document import (
    DTYPES,
    DamagedError,
    StoredChunk,
    is_shape,
    read_document,
)

__all__ = ["BoxReader", "write_boxes"]


def write_boxes(path: Path, plan: SavePlan, planner: SavePlanner) -> list[tuple[str, StoredChunk]]:
    """Write the items of ``plan`` into one new file, one after the other, and fsync it.

    Returns:
        Key and place of every item.
    """
    written = []
    with path.open("wb") as stream:
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            assert item.index.offset is not None
            data = _bytes_of(tensor).numpy().data
            chunk = StoredChunk(
                offsets=tuple(item.index.offset),
                sizes=tuple(tensor.shape),
                file=path.name,
                at=stream.tell(),
                crc32=zlib.crc32(data),
            )
            stream.write(data)
            written.append((item.index.fqn, chunk))
        stream.flush()
        os.fsync(stream.fileno())
    return written


def _bytes_of(tensor: Tensor) -> Tensor:
    """The elements in row-major order in host memory, as bytes."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


class BoxReader(FileSystemReader):
    """A DCP storage reader of one complete checkpoint folder.

    Reads metadata.json in place of DCP's pickled ``.metadata``, and plain bytes in place of
    ``torch.load``. It also serves plain ``torch.distributed.checkpoint.load``.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds, as DCP says it.

        Raises:
            DamagedError: If metadata.json is missing or damaged.
            InputError: If it is of another version, or not as this version writes it.
        """
        document = read_document(Path(self.path))
        tensors: dict[str, Any] = {}
        storage: dict[MetadataIndex, StoredChunk] = {}
        try:
            for key, entry in document["tensors"].items():
                chunks = [_chunk(entry["shape"], c, document["files"]) for c in entry["chunks"]]
                boxes = [
                    ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks
                ]
                properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
                size = torch.Size(entry["shape"])
                tensors[key] = TensorStorageMetadata(properties, size, boxes)
                storage |= {MetadataIndex(key, c.offsets): c for c in chunks}
        except (LookupError, TypeError, ValueError) as error:
            raise InputError(f"{self.path}: a tensor is described wrongly: {error!r}") from None
        return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())

    def check(self, plan: LoadPlan | None = None) -> None:
        """Compare the bytes that ``plan`` reads (default: all) with their checksums.

        Raises:
            DamagedError: Names the file, the tensor and the byte.
        """
        indices = self.storage_data if plan is None else {i.storage_index for i in plan.items}
        for _ in self._chunks(indices):
            pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read the items of ``plan``, each box once, one box at a time; raises as `check` does."""
        wanted: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index, data in self._chunks(wanted):
            chunk = self.storage_data[index]
            box = data.view(self._dtype(index)).view(chunk.sizes)
            for item in wanted[index]:
                part = box
                for dim, (at, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, at, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take what `read_metadata` found."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._tensors = metadata.state_dict_metadata

    def _dtype(self, index: MetadataIndex) -> torch.dtype:
        described = self._tensors[index.fqn]
        assert isinstance(described, TensorStorageMetadata)
        return described.properties.dtype

    def _chunks(self, indices: Iterable[MetadataIndex]) -> Iterator[tuple[MetadataIndex, Tensor]]:
        """The checked bytes of every chunk, file by file in their order there."""
        by_file: dict[str, list[MetadataIndex]] = {}
        for index in indices:
            by_file.setdefault(self.storage_data[index].file, []).append(index)
        for name, members in sorted(by_file.items()):
            path = Path(self.path) / name
            places = {self.storage_data[index].at: index for index in members}
            try:
                with path.open("rb") as stream:
                    for _, index in sorted(places.items()):
                        yield index, self._read(stream, path, index)
            except FileNotFoundError:
                raise DamagedError(f"{path} is missing") from None

    def _read(self, stream: Any, path: Path, index: MetadataIndex) -> Tensor:
        chunk: StoredChunk = self.storage_data[index]
        num_bytes = torch.Size(chunk.sizes).numel() * self._dtype(index).itemsize
        where = f"{path} is damaged: the box of {index.fqn!r} at byte {chunk.at}"
        left = max(os.fstat(stream.fileno()).st_size - chunk.at, 0)
        if left < num_bytes:  # before memory is asked for
            raise DamagedError(f"{where} has {left} of its {num_bytes} bytes")
        data = torch.empty(num_bytes, dtype=torch.uint8)
        stream.seek(chunk.at)
        if (found := stream.readinto(data.numpy().data)) != num_bytes:
            raise DamagedError(f"{where} has {found} of its {num_bytes} bytes")
        if zlib.crc32(data.numpy().data) != chunk.crc32:
            raise DamagedError(f"{where} has another checksum than when it was written")
        return data


def _chunk(shape: list[int], values: list[Any], files: list[str]) -> StoredChunk:
    """One chunk as metadata.json lists it: inside its tensor, in a file of this folder."""
    offsets, sizes, number, at, crc32 = values
    if not (
        is_shape(offsets) and is_shape(sizes) and all(map(is_shape, ([number], [at], [crc32])))
    ):
        raise ValueError(f"chunk {shown(values)} is not of numbers")
    for first, size, limit in zip(offsets, sizes, shape, strict=True):
        if not (first >= 0 and size >= 1 and first + size <= limit):
            raise ValueError(f"chunk {values} is outside {shape}")
    return StoredChunk(
        offsets=tuple(offsets), sizes=tuple(sizes), file=files[number], at=at, crc32=crc32
    )
