"""`torch.distributed.checkpoint` planners that know the boxes of a table.

DCP's are the write and read items and the intersection of saved boxes with wanted ones; ours is
which boxes there are. Import this module late: DCP takes a second to import.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rowmesh.runtime.boxes import Part, TableTensor, shard_rows
from rowmesh.train.checkpoint.document import DamagedError

__all__ = ["MAX_BOX_BYTES", "BoxLoadPlanner", "BoxSavePlanner"]

MAX_BOX_BYTES = 1 << 26  # a box of a table is cut along q into pieces of at most this size


class BoxSavePlanner(DefaultSavePlanner):
    """Writes every tensor it is given, and of a `TableTensor` the parts that are this rank's.

    Args:
        max_box_bytes: Where boxes are cut; what is loaded does not depend on it.
    """

    def __init__(self, *, max_box_bytes: int = MAX_BOX_BYTES) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._max_box_bytes = max_box_bytes
        self._views: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One write item a box."""
        items: list[WriteItem] = []
        for key, value in self.state_dict.items():
            if isinstance(value, TableTensor):
                for part in value.parts:
                    items += self._part_items(key, value, part) if part.is_written else ()
            elif value.numel():
                items.append(self._item(key, value, (0,) * value.dim(), tuple(value.shape)))
        self.plan = SavePlan(items)
        return self.plan

    def _part_items(self, key: str, table: TableTensor, part: Part) -> list[WriteItem]:
        items = []
        for shard in part.shards():
            box = part.box(shard)
            row_bytes = box[:1].numel() * box.element_size()
            step = max(1, self._max_box_bytes // max(1, row_bytes))
            for q in range(0, len(box), step):
                offsets = (q, shard, *table.columns(part)[:1])
                items.append(self._item(key, box[q : q + step], offsets, table.shape))
        return items

    def _item(
        self, key: str, view: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
    ) -> WriteItem:
        index = MetadataIndex(key, offsets)
        self._views[index] = view.detach()
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=view.shape)
        properties = TensorProperties(dtype=view.dtype)
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape))
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The view of an item's box."""
        return self._views[index]


class BoxLoadPlanner(DefaultLoadPlanner):
    """Reads every tensor it is given, and of a `TableTensor` exactly the parts of this rank.

    A box goes straight into its view. Where the checkpoint has another number of virtual shards
    than the plan, wanted boxes are those of the checkpoint with a row of this rank in them, and
    their rows are put where they belong, one box at a time.

    Raises:
        DamagedError: If the boxes of the checkpoint do not cover what is wanted.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take what to fill and what there is."""
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """One read item for every saved box and wanted box that overlap."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            if isinstance(value, TableTensor):
                items += self._table_items(key, value, saved)
            elif value.numel():
                whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
                items += _read_items(key, saved, whole)
        return LoadPlan(items)

    def _table_items(
        self, key: str, table: TableTensor, saved: TensorStorageMetadata
    ) -> list[ReadItem]:
        """Shard by shard: boxes of different virtual shards never overlap."""
        num_shards = saved.size[1]
        by_shard: dict[int, list[ChunkStorageMetadata]] = {}
        for chunk in saved.chunks:
            by_shard.setdefault(chunk.offsets[1], []).append(chunk)
        wanted = {
            (shard, table.columns(part))
            for part in table.parts
            for shard in _wanted_shards(table, part, num_shards)
        }
        items = []
        for shard, columns in sorted(wanted):
            size = (shard_rows(table.num_rows, num_shards, shard), 1, *columns[1:])
            box = ChunkStorageMetadata(torch.Size((0, shard, *columns[:1])), torch.Size(size))
            chunks = by_shard.get(shard, [])
            items += _read_items(
                key, TensorStorageMetadata(saved.properties, saved.size, chunks), box
            )
        return items

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where to read to: the box's view if one part takes it as it is, else fresh memory."""
        value = self.state_dict[read_item.dest_index.fqn]
        if isinstance(value, TableTensor):
            view = self._view(value, read_item)
            if view is None:
                return torch.empty(read_item.lengths, dtype=value.dtype)
        else:
            view = value.detach()
        for dim, (at, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, at, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Put the rows of fresh memory where they belong."""
        value = self.state_dict[read_item.dest_index.fqn]
        if isinstance(value, TableTensor) and self._view(value, read_item) is None:
            rows = self._rows(read_item)
            for part in _takers(value, read_item):
                part.put(rows, tensor.squeeze(1))

    def _view(self, table: TableTensor, item: ReadItem) -> Tensor | None:
        """The only part's view of the wanted box, if there is one."""
        shard = _offsets(item)[1]
        parts = [p for p in _takers(table, item) if shard in p.shards()]
        is_direct = self._num_shards(item) == table.num_shards and len(parts) == 1
        return parts[0].box(shard) if is_direct else None

    def _rows(self, item: ReadItem) -> NDArray[np.int64]:
        """Row q * S + j of every q the item reads, S the checkpoint's."""
        first = item.dest_offsets[0]
        q = np.arange(first, first + item.lengths[0], dtype=np.int64)
        return q * self._num_shards(item) + _offsets(item)[1]

    def _num_shards(self, item: ReadItem) -> int:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata[item.dest_index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        return saved.size[1]


def _offsets(item: ReadItem) -> torch.Size:
    """Of the wanted box."""
    assert item.dest_index.offset is not None
    return item.dest_index.offset


def _wanted_shards(table: TableTensor, part: Part, num_shards: int) -> list[int]:
    """Virtual shards, of ``num_shards``, with a row of ``part`` in them."""
    if num_shards == table.num_shards:
        return [j for j in part.shards() if j < table.num_rows]
    rows = part.homes.rows(part.owner)
    return [int(j) for j in np.unique(rows % num_shards)]


def _takers(table: TableTensor, item: ReadItem) -> list[Part]:
    """The parts with the columns of the wanted box."""
    first = _offsets(item)[2:]
    return [p for p in table.parts if table.dim is None or p.columns[0] == first[0]]


def _read_items(
    key: str, saved: TensorStorageMetadata, box: ChunkStorageMetadata
) -> list[ReadItem]:
    """What to read for one wanted box; together it covers the box."""
    items: list[Any] = create_read_items_for_chunk_list(key, saved, [box])
    if sum(math.prod(item.lengths) for item in items) != math.prod(box.sizes):
        raise DamagedError(
            f"the checkpoint lacks a part of {key!r}: the box at {list(box.offsets)} of size "
            f"{list(box.sizes)}"
        )
    return items
