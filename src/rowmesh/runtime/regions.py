"""The tables of a model under their state-dict keys, and where a sharded table's rows lie."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.mesh import Mesh
from rowmesh.nn.collections import Collection
from rowmesh.runtime.embeddings import ShardedEngine, sharded_engines
from rowmesh.runtime.places import Region
from rowmesh.runtime.tickets import Stack
from rowmesh.tables import TableConfig, named_collections, tables_of, uncompiled

__all__ = [
    "DenseState",
    "NamedTable",
    "Place",
    "dense_state",
    "holders",
    "mesh_of",
    "named_tables",
    "places_of",
    "put_region",
    "send_bytes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTable:
    """A table of a model.

    Args:
        keys: Its state-dict keys: one for every path that leads to it.
        collection: Ours, or a foreign one of an unsharded model.
        index: Of the table in the collection.
        config: Of the table.
    """

    keys: tuple[str, ...]
    collection: Any
    index: int
    config: TableConfig

    @property
    def engine(self) -> ShardedEngine | None:
        """None while the model is not sharded."""
        engine = getattr(self.collection, "engine", None)
        return engine if isinstance(engine, ShardedEngine) else None

    @property
    def local(self) -> Any:
        """The table's own module, in an unsharded model."""
        return tables_of(self.collection)[self.config.name]


def named_tables(model: nn.Module) -> list[NamedTable]:
    """Every table once, in the model's order, also of foreign collections."""
    paths: dict[int, list[str]] = {}
    for path, module in uncompiled(model).named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    found = []
    for _, collection, configs in named_collections(model):
        for index, config in enumerate(configs):
            found_at = holders(collection, config.name)
            keys = [p + key for holder, key in found_at for p in paths.get(id(holder), [])]
            found.append(
                NamedTable(keys=tuple(keys), collection=collection, index=index, config=config)
            )
    return found


def holders(collection: Any, name: str) -> Sequence[tuple[nn.Module, str]]:
    """The modules whose state dicts have a table, and its key there; also of a foreign one."""
    if isinstance(collection, Collection):
        return collection.holders(name)
    attribute = "embedding_bags" if hasattr(collection, "embedding_bags") else "embeddings"
    return [(collection, f"{attribute}.{name}.weight")]


class DenseState(OrderedDict[str, Any]):
    """A state dict that is to have no tables: nothing is missing in it."""


def dense_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model, without the tables if it is sharded."""
    found: dict[str, Any] = uncompiled(model).state_dict(destination=DenseState())
    return found


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh of a sharded model; None for an unsharded one, which every rank has whole."""
    engines = sharded_engines(model)
    return engines[0].mesh if engines else None


@dataclass(frozen=True, slots=True)
class Place:
    """A region of a table, and the stack it lies in."""

    stack: Stack
    region: Region
    is_copied: bool

    def is_on(self, rank: int) -> bool:
        """Whether ``rank`` holds it."""
        return self.is_copied or rank in self.region.replicas

    def of(self, tensor: Tensor) -> Tensor:
        """The region's rows of one of the stack's tensors, on a rank that holds it."""
        return tensor[self.region.start : self.region.start + self.region.num_rows]

    @property
    def weight(self) -> Tensor:
        """The region's rows of the table, on a rank that holds it."""
        return self.of(self.stack.copies if self.is_copied else self.stack.home)


def places_of(engine: ShardedEngine, table: int) -> Iterator[Place]:
    """Every region of a table in the same order on all ranks; copies after the rows they copy."""
    for stack in engine.stacks:
        for regions, is_copied in ((stack.layout.home, False), (stack.layout.copied, True)):
            for region in regions:
                if region.table == table:
                    yield Place(stack, region, is_copied)


def put_region(whole: Tensor, region: Region, part: Tensor) -> None:
    """Put a region's part where it belongs in the whole table, or in a tensor of its row state.

    A ``[rows, columns]`` tensor takes the part at the region's rows and columns. A ``[rows]``
    tensor is the same for every column piece and takes the part at its rows.
    """
    rows = torch.from_numpy(region.rows()).to(whole.device)
    first, last = region.columns
    target = whole if whole.dim() == 1 else whole[:, first:last]
    target.index_copy_(0, rows, part)


def send_bytes(
    engine: ShardedEngine,
    tensor: Tensor,
    *,
    source: int,
    targets: list[int],
    edge: str = "checkpoint",
) -> None:
    """Fill ``tensor``, contiguous, on the ranks ``targets`` with its values on ``source``.

    Collective:
        All ranks, which must count the same messages; only ``source`` and ``targets`` take part.
    """
    mesh = engine.mesh
    engine.num_exports += 1
    data = tensor.reshape(-1).view(torch.uint8)
    is_target = mesh.rank in targets and mesh.rank != source
    sends = [(p, data) for p in targets if p != source] if mesh.rank == source else ()
    handle = engine.exports.post(
        engine.num_exports,
        sends=sends,
        receives=[(source, data)] if is_target else (),
        edge=edge,
    )
    handle.wait()
