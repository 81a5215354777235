"""Plain embeddings of a model as collections of one table, where they stand.

An adopted module stays the object it was, at every path, with its hooks, attributes and state-dict
key. Only its class changes: to one of those below, which look ids up through an engine. Without a
mesh it does what it did, to torch's own code.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

# As in rowmesh.nn.collections.
from torch._compile import _disable_dynamo as left_out_of_graphs
from torch.nn import functional as F

from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn.bags import readers_of
from rowmesh.nn.collections import Collection, Engine, Tables
from rowmesh.nn.local import LocalEngine
from rowmesh.tables import EmbeddingConfig, TableConfig

__all__ = ["AdoptedEmbedding", "AdoptedEmbeddingBag", "WholeTable", "convert", "table_name"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config(EmbeddingConfig):
    """A table whose row ``zero_row``, if any, is zero at first."""

    zero_row: int | None = None


class WholeTable(Tensor):
    """All rows of a table on the mesh, looked up: to be read, and written by nobody.

    What is made of it is a plain tensor. Its methods that change it in place raise, and so do those
    of its ``data`` and of its parts. (A ``__torch_function__`` would see more ways, but
    ``torch.compile`` looks into one.)
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> "WholeTable":
        """The rows without gradient."""
        return Tensor.detach(self).as_subclass(WholeTable)

    def __getitem__(self, index: Any) -> "WholeTable":
        return Tensor.__getitem__(self, index).as_subclass(WholeTable)

    @property
    def data(self) -> "WholeTable":
        """The rows without gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse_change("data")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _refuse_change(name: str) -> None:
    raise InputError(
        f"{name} would change a copy of a sharded table, not the table: set its rows with "
        f"rm.load_pretrained or rm.load_full_state_dict, or before rm.shard"
    )


def _refuse_changes() -> None:
    names = [name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")]
    words = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
    for name in ["__setitem__", *names, *(f"__i{word}__" for word in words.split(" "))]:
        setattr(WholeTable, name, lambda *_, name=name, **__: _refuse_change(name))


_refuse_changes()


class _Taken(nn.Parameter):
    """A parameter whose rows are on the mesh, which somebody has kept."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "this parameter of an adopted embedding was kept from before rm.shard, which put its "
            "rows on the mesh: read the module's weight instead, and let rm.Optimizer step it"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "<a parameter that rm.shard put on the mesh>"


class _Held:
    """The one table of adopted modules, in the place of a `Table`."""

    def __init__(self, modules: Sequence["_Adopted"]) -> None:
        self._modules = modules

    @property
    def weight(self) -> nn.Parameter:
        """The parameter that all modules share."""
        found = [m._parameters["weight"] for m in self._modules]
        if any(weight is not found[0] for weight in found):
            raise InputError(
                f"modules that shared the weight of table {self._modules[0].configs()[0].name!r} "
                f"when they were adopted have different ones now: change weights before rm.adopt"
            )
        return cast(nn.Parameter, found[0])

    @weight.setter
    def weight(self, value: nn.Parameter) -> None:
        for module in self._modules:
            module._parameters["weight"] = value


class _OneTable(Mapping[str, _Held]):
    """What `Tables` is to a collection, for adopted modules."""

    def __init__(self, modules: Sequence["_Adopted"], name: str) -> None:
        self._modules, self._name = modules, name

    def __getitem__(self, name: str) -> _Held:
        if name not in list(self):
            raise KeyError(name)
        return _Held(self._modules)

    def __delitem__(self, name: str) -> None:
        weight = self[name].weight
        for module in self._modules:
            del module._parameters["weight"]
        weight.data = weight.data.new_empty(0)  # whoever kept it keeps no memory, and hears of it
        weight.grad = None
        weight.__class__ = _Taken

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weight, while it is here."""
        return iter([held.weight for held in self.values()])

    def __iter__(self) -> Iterator[str]:
        return iter([self._name] if "weight" in self._modules[0]._parameters else [])

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Adopted(Collection):
    """What adopted modules share: the table, the look-up, and ``weight``.

    ``tied`` are all modules of the table; the first of them is its collection.
    """

    pooled, _is_weighted, takes_batch, seed = False, False, False, 0
    tied: list["_Adopted"]
    engine: Engine

    def begin(self, tied: list["_Adopted"], config: TableConfig | None) -> None:
        """Become the collection of a table, or, without one, a reader of the first's."""
        self.tied = tied
        if config is not None:
            self._configs, self.readers = [config], readers_of([config])
            self.engine = LocalEngine(self)

    def configs(self) -> list[TableConfig]:
        """The table, of the weight's dtype; nothing if another module is its collection."""
        found: list[TableConfig] = vars(self).get("_configs", [])
        weight = self._parameters.get("weight")
        if found and weight is not None and weight.dtype != found[0].data_type:
            found[0] = replace(found[0], data_type=weight.dtype)  # the model was converted
        return list(found)

    embedding_configs = configs

    def table_modules(self) -> Tables:
        """The table by its name; empty once the model is sharded."""
        return cast(Tables, _OneTable(self.tied, self.tied[0]._configs[0].name))

    embeddings = property(table_modules)

    def give_tables(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Have this table, and look it up here."""
        ((_, weight),) = weights.items()
        _Held(self.tied).weight = weight
        self.engine = LocalEngine(self)

    def holders(self, name: str) -> Sequence[tuple[nn.Module, str]]:
        """All modules that share the weight, as before."""
        return [(module, "weight") for module in self.tied]

    def _is_plain(self) -> bool:
        """Whether torch's own code runs: no mesh, and no oracle that wants the gradients."""
        engine = self.tied[0].engine
        return isinstance(engine, LocalEngine) and engine.open_sink is None

    @left_out_of_graphs
    def _look_up(self, ids: Tensor) -> Tensor:
        """``[*ids.shape, columns]``.

        Collective:
            All ranks, and again in backward, where the model is sharded.
        """
        first = self.tied[0]
        (config,) = first.configs()
        stride = len(ids) if ids.dim() else 1
        lengths = torch.full((stride,), ids.numel() // max(stride, 1), device=ids.device)
        features = KeyedJaggedTensor([config.name], ids.reshape(-1), lengths=lengths, stride=stride)
        _, ((_, vectors),) = first.engine(features)
        return vectors.to(config.data_type).view(*ids.shape, config.embedding_dim)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not self._is_plain():
            device = self._some_device()
            rows = torch.arange(self.tied[0].configs()[0].num_embeddings, device=device)
            return self._look_up(rows).as_subclass(WholeTable)
        return super().__getattr__(name)

    def _some_device(self) -> torch.device:
        engine: Any = self.tied[0].engine
        mesh = getattr(engine, "mesh", None)
        return self._parameters["weight"].device if mesh is None else mesh.device  # type: ignore[union-attr]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "weight" not in self._parameters:
            raise InputError(
                "the weight of a sharded embedding cannot be replaced: set its rows with "
                "rm.load_pretrained or rm.load_full_state_dict, or before rm.shard"
            )
        super().__setattr__(name, value)


class AdoptedEmbedding(_Adopted, nn.Embedding):
    """An ``nn.Embedding`` whose rows may lie on many ranks."""

    @left_out_of_graphs
    def forward(self, input: Tensor) -> Tensor:
        """The rows of ids of any shape; what ``padding_idx`` gives takes no gradient."""
        if self._is_plain():
            return nn.Embedding.forward(self, input)
        vectors = self._look_up(input)
        if self.padding_idx is None:
            return vectors
        is_padding = (input == self.padding_idx).unsqueeze(-1)
        return torch.where(is_padding, vectors.detach(), vectors)


class AdoptedEmbeddingBag(_Adopted, nn.EmbeddingBag):
    """An ``nn.EmbeddingBag`` whose rows may lie on many ranks; they are pooled where they go."""

    @left_out_of_graphs
    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """As ``nn.EmbeddingBag``'s; ids that are ``padding_idx`` are not looked up."""
        if self._is_plain():
            return nn.EmbeddingBag.forward(self, input, offsets, per_sample_weights)
        chosen, padding = input.reshape(-1), self.padding_idx
        number = torch.arange(chosen.numel(), device=input.device)
        if padding is not None:
            keep = chosen != padding
            chosen = chosen[keep]
            number = torch.where(keep, keep.cumsum(0) - 1, chosen.numel())
        vectors = self._look_up(chosen)
        # One row more: there is a table to read where there are no ids, and one for padding.
        rows = torch.cat([vectors, vectors.new_zeros((1, vectors.shape[1]))])
        return F.embedding_bag(
            number.view(input.shape),
            rows,
            None if offsets is None else offsets.long(),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=None if padding is None else chosen.numel(),
        )


def _adopted(kind: type[nn.Module]) -> type[_Adopted]:
    """The class that a module of ``kind`` gets; of a subclass's own methods nothing is lost."""
    base = AdoptedEmbedding if issubclass(kind, nn.Embedding) else AdoptedEmbeddingBag
    if kind in (nn.Embedding, nn.EmbeddingBag):
        return base

    def reduce(self: nn.Module, protocol: Any) -> Any:  # the class has no name to be pickled by
        return _blank, (kind,), dict(vars(self))

    own = {"__module__": kind.__module__, "__reduce_ex__": reduce}
    return type(kind.__name__, (base, kind), own)


def _blank(kind: type[nn.Module]) -> nn.Module:
    found = _adopted(kind)
    return found.__new__(found)


def table_name(path: str, taken: set[str]) -> str:
    """The name of the table at ``path``: it may be part of a file's name, and none has it."""
    name = stem = re.sub(r"\W", "_", path) or "embedding"
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    return name


def convert(modules: Sequence[nn.Module], name: str) -> None:
    """Make modules that share one weight readers of table ``name``, in place."""
    weight = modules[0]._parameters["weight"]
    assert weight is not None
    paddings = [m.padding_idx for m in modules if isinstance(m.padding_idx, int)]
    config = _Config(
        name=name,
        num_embeddings=weight.shape[0],
        embedding_dim=weight.shape[1],
        feature_names=[name],
        data_type=weight.dtype,
        zero_row=paddings[0] if paddings else None,
    )
    for module in modules:
        module.__class__ = _adopted(type(module))
    tied = cast("list[_Adopted]", list(modules))
    for module in tied:
        module.begin(tied, config if module is tied[0] else None)
