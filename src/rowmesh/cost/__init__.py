"""What a plan costs: bytes exactly, for given batches; expected bytes, from statistics."""

from rowmesh.cost.analytic import predict
from rowmesh.cost.expected import Expected, expect_dense, expect_table

__all__ = ["Expected", "expect_dense", "expect_table", "predict"]
