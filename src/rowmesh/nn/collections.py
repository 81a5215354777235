"""Embedding collections for one device: one lookup for all tables of a dim and dtype.

`rowmesh.shard` swaps the engine behind ``forward``; the module the user wrote stays.
`torch.compile` leaves ``forward`` out of its graphs: sizes follow from the ids, and a sharded one
talks to other ranks (docs/compile.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# torch.compiler.disable, which does not import the compiler before it is needed.
from torch._compile import _disable_dynamo as left_out_of_graphs

from rowmesh.errors import InputError
from rowmesh.features import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rowmesh.nn.bags import Reader, readers_of
from rowmesh.nn.init import fill_table
from rowmesh.nn.local import LocalEngine
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig, PoolingType, TableConfig

__all__ = ["Collection", "EmbeddingBagCollection", "EmbeddingCollection", "Engine", "Piece"]

Piece = tuple[Sequence[int], Tensor]
"""Readers (indices into the collection's) and their vectors, one per bag, before any mean."""


class Engine(Protocol):
    """What stands behind a collection's forward: local tables, or shards on a mesh."""

    @property
    def device(self) -> torch.device:
        """Where the rows are."""

    def __call__(self, features: Any) -> tuple[KeyedJaggedTensor, list[Piece]]:
        """The checked features, and the vectors of every reader."""


class Table(nn.Module):
    """One table; its ``weight`` is a view of the stack it shares with tables of its dim."""

    def __init__(self, config: TableConfig, *, device: torch.device) -> None:
        super().__init__()
        shape = (config.num_embeddings, config.embedding_dim)
        self.config = config
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.data_type, device=device))

    def extra_repr(self) -> str:
        """Rows and columns."""
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}"


class Tables(nn.Module):
    """Tables by name. Unlike ``nn.ModuleDict`` it takes any name, ``items`` and ``keys`` too."""

    def __init__(self, tables: dict[str, Table]) -> None:
        super().__init__()
        self._modules.update(tables)

    def __getitem__(self, name: str) -> Table:
        table = self._modules[name]
        assert isinstance(table, Table)
        return table

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def keys(self) -> list[str]:
        """Names, in the order of the collection."""
        return list(self._modules)

    def values(self) -> list[Table]:
        """Tables, in the same order."""
        return [self[name] for name in self]

    def items(self) -> list[tuple[str, Table]]:
        """Both."""
        return [(name, self[name]) for name in self]


class Collection(nn.Module):
    """What bags and sequences share: tables, their initial values, and the engine.

    ``takes_batch`` says that a forward is given the features of the batch, so that their stride
    is its number of samples and they are known before the model runs.
    """

    pooled: bool
    takes_batch = True

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        device: torch.device | str | None,
        is_weighted: bool,
        seed: int,
    ) -> None:
        super().__init__()
        names = [t.name for t in tables]
        if not tables or len(set(names)) != len(names):
            raise InputError(f"a collection needs tables of different names, got {names}")
        if any(not t.feature_names for t in tables):
            raise InputError("every table needs at least one feature that reads it")
        device = torch.device("cpu" if device is None else device)
        self.seed, self._is_weighted = seed, is_weighted
        self._configs = list(tables)
        self.readers: list[Reader] = readers_of(tables)
        modules = Tables({t.name: Table(t, device=device) for t in tables})
        self.add_module(self.table_attribute, modules)
        for config in tables if device.type != "meta" else ():
            fill_table(modules[config.name].weight.detach(), config, seed=seed)
        self.engine: Engine = LocalEngine(self)

    @property
    def table_attribute(self) -> str:
        """TorchRec's name for the dict of tables, so that state-dict keys agree."""
        return "embedding_bags" if self.pooled else "embeddings"

    def table_modules(self) -> Tables:
        """The tables by name; empty once the collection is sharded."""
        modules = getattr(self, self.table_attribute)
        assert isinstance(modules, Tables)
        return modules

    def give_tables(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Have these tables, and look them up here."""
        tables = {c.name: Table(c, device=torch.device("meta")) for c in self._configs}
        for name, table in tables.items():
            table.weight = weights[name]
        self.add_module(self.table_attribute, Tables(tables))
        self.engine = LocalEngine(self)

    def holders(self, name: str) -> Sequence[tuple[nn.Module, str]]:
        """The modules whose state dicts have a table, and its key there."""
        return [(self, f"{self.table_attribute}.{name}.weight")]

    def configs(self) -> list[TableConfig]:
        """The tables, in the order given."""
        return list(self._configs)

    def is_weighted(self) -> bool:
        """Whether features carry a weight per id."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables are; of a sharded collection, its mesh's device."""
        return self.engine.device

    def embedding_names_by_table(self) -> list[list[str]]:
        """What the outputs of each table are called."""
        return [
            [reader.name for reader in self.readers if reader.table == t]
            for t in range(len(self._configs))
        ]


class EmbeddingBagCollection(Collection):
    """Pooled embeddings of several features, TorchRec's surface.

    A bag's vector is the sum of its rows (times their weights), added in the order of the ids;
    for mean pooling it is divided once by the bag's length. Empty bags give zeros. Gradients of
    the tables are sparse, coalesced, added in sample order.

    Args:
        tables: Their configurations.
        device: ``"meta"`` builds without memory; `rowmesh.shard` then makes each rank's rows.
        is_weighted: Features carry a weight per id (sum pooling only).
        seed: Of the initial values.
    """

    pooled = True

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        device: torch.device | str | None = None,
        is_weighted: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(tables, device=device, is_weighted=is_weighted, seed=seed)
        self._poolings = [t.pooling for t in tables]
        if is_weighted and PoolingType.MEAN in self._poolings:
            raise InputError("per-sample weights go with sum pooling: a table asks for the mean")

    def embedding_bag_configs(self) -> list[TableConfig]:
        """The tables."""
        return self.configs()

    @left_out_of_graphs
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """``[B, columns]`` of every reader, in the order of the tables and their features."""
        features, pieces = self.engine(features)
        stride = features.stride()
        names = [r.name for r in self.readers]
        dims = [self._configs[r.table].embedding_dim for r in self.readers]
        pieces = [
            (r, self._mean(features, r, v).view(stride, len(r) * v.shape[1])) for r, v in pieces
        ]
        if len(pieces) == 1:
            return KeyedTensor(names, dims, pieces[0][1])
        blocks: dict[int, Tensor] = {}
        for members, vectors in pieces:
            blocks |= zip(members, vectors.split([dims[r] for r in members], dim=1), strict=True)
        return KeyedTensor(names, dims, torch.cat([blocks[r] for r in range(len(dims))], dim=1))

    def _mean(self, features: KeyedJaggedTensor, members: Sequence[int], sums: Tensor) -> Tensor:
        """Divide the bags of mean readers by their full length; the others by one."""
        means = [self._poolings[self.readers[r].table] is PoolingType.MEAN for r in members]
        if not any(means):
            return sums
        keys = features.index_per_key()
        chosen = [keys[self.readers[r].feature] for r in members]
        lengths = features.lengths().view(len(features.keys()), features.stride())[chosen].t()
        mask = torch.tensor(means, device=sums.device)
        divisor = torch.where(mask, lengths.clamp(min=1), 1).reshape(-1, 1)
        return sums / divisor.to(sums.dtype)


class EmbeddingCollection(Collection):
    """Embeddings of sequences: one vector per id, TorchRec's surface.

    Args:
        tables: Their configurations.
        device: As for `EmbeddingBagCollection`.
        need_indices: Give the ids of a sequence as the weights of its vectors.
        seed: Of the initial values.
    """

    pooled = False

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        device: torch.device | str | None = None,
        need_indices: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(tables, device=device, is_weighted=False, seed=seed)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[TableConfig]:
        """The tables."""
        return self.configs()

    def embedding_dim(self) -> int:
        """Columns of the tables, if all have as many.

        Raises:
            InputError: If they differ.
        """
        dims = {config.embedding_dim for config in self._configs}
        if len(dims) > 1:
            raise InputError(f"tables have {sorted(dims)} columns: ask embedding_configs()")
        return dims.pop()

    def need_indices(self) -> bool:
        """Whether vectors come with their ids."""
        return self._need_indices

    @left_out_of_graphs
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """A `JaggedTensor` of vectors for every reader, with the lengths of its feature."""
        features, pieces = self.engine(features)
        keys = features.index_per_key()
        lengths = features.lengths().view(len(features.keys()), features.stride())
        totals = lengths.sum(1).tolist()
        ids = features.values().split(totals) if self._need_indices else [None] * len(totals)
        found: dict[int, JaggedTensor] = {}
        for members, vectors in pieces:
            rows = [keys[self.readers[r].feature] for r in members]
            # split's parts are views that a model may not change in place; whole no one reads it
            parts = torch.unsafe_split_with_sizes(vectors, [totals[k] for k in rows])
            for r, k, part in zip(members, rows, parts, strict=True):
                found[r] = JaggedTensor(part, lengths=lengths[k], weights=ids[k])
        return {reader.name: found[r] for r, reader in enumerate(self.readers)}
