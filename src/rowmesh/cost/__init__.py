"""What a plan costs: exact bytes of given batches; expected bytes and seconds from statistics."""

from rowmesh.cost.analytic import predict
from rowmesh.cost.buckets import bucket_sizes, expect_dense
from rowmesh.cost.calibration import Calibration, load_calibration, save_calibration
from rowmesh.cost.expected import expect_hot, expect_table
from rowmesh.cost.load import Load, imbalance
from rowmesh.cost.rates import DenseCost, Rates, RowCost
from rowmesh.cost.seconds import StepTime, plan_time, step_seconds, step_time
from rowmesh.cost.sync import expect_table_sync
from rowmesh.cost.totals import expect_plan, expect_sync, expect_tables

__all__ = [
    "Calibration",
    "DenseCost",
    "Load",
    "Rates",
    "RowCost",
    "StepTime",
    "bucket_sizes",
    "expect_dense",
    "expect_hot",
    "expect_plan",
    "expect_sync",
    "expect_table",
    "expect_table_sync",
    "expect_tables",
    "imbalance",
    "load_calibration",
    "plan_time",
    "predict",
    "save_calibration",
    "step_seconds",
    "step_time",
]
