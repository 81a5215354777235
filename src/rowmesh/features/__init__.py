"""Jagged features: ids per sample and feature, and the pooled vectors that come back.

Names, arguments and results follow TorchRec's sparse tensors, so that a model written for one
reads the other; what is refused where TorchRec goes on says so.
"""

from rowmesh.features.batch import Batch
from rowmesh.features.empty import another_like, empty_like
from rowmesh.features.jagged import JaggedTensor
from rowmesh.features.keyed import KeyedJaggedTensor
from rowmesh.features.vectors import KeyedTensor

__all__ = [
    "Batch",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "another_like",
    "empty_like",
]
