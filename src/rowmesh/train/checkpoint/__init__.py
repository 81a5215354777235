"""Checkpoints that load under any plan and number of ranks (docs/checkpoints.md)."""

from rowmesh.train.checkpoint.checkpoints import Checkpoints, Loaded

__all__ = ["Checkpoints", "Loaded"]
