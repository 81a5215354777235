"""Recommendation models as single-device code; `rowmesh.shard` distributes them in place."""

from rowmesh.models.dcn import DCN, CrossNet
from rowmesh.models.din import DIN
from rowmesh.models.dlrm import DLRM
from rowmesh.models.layers import MLP, PairwiseDots, seed_dense

__all__ = ["DCN", "DIN", "DLRM", "MLP", "CrossNet", "PairwiseDots", "seed_dense"]
