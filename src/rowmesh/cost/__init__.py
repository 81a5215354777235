"""What a plan costs: exact bytes of given batches; expected bytes and seconds from statistics."""

from rowmesh.cost.analytic import predict
from rowmesh.cost.expected import expect_dense, expect_plan, expect_table
from rowmesh.cost.load import Load
from rowmesh.cost.seconds import Rates, step_seconds

__all__ = [
    "Load",
    "Rates",
    "expect_dense",
    "expect_plan",
    "expect_table",
    "predict",
    "step_seconds",
]
