"""Single-device embedding collections: what a user writes, and the reference of the oracle."""

from rowmesh.nn.collections import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]
