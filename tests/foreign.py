"""Stand-ins for TorchRec's collections, with its attributes, its words and none of our types.

They are known as TorchRec's are: by the module and the name of the forward they run.
"""

import abc
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HOME = "torchrec.modules.embedding_modules"


class ForeignType(Enum):
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"


class ForeignPooling(Enum):
    SUM = "SUM"
    MEAN = "MEAN"


def foreign(name: str, **changes: Any) -> SimpleNamespace:
    """A configuration with TorchRec's attributes and none of our types."""
    fields: dict[str, Any] = {"num_embeddings": 8, "embedding_dim": 2, "feature_names": [name]}
    fields |= {"data_type": ForeignType.FP32, "weight_init_min": None, "weight_init_max": None}
    fields["pooling"] = ForeignPooling.SUM
    return SimpleNamespace(name=name, **fields | changes)


class Pooled:
    """What comes out of the bags."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def values(self) -> Tensor:
        return self._values


class Interface(abc.ABC, nn.Module):
    """TorchRec's collections derive from one: the layout of their objects depends on it."""


class ForeignBags(Interface):
    def __init__(self, *configs: SimpleNamespace, weighted: bool = False, device: Any = None):
        super().__init__()
        self._embedding_bag_configs, self._is_weighted = configs, weighted
        self.embedding_bags = nn.ModuleDict()
        for config in configs:
            self.embedding_bags[config.name] = nn.EmbeddingBag(
                config.num_embeddings,
                config.embedding_dim,
                mode=config.pooling.value.lower(),
                include_last_offset=True,
                device=device,
                dtype=torch.float16 if config.data_type is ForeignType.FP16 else None,
            )

    def embedding_bag_configs(self) -> list[SimpleNamespace]:
        return list(self._embedding_bag_configs)

    def is_weighted(self) -> bool:
        return self._is_weighted

    def forward(self, features: Any) -> Pooled:
        found = []
        for config, bag in zip(
            self._embedding_bag_configs, self.embedding_bags.values(), strict=True
        ):
            for name in config.feature_names:
                jagged = features[name]
                weights = jagged.weights_or_none() if self._is_weighted else None
                found.append(bag(jagged.values(), jagged.offsets(), weights))
        return Pooled(torch.cat(found, dim=1))


class ForeignSequences(Interface):
    def __init__(self, *configs: SimpleNamespace, need_indices: bool = False, device: Any = None):
        super().__init__()
        self._embedding_configs, self._need_indices = configs, need_indices
        self.embeddings = nn.ModuleDict(
            {
                c.name: nn.Embedding(c.num_embeddings, c.embedding_dim, device=device)
                for c in configs
            }
        )

    def embedding_configs(self) -> list[SimpleNamespace]:
        return list(self._embedding_configs)

    def need_indices(self) -> bool:
        return self._need_indices

    def forward(self, features: Any) -> Any:
        raise AssertionError("not run")


for _kind, _name in ((ForeignBags, "EmbeddingBag"), (ForeignSequences, "Embedding")):
    _kind.forward.__module__ = HOME
    _kind.forward.__qualname__ = f"{_name}Collection.forward"
